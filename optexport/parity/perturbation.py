"""How far rounding alone moves the original at a batch where its result hangs on the last bits of its weights.

The floor is what a few ways of running the original happened to round by. Of most batches that is a fair sample, and of
some it is not: where a channel of a norm hardly varies, or a mask of -1e4 leaves four digits of the scores, a value
goes one way or another by a last bit, and in the ways that were tried it went the same. Weights are rounded themselves,
so that an original whose weights are half a unit in the last place away is as good as it is; what many of these give
says what rounding does. They are run only where a result fails by little, and at few of the batches, as faults mostly
do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import memory
from optexport.parity import distances
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.noise_floor import LARGEST_LIMIT, Tolerance
from optexport.parity.reference import Call, Reference

_ORIGINALS = 32
# What is so many times beyond its limit, or fails at a larger share of the batches, is no matter of rounding.
_FARTHEST_TIMES = 16
_LARGEST_SHARE = 0.25
# The worst of so many is about twice the floor of an ordinary batch: the multiple of it is half that of the floor.
_WORST_IN_FLOORS = 2

# An output and a case.
_Where = tuple[str, str]


def bounds(
    proof: ParityChecker,
    target: TargetParity,
    run: Call,
    model: nn.Module,
    multiple: float,
    seed: int,
    measured: Mapping[str, Tolerance],
) -> dict[str, Tolerance] | None:
    """Bounds with which a place passes that failed by little, at few cases; None where rounding does not explain it.

    Each of these cases has a limit of its own, by the farthest that the original was seen to be from float64 there.
    How little, and how few, is by the limits as they were measured, and by all cases that any place was let off: a
    limit that was raised for one place raises no other.

    Args:
        measured: The bounds before any case got a limit here.
    """
    failing = {
        (output.output, case.case): case.distance for output in target.outputs for case in output.cases if case.failure
    }
    cases = {case for _, case in failing}
    raised = {
        case
        for output, bound in proof.bounds.items()
        for case, limit in bound.extremes.items()
        if limit != measured[output].extremes.get(case)
    }
    tried = {case.case for output in target.outputs for case in output.cases}
    ordinary = {case.name for case in proof.reference.cases if not case.extreme}
    if not failing or len(cases | raised) > _LARGEST_SHARE * len(tried & ordinary) or memory.is_large(model):
        return None
    found = dict(proof.bounds)
    farthest_allowed: dict[_Where, float] = {}
    for (output, case), distance in failing.items():
        bound = measured[output]
        farthest_allowed[output, case] = _FARTHEST_TIMES * bound.extremes.get(case, bound.limit)
        if bound.fixed or not math.isfinite(distance) or distance > farthest_allowed[output, case]:
            return None
    reference = proof.reference.only([i for i, case in enumerate(proof.reference.cases) if case.name in cases])
    try:
        farthest_seen = _farthest(reference, run, model, seed)
    except Exception:  # a model's own code may raise anything; nor can every model be copied
        return None
    for (output, case), farthest in farthest_seen.items():
        if (output, case) in failing:
            limit = min(multiple / _WORST_IN_FLOORS * farthest, farthest_allowed[output, case])
            if not failing[output, case] <= limit <= LARGEST_LIMIT * _scale(reference, output, case):
                return None
            found[output] = replace(found[output], extremes={**found[output].extremes, case: limit})
    return found


def _farthest(reference: Reference, run: Call, model: nn.Module, seed: int) -> dict[_Where, float]:
    """How far originals nearby are from float64; of outputs of which one of them gives NaN or infinity, infinitely."""
    found: dict[_Where, float] = {}
    another = _originals(model, seed)
    with torch.no_grad():
        for _ in range(_ORIGINALS):
            moved = another()
            outputs = tuple(run(moved, case.batch) for case in reference.cases)
            noise = replace(reference, outputs=outputs, other_noise=()).noise
            for case, results, own in zip(reference.cases, outputs, noise, strict=True):
                for name, tensor in results.items():
                    farthest = own[name] if bool(torch.isfinite(tensor).all()) else math.inf
                    found[name, case.name] = max(found.get((name, case.name), 0.0), farthest)
    return found


def _originals(model: nn.Module, seed: int) -> Callable[[], nn.Module]:
    """Gives a copy of the model, at each call with other weights, half a unit in the last place away at most.

    Powers of two stay: they are exact, as what people write into a model's code mostly is.
    """
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)

    def another() -> nn.Module:
        for own, other in zip(model.parameters(), moved.parameters(), strict=True):
            if own.is_floating_point():
                steps = torch.rand(own.shape, generator=generator, dtype=torch.float64) - 0.5
                steps[own.double().frexp().mantissa.abs() == 0.5] = 0
                other.copy_(own.double() * (1 + torch.finfo(own.dtype).eps * steps))
        return moved

    return another


def _scale(reference: Reference, output: str, case: str) -> float:
    tensors = (o[output] for c, o in zip(reference.cases, reference.outputs, strict=True) if c.name == case)
    return max(distances.largest(distances.finite(tensor).abs()) for tensor in tensors)
