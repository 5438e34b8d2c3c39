"""Noise floor of an output, and the tolerance derived from it.

No fixed tolerance fits all models, so it is measured. The original runs in float64 and in its own precision. The
distance between the two results is the noise floor of this model on these inputs. A target passes if its distance from
float64 is at most a multiple of the noise floor.
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

# Units in the last place that replace the noise floor if float64 is not available.
FALLBACK_ULPS = 64
# Extreme cases find gross faults and allow this many times more rounding. Correct folds of batch norms need it on
# zeros.
_EXTREME_TIMES = 16
# An ordinary case with values this many times larger than the median case gets its own limit. Its rounding would hide
# faults on all other cases.
_OUTLIER_TIMES = 32
# A limit above this share of the largest value would let anything pass.
LARGEST_LIMIT = 0.1


@dataclass(frozen=True)
class Tolerance:
    """Allowed distance of an output from the reference.

    Attributes:
        floor: Noise floor: largest distance of the original from float64, over elements, ordinary cases and run
            variations.
        limit: Largest distance from float64 that passes; with atol or rtol, the largest that they allow.
        atol: Together with rtol, a fixed limit: ``|candidate - original| <= atol + rtol * |original|``.
        own_limits: Limits of cases that have their own: extreme cases, cases with far larger values than most, cases
            whose limit was raised, and cases that the search added. Infinite if noise exceeds the result; then only
            NaN, infinities, shape and dtype are checked.
    """

    floor: float
    limit: float
    atol: float | None = None
    rtol: float | None = None
    own_limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def allowed(self, case: str, magnitude: torch.Tensor) -> torch.Tensor:
        """Returns the allowed distance per element.

        Args:
            case: Name of the case.
            magnitude: Absolute values of the reference on that case, float64.
        """
        own = torch.full_like(magnitude, self.own_limits.get(case, 0.0 if self.fixed else self.limit))
        return torch.maximum(own, (self.atol or 0.0) + (self.rtol or 0.0) * magnitude) if self.fixed else own


def measure_tolerances(
    reference: Reference,
    noise_multiple: float,
    atol: float | None = None,
    rtol: float | None = None,
    *,
    always_empty: Collection[str] = (),
) -> dict[str, Tolerance]:
    """Returns the tolerance of every output, as a multiple of its noise floor.

    Outputs that are not floating point must be equal. If float64 is not available, `FALLBACK_ULPS` units in the last
    place of the largest value replace the noise floor.

    Args:
        noise_multiple: Tolerance as a multiple of the noise floor.
        atol, rtol: Fixed tolerance that replaces the measured limit.
        always_empty: Outputs that are empty for every input, so that nothing can be wrong.

    Raises:
        ParityError: A limit is too large compared with the values, or an output has no element or no finite value on
            ordinary cases.
    """
    ordinary = [outputs for case, outputs in zip(reference.cases, reference.outputs, strict=True) if not case.extreme]
    for name in reference.outputs[0]:
        if name not in always_empty and not any(outputs[name].numel() for outputs in ordinary):
            raise ParityError(
                "the output cannot be checked, because it has no elements on any of the inputs",
                location=f"output {name}",
                hint="Add inputs on which it has elements to inputs.data, or remove the output (keep-outputs).",
            )
        if name not in always_empty and not any(bool(torch.isfinite(outputs[name]).any()) for outputs in ordinary):
            raise ParityError(
                "the output cannot be checked, because the original model returns only NaN or infinity",
                location=f"output {name}",
                hint="Look for NaN and for very large numbers in the inputs and the weights.",
            )
    return {name: _measure_tolerance(name, reference, noise_multiple, atol, rtol) for name in reference.outputs[0]}


def _measure_tolerance(
    name: str, reference: Reference, noise_multiple: float, atol: float | None, rtol: float | None
) -> Tolerance:
    dtype = reference.outputs[0][name].dtype
    extreme = [index for index, case in enumerate(reference.cases) if case.extreme]
    if not dtype.is_floating_point:
        # The output depends on rounding if float64 gives another value.
        unsure = [i for i in extreme if not torch.equal(reference.outputs[i][name], reference.exact[i][name])]
        return Tolerance(
            0.0, 0.0, own_limits={reference.cases[i].name: math.inf if i in unsure else 0.0 for i in extreme}
        )
    noise = [of_case[name] for of_case in reference.noise]
    scales = [distances.scale(o[name], e[name]) for o, e in zip(reference.outputs, reference.exact, strict=True)]
    ordinary, outliers = _split_outliers(reference, scales)
    floor, scale = (max(values[index] for index in ordinary) for values in (noise, scales))
    limit = _compute_limit(reference, dtype, noise_multiple, floor, scale)
    if limit > LARGEST_LIMIT * scale and atol is None and rtol is None:
        # TorchScript and .pt2 files are mostly bit-exact and pass with any multiple.
        checkable = math.floor(10 * noise_multiple * LARGEST_LIMIT * scale / limit) / 10
        fewer = f"Set parity.noise_multiple to {checkable:g}, or parity" if checkable >= 1 else "Set parity"
        raise ParityError(
            f"the output cannot be checked, because its tolerance {limit:.2g} ({noise_multiple:g} times the noise "
            f"floor) exceeds a tenth of its largest value {scale:.2g}",
            location=f"output {name}",
            hint=f"{fewer}.atol and parity.rtol to what the task allows, or export in a higher precision.",
        )
    own_limits = {}
    if scale == 0:  # if all ordinary values are zero, extreme cases are the only evidence and get ordinary limits
        outliers, extreme = [*outliers, *extreme], []
    for index in extreme:  # the limit follows the original's noise there, or its noise elsewhere scaled to these values
        # Uniform inputs such as zeros have equal rows, and a sum that rounds exactly by chance hides the usual noise.
        unlucky = FALLBACK_ULPS * torch.finfo(dtype).eps * scales[index]
        case_limit = (
            _EXTREME_TIMES
            * noise_multiple
            * max(noise[index], unlucky, floor * max(1.0, scales[index] / (scale or 1.0)))
        )
        drowned = case_limit > LARGEST_LIMIT * max(scale, scales[index])
        own_limits[reference.cases[index].name] = math.inf if drowned else case_limit
    if atol is None and rtol is None:
        for index in outliers:
            case_limit = max(limit, _compute_limit(reference, dtype, noise_multiple, noise[index], scales[index]))
            own_limits[reference.cases[index].name] = case_limit
    else:
        limit = (atol or 0.0) + (rtol or 0.0) * scale
    return Tolerance(floor, limit, atol, rtol, own_limits)


def relax_for_lower_precision(tolerances: Mapping[str, Tolerance], reference: Reference) -> dict[str, Tolerance]:
    """Returns tolerances for a target of lower precision: only atol and rtol, if set.

    Gates decide for floating point outputs without a fixed tolerance. Other outputs must still be equal.

    Args:
        tolerances: Tolerance per output of the original's precision.
    """
    return {
        name: tolerance
        if tolerance.fixed or not reference.outputs[0][name].dtype.is_floating_point
        else replace(tolerance, limit=math.inf, own_limits=dict.fromkeys(tolerance.own_limits, math.inf))
        for name, tolerance in tolerances.items()
    }


def measure_slack(name: str, reference: Reference, tolerance: Tolerance, noise_multiple: float) -> float:
    """Returns the largest change of an output by rounding alone, ignoring atol and rtol.

    Args:
        name: Name of the output.
        noise_multiple: Tolerance as a multiple of the noise floor.
    """
    dtype = reference.outputs[0][name].dtype
    if not tolerance.fixed or not dtype.is_floating_point:
        return tolerance.limit
    scales = [distances.scale(o[name], e[name]) for o, e in zip(reference.outputs, reference.exact, strict=True)]
    scale = max(scales[index] for index in _split_outliers(reference, scales)[0])
    return _compute_limit(reference, dtype, noise_multiple, tolerance.floor, scale)


def _compute_limit(
    reference: Reference, dtype: torch.dtype, noise_multiple: float, floor: float, scale: float
) -> float:
    ulps = distances.MIN_FLOOR_ULPS if reference.fallback is None else FALLBACK_ULPS
    return noise_multiple * max(floor, ulps * torch.finfo(dtype).eps * scale)


def _split_outliers(reference: Reference, scales: Sequence[float]) -> tuple[list[int], list[int]]:
    """Splits cases that are not extreme into usual ones and those with far larger values."""
    ordinary = [index for index, case in enumerate(reference.cases) if not case.extreme]
    maximum = _OUTLIER_TIMES * statistics.median_high(scales[index] for index in ordinary)
    outliers = [index for index in ordinary if scales[index] > maximum > 0]
    return [index for index in ordinary if index not in outliers], outliers
