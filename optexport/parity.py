"""The proof: does a candidate compute what the original computes, as far as the original's own precision tells?

No fixed tolerance fits all models, so it is measured. The original is run in float64 and in its own precision, and
the distance between the two is the noise floor of this model on these inputs. A candidate passes when its own
distance from float64 stays within a multiple of the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from optexport import distances
from optexport.errors import ParityError, first_line
from optexport.reference import Outputs, Reference
from optexport.runtimes import Run

# Where float64 could not be had, so many units stand in for the floor.
FALLBACK_ULPS = 64
# A limit above this share of the largest value would let anything pass.
LARGEST_LIMIT = 0.1


@dataclass(frozen=True)
class Bound:
    """How far an output may be from what it is compared with.

    Attributes:
        floor: The original's own distance from float64, the largest over all elements and cases.
        limit: The distance from float64 up to which a candidate passes; with atol or rtol, the largest they allow.
        atol: With rtol, a fixed limit instead: ``|candidate - original| <= atol + rtol * |original|``.
    """

    floor: float
    limit: float
    atol: float | None = None
    rtol: float | None = None

    @property
    def fixed(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def allowed(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The allowed distance of each element, given the reference's magnitudes."""
        if self.fixed:
            return (self.atol or 0.0) + (self.rtol or 0.0) * magnitude
        return torch.full_like(magnitude, self.limit)


@dataclass(frozen=True)
class OutputParity:
    """How one output of a candidate compares, over all cases. Distances are the largest over all elements.

    Attributes:
        max_abs: Distance from the reference (float64, or the original where a fixed tolerance is asked for).
        max_rel: The same, relative to the reference's element, or to a millionth of its largest where that is more.
        cosine: Smallest cosine similarity of a case with the reference; 1 is the same direction.
        floor: The original's own distance from float64.
        limit: The distance up to which it passes.
        multiple: ``max_abs`` as a multiple of the floor.
        argmax_agreement: Share of positions whose largest element along the last axis is the same.
        tolerance: The absolute tolerance against the original itself that would just have passed.
        worst_case: The case of ``max_abs``.
        failure: Why it fails; None where it passes.
    """

    output: str
    max_abs: float
    max_rel: float
    cosine: float
    floor: float
    limit: float
    multiple: float
    argmax_agreement: float
    tolerance: float
    worst_case: str
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class PlaceParity:
    """How a candidate compares at one place of the pipeline."""

    place: str
    outputs: tuple[OutputParity, ...]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)


def bounds(
    reference: Reference, multiple: float, atol: float | None = None, rtol: float | None = None
) -> dict[str, Bound]:
    """Measures the noise floor of every output, and sets the limit at a multiple of it.

    Outputs that are not floating point must be equal. Where float64 could not be had, the floor is unknown, and
    `FALLBACK_ULPS` units in the last place of the largest value stand in for it.
    """
    return {name: _bound(name, reference, multiple, atol, rtol) for name in reference.outputs[0]}


def _bound(name: str, reference: Reference, multiple: float, atol: float | None, rtol: float | None) -> Bound:
    pairs = [(outputs[name], exact[name]) for outputs, exact in zip(reference.outputs, reference.exact, strict=True)]
    dtype = pairs[0][0].dtype
    if not dtype.is_floating_point:
        return Bound(0.0, 0.0)
    ordinary = [(o, e, ~distances.marks(o, e)) for o, e in pairs]
    floor = max(distances.largest(distances.distance(o, distances.known(e, o))[kept]) for o, e, kept in ordinary)
    scale = max(distances.largest(distances.finite(o).abs()[kept]) for o, _, kept in ordinary)
    ulps = distances.LEAST_FLOOR_ULPS if reference.fallback is None else FALLBACK_ULPS
    limit = multiple * max(floor, ulps * torch.finfo(dtype).eps * scale)
    if limit > LARGEST_LIMIT * scale and atol is None and rtol is None:
        raise ParityError(
            f"nothing can be proven: {multiple:g} times the noise floor is {limit:.2g}, the largest value {scale:.2g}",
            place=f"output {name}",
            mend="Set parity.atol and parity.rtol to what the task allows, or export in a higher precision.",
        )
    if atol is not None or rtol is not None:
        limit = (atol or 0.0) + (rtol or 0.0) * scale
    return Bound(floor, limit, atol, rtol)


