"""The noise floor of an output, and how far from float64 a result may therefore be.

No fixed tolerance fits all models, so it is measured. The original is run in float64 and in its own precision, and
the distance between the two is the noise floor of this model on these inputs. A candidate passes when its own
distance from float64 stays within a multiple of the floor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from optexport.errors import ParityError
from optexport.parity import distances
from optexport.parity.reference import Reference

# Where float64 could not be had, so many units stand in for the floor.
FALLBACK_ULPS = 64
# At extreme cases, where gross faults show, rounding is given so many times more room: honest folds of batch norms
# were seen to need it at zeros.
_EXTREME_TIMES = 16
# An ordinary case whose values are so many times as large as those of most has a limit of its own: what it rounds by
# would let faults pass everywhere else.
_OUTLIER_TIMES = 32
# A limit above this share of the largest value would let anything pass.
LARGEST_LIMIT = 0.1


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from what it is compared with.

    Attributes:
        floor: The original's own distance from float64, the largest over all elements, ordinary cases and ways of
            running it.
        limit: The distance from float64 up to which a candidate passes; with atol or rtol, the largest they allow.
        atol: With rtol, a fixed limit instead: ``|candidate - original| <= atol + rtol * |original|``.
        extremes: The limits of cases that have limits of their own: those that are extreme, and those whose values are
            far larger than those of most; infinite where noise drowns the result, so that only NaN, infinities, shape
            and dtype are checked there.
    """

    floor: float
    limit: float
    atol: float | None = None
    rtol: float | None = None
    extremes: Mapping[str, float] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def allowed(self, case: str, magnitude: torch.Tensor) -> torch.Tensor:
        """The allowed distance of each element, given a case and the reference's magnitudes there."""
        own = torch.full_like(magnitude, self.extremes.get(case, 0.0 if self.fixed else self.limit))
        return torch.maximum(own, (self.atol or 0.0) + (self.rtol or 0.0) * magnitude) if self.fixed else own


def bounds(
    reference: Reference,
    multiple: float,
    atol: float | None = None,
    rtol: float | None = None,
    *,
    always_empty: Collection[str] = (),
) -> dict[str, Tolerance]:
    """Sets the limit of every output at a multiple of its noise floor.

    Outputs that are not floating point must be equal. Where float64 could not be had, the floor is unknown, and
    `FALLBACK_ULPS` units in the last place of the largest value stand in for it.

    Args:
        always_empty: The outputs that hold no element whatever the inputs are, of which nothing can be wrong.

    Raises:
        ParityError: The limit of an output is no small part of its values, or it has none, or none that is finite, in
            any ordinary case, so that nothing could be proven.
    """
    ordinary = [outputs for case, outputs in zip(reference.cases, reference.outputs, strict=True) if not case.extreme]
    for name in reference.outputs[0]:
        if name not in always_empty and not any(outputs[name].numel() for outputs in ordinary):
            raise ParityError(
                "nothing can be proven: the model gives no element of it on any of the inputs",
                location=f"output {name}",
                hint="Give inputs on which it gives some, as inputs.data, or leave the output out (keep-outputs).",
            )
        if name not in always_empty and not any(bool(torch.isfinite(outputs[name]).any()) for outputs in ordinary):
            raise ParityError(
                "nothing can be proven: the model itself gives nothing but NaN or infinity on all of the inputs",
                location=f"output {name}",
                hint="Look for NaN, or numbers that are too large, in the inputs and the weights.",
            )
    return {name: _bound(name, reference, multiple, atol, rtol) for name in reference.outputs[0]}


