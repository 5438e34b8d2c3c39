"""Noise of the original under perturbed weights, for batches that depend on last bits.

The noise floor comes from a few runs of the original. These sample the rounding of most batches well, but not of all. A
last bit decides a value if a norm's channel is almost constant, or if a mask of -1e4 leaves the scores four digits. All
runs may then round the same way. Weights are rounded themselves, so a model with weights half a unit in the last place
away is equally valid. The outputs of many such models measure the effect of rounding. They run only if a target fails
by little and on few batches, because most faults do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import model_memory
from optexport.parity import distances
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.noise_floor import LARGEST_LIMIT, Tolerance
from optexport.parity.reference import Call, Reference

_PERTURBED_RUNS = 32
# Rounding does not explain a distance more than this many times its limit.
_FARTHEST_TIMES = 16
# Rounding does not explain failures on more than this share of the batches.
_LARGEST_SHARE = 0.25
# The largest noise of all perturbed models is about twice an ordinary noise floor, so half the multiple applies to it.
_WORST_IN_FLOORS = 2

# Names of an output and a case.
_OutputCase = tuple[str, str]


def find_raised_tolerances(
    checker: ParityChecker,
    target: TargetParity,
    run: Call,
    model: nn.Module,
    noise_multiple: float,
    seed: int,
    measured: Mapping[str, Tolerance],
) -> dict[str, Tolerance] | None:
    """Returns tolerances that let a target pass, if rounding explains its few small failures.

    Each failing case gets its own limit, from the largest distance of a perturbed original from float64. "Small" refers
    to the limits in `measured`. "Few" counts the cases that any target needs raised limits for. Raising a limit
    for one target does not raise it for others.

    Args:
        checker: Compared the target.
        target: The failed comparison.
        run: Runs a model on a batch and names its outputs.
        model: The original model.
        noise_multiple: Tolerance as a multiple of the noise floor.
        measured: Tolerances before this function raised any limit.

    Returns:
        None if rounding does not explain the failure.
    """
    failing = {
        (output.output, case.case): case.distance for output in target.outputs for case in output.cases if case.failure
    }
    cases = {case for _, case in failing}
    raised = {
        case
        for output, tolerance in checker.tolerances.items()
        for case, limit in tolerance.own_limits.items()
        if limit != measured[output].own_limits.get(case)
    }
    checked = {case.case for output in target.outputs for case in output.cases}
    ordinary = {case.name for case in checker.reference.cases if not case.extreme}
    if not failing or len(cases | raised) > _LARGEST_SHARE * len(checked & ordinary) or model_memory.is_large(model):
        return None
    tolerances = dict(checker.tolerances)
    farthest_allowed: dict[_OutputCase, float] = {}
    for (output, case), distance in failing.items():
        tolerance = measured[output]
        farthest_allowed[output, case] = _FARTHEST_TIMES * tolerance.own_limits.get(case, tolerance.limit)
        if tolerance.fixed or not math.isfinite(distance) or distance > farthest_allowed[output, case]:
            return None
    reference = checker.reference.select([i for i, case in enumerate(checker.reference.cases) if case.name in cases])
    try:
        farthest_measured = measure_farthest(reference, run, model, seed)
    except Exception:  # model code may raise anything, and some models cannot be copied
        return None
    for (output, case), farthest in farthest_measured.items():
        if (output, case) in failing:
            limit = min(noise_multiple / _WORST_IN_FLOORS * farthest, farthest_allowed[output, case])
            if not failing[output, case] <= limit <= LARGEST_LIMIT * _scale(reference, output, case):
                return None
            tolerances[output] = replace(tolerances[output], own_limits={**tolerances[output].own_limits, case: limit})
    return tolerances


def measure_farthest(reference: Reference, run: Call, model: nn.Module, seed: int) -> dict[_OutputCase, float]:
    """Measures perturbed models' distance from float64, by output and case; infinite if one gives NaN or infinity."""
    distances_from_exact: dict[_OutputCase, float] = {}
    perturb = _perturber(model, seed)
    with torch.no_grad():
        for _ in range(_PERTURBED_RUNS):
            perturbed = perturb()
            outputs = tuple(run(perturbed, case.batch) for case in reference.cases)
            noise = replace(reference, outputs=outputs, variation_noise=()).noise
            for case, results, case_noise in zip(reference.cases, outputs, noise, strict=True):
                for name, tensor in results.items():
                    farthest = case_noise[name] if bool(torch.isfinite(tensor).all()) else math.inf
                    distances_from_exact[name, case.name] = max(
                        distances_from_exact.get((name, case.name), 0.0), farthest
                    )
    return distances_from_exact


def _perturber(model: nn.Module, seed: int) -> Callable[[], nn.Module]:
    """Returns a function that moves a copy's weights by up to half a unit in the last place.

    Powers of two stay, because constants in model code are mostly exact powers of two.
    """
    perturbed, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)

    def another() -> nn.Module:
        for original, copied in zip(model.parameters(), perturbed.parameters(), strict=True):
            if original.is_floating_point():
                steps = torch.rand(original.shape, generator=generator, dtype=torch.float64) - 0.5
                steps[original.double().frexp().mantissa.abs() == 0.5] = 0
                copied.copy_(original.double() * (1 + torch.finfo(original.dtype).eps * steps))
        return perturbed

    return another


def _scale(reference: Reference, output: str, case: str) -> float:
    tensors = (o[output] for c, o in zip(reference.cases, reference.outputs, strict=True) if c.name == case)
    return max(distances.max_magnitude(tensor) for tensor in tensors)