def check(place: str, run: Run, reference: Reference, bounds: Mapping[str, Bound]) -> PlaceParity:
    """Compares a candidate with the original on all cases.

    A candidate that raises fails with what it raised: a size that was baked in shows in this way.
    """
    results: list[Outputs | str] = []
    with torch.no_grad():
        for case in reference.cases:
            try:
                results.append(run(case.batch))
            except Exception as error:  # each runtime raises kinds of its own
                results.append(f"it raised {type(error).__name__}: {first_line(error)[:200]}")
    return _compare_all(place, results, reference, bounds)


def check_original(reference: Reference, bounds: Mapping[str, Bound]) -> PlaceParity:
    """The original against itself in float64: the floor that the other places are measured by."""
    return _compare_all("original", list(reference.outputs), reference, bounds)


def _compare_all(
    place: str, results: Sequence[Outputs | str], reference: Reference, bounds: Mapping[str, Bound]
) -> PlaceParity:
    return PlaceParity(place, tuple(_compare(name, results, reference, bound) for name, bound in bounds.items()))


def _compare(name: str, results: Sequence[Outputs | str], reference: Reference, bound: Bound) -> OutputParity:
    failure: str | None = None
    finite = False
    max_abs = max_rel = tolerance = 0.0
    cosine, agreements, worst = 1.0, [], reference.cases[0].name
    for case, result, originals, exacts in zip(
        reference.cases, results, reference.outputs, reference.exact, strict=True
    ):
        original = originals[name]
        problem = result if isinstance(result, str) else distances.why_incomparable(result.get(name), original)
        if problem is not None:
            nothing = (math.inf, math.inf, 0.0, bound.floor, bound.limit, math.inf, 0.0, math.inf)
            return OutputParity(name, *nothing, case.name, f"at {case.name}: {problem}")
        assert not isinstance(result, str)
        candidate = result[name]
        expected = original if bound.fixed else distances.known(exacts[name], original)
        distance = distances.distance(candidate, expected)
        farthest = distances.largest(distance)
        magnitude = distances.finite(expected).abs()
        allowed = bound.allowed(magnitude)
        if not bound.fixed and original.is_floating_point():
            own = 16 * distances.LEAST_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
            allowed = torch.where(distances.marks(original, exacts[name]), own, allowed)
        finite = finite or original.numel() == 0 or bool(torch.isfinite(original).any())
        if failure is None and (distance > allowed).any():
            failure = f"at {case.name}: {farthest:.3g} from the reference, {distances.largest(allowed):.3g} allowed"
        if farthest >= max_abs:
            max_abs, worst = farthest, case.name
        tolerance = max(tolerance, distances.largest(distances.distance(candidate, original)))
        max_rel = max(
            max_rel, distances.largest(distance / magnitude.clamp(min=max(1e-6 * distances.largest(magnitude), 1e-300)))
        )
        cosine = min(cosine, distances.cosine(candidate, expected))
        agreements.append(distances.argmax_agreement(candidate, original))
    if failure is None and not finite:
        failure = "the original gives nothing but NaN or infinity, so nothing is proven"
    multiple = 0.0 if max_abs == 0 else math.inf if bound.floor == 0 else max_abs / bound.floor
    agreement = sum(agreements) / len(agreements)
    return OutputParity(
        name, max_abs, max_rel, cosine, bound.floor, bound.limit, multiple, agreement, tolerance, worst, failure
    )
