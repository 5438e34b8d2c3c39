"""The words of a passed check, for the terminal, the report and MLflow."""

from __future__ import annotations

import math

from optexport.bundle.manifest import Manifest
from optexport.bundle.parity_records import ParityRecord


def passed_text(manifest: Manifest) -> str:
    """Returns what passed: files, cases, the largest share of a tolerance, and files that only gates check."""
    lowered = [a for a in manifest.artifacts if a.precision is not None]
    names = ", ".join(f"{a.format} ({a.precision.precision})" for a in lowered if a.precision is not None)
    gates = f"; {names} {'meets' if len(lowered) == 1 else 'meet'} the gates" if lowered else ""
    files = len(manifest.artifacts)
    return f"{files} {'file' if files == 1 else 'files'}, {check_text(manifest.parity)}{gates}"


def check_text(parity: ParityRecord) -> str:
    """Returns the number of cases, and the largest share of the tolerance that a target uses."""
    cases = f"{len(parity.cases):,} {'case' if len(parity.cases) == 1 else 'cases'}"
    share = parity.used_share
    return f"{cases}, {'no tolerances' if share is None else f'at most {share_text(share)} of the tolerance used'}"


def share_text(share: float | None) -> str:
    """Returns a share of the tolerance in percent, or an empty text if it is not finite."""
    return f"{share:.0%}".replace("%", " %") if share is not None and math.isfinite(share) else ""