def _bound(name: str, reference: Reference, multiple: float, atol: float | None, rtol: float | None) -> Tolerance:
    dtype = reference.outputs[0][name].dtype
    extreme = [index for index, case in enumerate(reference.cases) if case.extreme]
    if not dtype.is_floating_point:
        # Where float64 gives others, what the original gives hangs on rounding.
        unsure = [i for i in extreme if not torch.equal(reference.outputs[i][name], reference.exact[i][name])]
        return Tolerance(
            0.0, 0.0, extremes={reference.cases[i].name: math.inf if i in unsure else 0.0 for i in extreme}
        )
    noise = [of_case[name] for of_case in reference.noise]
    scales = [distances.scale(o[name], e[name]) for o, e in zip(reference.outputs, reference.exact, strict=True)]
    ordinary, outliers = _apart(reference, scales)
    floor, scale = (max(values[index] for index in ordinary) for values in (noise, scales))
    limit = _measured_limit(reference, dtype, multiple, floor, scale)
    if limit > LARGEST_LIMIT * scale and atol is None and rtol is None:
        # Files of torch are mostly equal to the original to the bit, and pass with any multiple.
        provable = math.floor(10 * multiple * LARGEST_LIMIT * scale / limit) / 10
        fewer = f"Set parity.noise_multiple to {provable:g}, or parity" if provable >= 1 else "Set parity"
        raise ParityError(
            f"nothing can be proven: {multiple:g} times the noise floor is {limit:.2g}, the largest value {scale:.2g}",
            location=f"output {name}",
            hint=f"{fewer}.atol and parity.rtol to what the task allows, or export in a higher precision.",
        )
    extremes = {}
    if scale == 0:  # of nothing but zeros elsewhere, extreme cases are the whole evidence, and are held as others are
        outliers, extreme = [*outliers, *extreme], []
    for index in extreme:  # as noisy as the original there, or in proportion as noisy as it is elsewhere
        # Of zeros, say, all rows are alike, and one sum that happens to round well says nothing of another order of it.
        unlucky = FALLBACK_ULPS * torch.finfo(dtype).eps * scales[index]
        own = _EXTREME_TIMES * multiple * max(noise[index], unlucky, floor * max(1.0, scales[index] / (scale or 1.0)))
        drowned = own > LARGEST_LIMIT * max(scale, scales[index])
        extremes[reference.cases[index].name] = math.inf if drowned else own
    if atol is None and rtol is None:
        for index in outliers:
            own = max(limit, _measured_limit(reference, dtype, multiple, noise[index], scales[index]))
            extremes[reference.cases[index].name] = own
    else:
        limit = (atol or 0.0) + (rtol or 0.0) * scale
    return Tolerance(floor, limit, atol, rtol, extremes)


def of_lower_precision(given: Mapping[str, Tolerance], reference: Reference) -> dict[str, Tolerance]:
    """The bounds of a file in fewer bits than the original: only atol and rtol, or else none, as its gates decide.

    What is not floating point must be equal all the same.
    """
    return {
        name: bound
        if bound.fixed or not reference.outputs[0][name].dtype.is_floating_point
        else replace(bound, limit=math.inf, extremes=dict.fromkeys(bound.extremes, math.inf))
        for name, bound in given.items()
    }


def rounding(name: str, reference: Reference, bound: Tolerance, multiple: float) -> float:
    """How far rounding alone may move a value of an output: its limit, whatever atol and rtol allow."""
    dtype = reference.outputs[0][name].dtype
    if not bound.fixed or not dtype.is_floating_point:
        return bound.limit
    scales = [distances.scale(o[name], e[name]) for o, e in zip(reference.outputs, reference.exact, strict=True)]
    scale = max(scales[index] for index in _apart(reference, scales)[0])
    return _measured_limit(reference, dtype, multiple, bound.floor, scale)


def _measured_limit(reference: Reference, dtype: torch.dtype, multiple: float, floor: float, scale: float) -> float:
    ulps = distances.LEAST_FLOOR_ULPS if reference.fallback is None else FALLBACK_ULPS
    return multiple * max(floor, ulps * torch.finfo(dtype).eps * scale)


def _apart(reference: Reference, scales: Sequence[float]) -> tuple[list[int], list[int]]:
    """The cases that are neither extreme nor of values far larger than those of most; and the latter."""
    given = [index for index, case in enumerate(reference.cases) if not case.extreme]
    most = _OUTLIER_TIMES * statistics.median_high(scales[index] for index in given)
    outliers = [index for index in given if scales[index] > most > 0]
    return [index for index in given if index not in outliers], outliers
