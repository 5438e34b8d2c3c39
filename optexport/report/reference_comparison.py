"""Compares the stored reference results of two bundles on the inputs that both have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.manifest import Manifest

if TYPE_CHECKING:
    from optexport.parity.cases.case import Case
    from optexport.parity.reference import Reference


@dataclass(frozen=True)
class ReferenceComparison:
    """Result of comparing the reference results of two bundles.

    Attributes:
        shared: Number of inputs that both bundles have.
        difference: First result that differs by more than both tolerances together, as text; None if there is none.
    """

    shared: int
    difference: str | None


def compare(folder_a: Path, a: Manifest, folder_b: Path, b: Manifest) -> ReferenceComparison:
    """Compares the reference results of two bundles in float64, without extreme cases.

    The folders must already be checked against their manifests.

    Raises:
        BundleError: A bundle lacks the results that its manifest names.
    """
    from optexport.cache.keys import of_tensors  # imports torch, which two equal bundles do not need
    from optexport.parity import distances

    reference_a, reference_b = _read(folder_a, a), _read(folder_b, b)

    def digest(case: Case) -> str:  # sorted, because the order of tensors in a file is arbitrary
        return of_tensors([dict(sorted(case.batch.items()))])

    ordinary_a, ordinary_b = _ordinary_cases(a), _ordinary_cases(b)
    numbers_b = {digest(case): number for number, case in enumerate(reference_b.cases) if case.name in ordinary_b}
    shared = 0
    for number_a, case in enumerate(reference_a.cases):
        if case.name not in ordinary_a or (number_b := numbers_b.get(digest(case))) is None:
            continue
        shared += 1
        for name, result_a in reference_a.exact[number_a].items():
            result_b = reference_b.exact[number_b][name]
            problem = distances.find_comparison_problem(result_b, result_a) or distances.find_comparison_problem(
                result_a, result_b
            )
            if problem:
                return ReferenceComparison(shared, f"the originals' {name} at {case.name}: {problem}")
            distance = distances.largest(distances.distance(result_b, result_a))
            tolerance = sum(m.parity.bounds[name].limit for m in (a, b) if name in m.parity.bounds)
            if distance > tolerance:
                text = f"the originals' {name} differ by {distance:.2g} at {case.name}, tolerance {tolerance:.2g}"
                return ReferenceComparison(shared, text)
    return ReferenceComparison(shared, None)


def _read(folder: Path, manifest: Manifest) -> Reference:
    from optexport.bundle.layout import REFERENCE
    from optexport.parity.reference_file import read_reference

    outputs = [output.name for output in manifest.outputs]
    return read_reference(folder / REFERENCE, manifest.reference_cases, outputs)


def _ordinary_cases(manifest: Manifest) -> set[str]:
    extreme = {case for bound in manifest.parity.bounds.values() for case in bound.extremes}
    return set(manifest.reference_cases) - extreme
