"""Whether the originals of two bundles gave the same, on the inputs that both were proven on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.manifest import Manifest

if TYPE_CHECKING:
    from optexport.parity.cases import Case
    from optexport.parity.reference import Reference


@dataclass(frozen=True)
class Found:
    """What the stored results of two originals tell.

    Attributes:
        shared: How many inputs both hold.
        apart: The first result that is farther apart than both proofs allow, as words; None where none is.
    """

    shared: int
    apart: str | None


def compare(one: Path, a: Manifest, other: Path, b: Manifest) -> Found:
    """Compares what the originals of two bundles gave in float64; extreme inputs are left out.

    Args:
        one, other: The folders, whose files are those of their manifests.

    Raises:
        BundleError: One of them holds no results as its manifest names them.
    """
    from optexport.cache.keys import of_tensors  # torch, which two equal bundles do not need
    from optexport.parity import distances

    ours, theirs = _read(one, a), _read(other, b)

    def content(case: Case) -> str:  # files keep tensors in an order of their own
        return of_tensors([dict(sorted(case.batch.items()))])

    known = {content(case): number for number, case in enumerate(theirs.cases) if case.name in _judged(b)}
    shared = 0
    for number, case in enumerate(ours.cases):
        if case.name not in _judged(a) or (same := known.get(content(case))) is None:
            continue
        shared += 1
        for name, result in ours.exact[number].items():
            met, bounds = theirs.exact[same][name], [m.parity.bounds[name] for m in (a, b) if name in m.parity.bounds]
            if why := distances.why_incomparable(met, result) or distances.why_incomparable(result, met):
                return Found(shared, f"of the originals' {name} at {case.name}, {why}")
            far, limit = distances.largest(distances.distance(met, result)), sum(bound.limit for bound in bounds)
            if far > limit:
                apart = f"the originals' {name} are {far:.2g} apart at {case.name}, of {limit:.2g} allowed"
                return Found(shared, apart)
    return Found(shared, None)


def _read(folder: Path, manifest: Manifest) -> Reference:
    from optexport.bundle.layout import REFERENCE
    from optexport.parity.reference_file import read_reference

    return read_reference(folder / REFERENCE, manifest.reference_cases, [each.name for each in manifest.outputs])


def _judged(manifest: Manifest) -> set[str]:
    extreme = {case for bound in manifest.parity.bounds.values() for case in bound.extremes}
    return set(manifest.reference_cases) - extreme
