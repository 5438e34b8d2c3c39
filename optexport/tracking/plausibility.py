"""Checks that a bundle's figures are consistent with a passed parity check."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel

from optexport.bundle import digest_json
from optexport.bundle.layout import MANIFEST
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord, FigureRecord
from optexport.bundle.parity_records import TargetRecord
from optexport.config.metrics import MEASURES
from optexport.config.schema import ParityConfig
from optexport.errors import BundleError, short_line
from optexport.tracking.bundle_record import BundleRecord

# Figures in a manifest are rounded to three digits.
_ROUNDING = 1.01


class _Proven(BaseModel):
    """Parity settings of a bundle's config."""

    parity: ParityConfig


def check_possible(finished: BundleRecord) -> None:
    """Checks that a bundle's figures can come from a passed parity check.

    The author of a bundle can write other figures into its files.

    Raises:
        BundleError: The figures contradict a passed check.
    """
    manifest = finished.manifest
    digest_json.validated(_Proven, manifest.config, finished.folder / MANIFEST)
    bench = finished.measured.bench
    wrong = [
        *(what for target in manifest.parity.targets for what in _impossible(manifest, target)),
        *(f"{row.artifact} at {row.shape}: {row.low_ms:g} to {row.high_ms:g} ms" for row in _reversed(bench)),
    ]
    if wrong:
        told = short_line(wrong[0])
        raise BundleError(f"no bundle that passed says so: {told}", location=str(finished.folder / MANIFEST))


def _impossible(manifest: Manifest, target: TargetRecord) -> Iterator[str]:
    for output in target.outputs if target.precision is None else ():
        # Each case may have a different limit; the largest one applies here.
        limit = max((math.inf if case.limit is None else case.limit for case in output.cases), default=math.inf)
        floor = manifest.parity.bounds[output.output].floor if output.output in manifest.parity.bounds else math.inf
        if (output.multiple or 0.0) * floor > _ROUNDING * limit or any(case.failure for case in output.cases):
            yield f"{target.target}, {output.output}: {output.multiple} times a floor of {floor:g}, {limit:g} allowed"
    for decision in target.decisions:
        # The interval is not checked, because it may exceed the range of the metric. The range of a custom metric is
        # unknown.
        least = MEASURES[decision.measure][0] if decision.measure in MEASURES else None
        if decision.failure is not None:
            yield f"{target.title}, {decision.measure}: {decision.failure}"
        elif least is not None and decision.mean is not None and not least <= decision.mean <= 1:
            yield f"{target.title}, {decision.measure}: {decision.mean:g}"


def _reversed(bench: BenchRecord | None) -> Iterator[FigureRecord]:
    for row in [] if bench is None else bench.figures:
        if row.low_ms is not None and row.high_ms is not None and not 0 < row.low_ms <= row.high_ms:
            yield row
