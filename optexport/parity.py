"""The proof: does a candidate compute what the original computes, as far as the original's own precision tells?

No fixed tolerance fits all models, so it is measured. The original is run in float64 and in its own precision, and
the distance between the two is the noise floor of this model on these inputs. A candidate passes when its own
distance from float64 stays within a multiple of the floor.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from optexport.cases import Batch, Case
from optexport.errors import ParityError, TraceError, first_line
from optexport.runtimes import Run

Outputs = dict[str, torch.Tensor]

# The floor of an output that is not rounded at all (a gather) is zero; this many units in the last place of its
# largest value stand in for it.
LEAST_FLOOR_ULPS = 2
FALLBACK_ULPS = 64
# Noise this many times that of a quiet case that leaves fewer than half the digits is no noise: float64 goes another
# way there. The noise of a trained encoder was seen to differ by 120 times between sizes.
_UNGUIDED_TIMES = 64
# A limit above this share of the largest value would let anything pass.
LARGEST_LIMIT = 0.1
# Values above 2 ** 13 with a gap of a factor of 2 ** 10 below them are no results but marks, as the -1e30 of a masked
# position is, if they are not rounded as results are. They are kept out of floor and scale, which they would drown, and
# must be met by themselves to a few units in the last place.
_LEAST_MARK_EXPONENT = 13
_GAP_EXPONENTS = 10


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
class Reference:
    """What the original computes.

    Attributes:
        outputs: In its own precision, per case.
        exact: In float64, per case; where the model does not run in float64, the same as `outputs`.
        fallback: Why float64 could not be had; None where it could.
        unguided: Outputs and cases of which float64 says nothing, so that `exact` holds the original's own values.
    """

    cases: tuple[Case, ...]
    outputs: tuple[Outputs, ...]
    exact: tuple[Outputs, ...]
    fallback: str | None = None
    unguided: tuple[str, ...] = ()

    def at_traced_shape(self) -> Reference:
        """Only the cases shaped as the first, the traced one: all that a file of fixed shape can be asked for."""

        def shapes(case: Case) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in case.batch.items()}

        kept = [i for i, case in enumerate(self.cases) if shapes(case) == shapes(self.cases[0])]
        return Reference(
            tuple(self.cases[i] for i in kept),
            tuple(self.outputs[i] for i in kept),
            tuple(self.exact[i] for i in kept),
            self.fallback,
            self.unguided,
        )


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


def reference(
    run: Callable[[nn.Module, Batch], Outputs], model: nn.Module, cases: Sequence[Case], *, declared: bool = True
) -> Reference:
    """Runs the original on all cases, in its own precision and in float64.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original; a copy of it is made for float64.
        declared: Whether the user declared the sizes. If not, those that the original itself refuses are left out.

    Raises:
        TraceError: The original itself fails on a case that the user declared.
    """
    checked: list[Case] = []
    outputs: list[Outputs] = []
    with torch.no_grad(), _buffers_kept(model):
        for case in cases:
            try:
                outputs.append(run(model, case.batch))
                if not checked:
                    _check_repeatable(outputs[0], run(model, case.batch), type(model).__name__)
            except TraceError:
                raise
            except Exception as error:  # a model's own code may raise anything
                if not declared and checked:
                    continue
                raise TraceError(
                    f"the model itself fails at {case.name}: {type(error).__name__}: {first_line(error)}",
                    place=type(model).__name__,
                    mend="Declare in inputs.dynamic only the sizes that it takes."
                    if checked
                    else "Give inputs of the dtypes, ranges and sizes that it takes.",
                ) from error
            checked.append(case)
        if not any(tensor.is_floating_point() for tensor in [*model.parameters(), *outputs[0].values()]):
            return Reference(tuple(checked), tuple(outputs), tuple(outputs))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
                double = copy.deepcopy(model).double()
            exact = tuple(run(double, _double(case.batch)) for case in checked)
        except Exception as error:  # likewise; it may also hold a dtype of its own
            reason = f"{type(error).__name__}: {first_line(error)}"
            return Reference(tuple(checked), tuple(outputs), tuple(outputs), reason)
    return _guided(Reference(tuple(checked), tuple(outputs), exact))


def _guided(reference: Reference) -> Reference:
    """The same, but compared with the original itself where float64 computes something else.

    A mask of -1e9 on a whole row is all that is left of the scores in float32, but not in float64. The distance there
    is no rounding, and as a floor it would let faults pass everywhere else.
    """
    exact, unguided = [dict(outputs) for outputs in reference.exact], []
    for name, traced in reference.outputs[0].items():
        if not traced.is_floating_point():
            continue
        noise = [_relative_noise(o[name], e[name]) for o, e in zip(reference.outputs, exact, strict=True)]
        quiet, half_the_digits = sorted(noise)[len(noise) // 4], torch.finfo(traced.dtype).eps ** 0.5
        for index, case in enumerate(reference.cases):
            if noise[index] > max(_UNGUIDED_TIMES * quiet, half_the_digits):
                exact[index][name] = reference.outputs[index][name].double()
                unguided.append(f"{name} at {case.name}")
    return replace(reference, exact=tuple(exact), unguided=tuple(unguided))


def _relative_noise(original: torch.Tensor, exact: torch.Tensor) -> float:
    kept = ~_marks(original, exact)
    scale = _max(_finite(original).abs()[kept])
    return _max(_distance(original, _known(exact, original))[kept]) / scale if scale else 0.0


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back, at its end, what a model that changes its own buffers has written there."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _check_repeatable(first: Outputs, second: Outputs, place: str) -> None:
    """Refuses a model that gives other results on the same input: its floor would be its own randomness."""
    for name, tensor in first.items():
        distance = _max(_distance(tensor, second[name]))
        scale = _max(_finite(tensor).abs())
        ulps = LEAST_FLOOR_ULPS * torch.finfo(tensor.dtype).eps * scale if tensor.is_floating_point() else 0.0
        if distance > 16 * ulps:
            raise TraceError(
                f"the model gives other results when it is run again on the same input ({name} by {distance:.2g})",
                place=place,
                mend="It draws random numbers, or keeps state between calls; neither can be exported and proven.",
            )


def _double(batch: Batch) -> Batch:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


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
    ordinary = [(o, e, ~_marks(o, e)) for o, e in pairs]
    floor = max(_max(_distance(o, _known(e, o))[kept]) for o, e, kept in ordinary)
    scale = max(_max(_finite(o).abs()[kept]) for o, _, kept in ordinary)
    ulps = LEAST_FLOOR_ULPS if reference.fallback is None else FALLBACK_ULPS
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
        problem = result if isinstance(result, str) else _why_incomparable(result.get(name), original)
        if problem is not None:
            nothing = (math.inf, math.inf, 0.0, bound.floor, bound.limit, math.inf, 0.0, math.inf)
            return OutputParity(name, *nothing, case.name, f"at {case.name}: {problem}")
        assert not isinstance(result, str)
        candidate = result[name]
        expected = original if bound.fixed else _known(exacts[name], original)
        distance = _distance(candidate, expected)
        magnitude = _finite(expected).abs()
        allowed = bound.allowed(magnitude)
        if not bound.fixed and original.is_floating_point():
            own = 16 * LEAST_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
            allowed = torch.where(_marks(original, exacts[name]), own, allowed)
        finite = finite or original.numel() == 0 or bool(torch.isfinite(original).any())
        if failure is None and (distance > allowed).any():
            failure = f"at {case.name}: {_max(distance):.3g} from the reference, {_max(allowed):.3g} allowed"
        if _max(distance) >= max_abs:
            max_abs, worst = _max(distance), case.name
        tolerance = max(tolerance, _max(_distance(candidate, original)))
        max_rel = max(max_rel, _max(distance / magnitude.clamp(min=max(1e-6 * _max(magnitude), 1e-300))))
        cosine = min(cosine, _cosine(candidate, expected))
        agreements.append(_argmax_agreement(candidate, original))
    if failure is None and not finite:
        failure = "the original gives nothing but NaN or infinity, so nothing is proven"
    multiple = 0.0 if max_abs == 0 else math.inf if bound.floor == 0 else max_abs / bound.floor
    agreement = sum(agreements) / len(agreements)
    return OutputParity(
        name, max_abs, max_rel, cosine, bound.floor, bound.limit, multiple, agreement, tolerance, worst, failure
    )


def _known(exact: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """What a candidate is compared with: the float64 values, or the original's own where those say nothing.

    That is where float64 alone overflowed, for marks such as the smallest float32, and for integers.
    """
    if not original.is_floating_point():
        return original
    exact = exact.double()
    own = (~torch.isfinite(exact) & torch.isfinite(original)) | _marks(original, exact)
    return torch.where(own, original.double(), exact)


def _marks(original: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Which values are marks: far above the others, and the same in float64, or there the mark of float64."""
    magnitude = _finite(original).abs()
    exponents = torch.frexp(magnitude[magnitude > 0]).exponent.unique()
    above_gap = exponents[1:][(exponents.diff() > _GAP_EXPONENTS) & (exponents[1:] > _LEAST_MARK_EXPONENT)]
    if not above_gap.numel():
        return torch.zeros_like(magnitude, dtype=torch.bool)
    exact = exact.double()
    same = (exact - original.double()).abs() <= 2 * LEAST_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
    other = ~torch.isfinite(exact) | (exact.abs() > 2.0**_GAP_EXPONENTS * magnitude)
    return (magnitude >= 2.0 ** (int(above_gap[0]) - 1)) & (same | other)


def _why_incomparable(candidate: torch.Tensor | None, original: torch.Tensor) -> str | None:
    if candidate is None:
        return "the output is missing"
    if candidate.shape != original.shape:
        return f"its shape is {list(candidate.shape)}, and the original's {list(original.shape)}"
    if candidate.dtype != original.dtype:
        return f"its dtype is {candidate.dtype}, and the original's {original.dtype}"
    if original.is_floating_point():
        strange = ~torch.isfinite(candidate) & torch.isfinite(original)
        if strange.any():
            return f"{int(strange.sum())} elements are NaN or infinite where the original's are not"
        unlike = torch.isinf(original) & (candidate != original)
        if unlike.any():
            return f"{int(unlike.sum())} elements are not infinite where the original's are"
    return None


def _distance(candidate: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Element-wise distance in float64; zero where the reference itself is NaN or infinite."""
    distance = _finite(candidate.double() - expected.double()).abs()
    if expected.is_floating_point():
        return distance
    return torch.where(candidate == expected, 0.0, distance.clamp(min=1.0))  # float64 does not hold every integer


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _max(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _cosine(candidate: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = candidate.double().flatten(), expected.double().flatten()
    finite = torch.isfinite(a) & torch.isfinite(b)
    a, b = a[finite], b[finite]
    if torch.equal(a, b) or a.norm() * b.norm() == 0:
        return 1.0 if torch.equal(a, b) else 0.0
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def _argmax_agreement(candidate: torch.Tensor, original: torch.Tensor) -> float:
    if original.dim() == 0 or original.numel() == 0:
        return 1.0
    return float((candidate.double().argmax(-1) == original.double().argmax(-1)).double().mean())
