"""How far two tensors are apart, and which of their values are no results but marks."""

from __future__ import annotations

import math

import torch

# The floor of an output that is not rounded at all (a gather) is zero; this many units in the last place of its
# largest value stand in for it.
LEAST_FLOOR_ULPS = 2
# Values above 2 ** 13 with a gap of a factor of 2 ** 10 below them are no results but marks, as the -1e30 of a masked
# position is, if they are not rounded as results are. They are kept out of floor and scale, which they would drown, and
# must be met by themselves to a few units in the last place.
_LEAST_MARK_EXPONENT = 13
_GAP_EXPONENTS = 10


def known(exact: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """What a candidate is compared with: the float64 values, or the original's own where those say nothing.

    That is where float64 alone overflowed, for marks such as the smallest float32, and for integers.
    """
    if not original.is_floating_point():
        return original
    exact = exact.double()
    if _all_below(exact, math.inf) and _all_below(original, 2.0**_LEAST_MARK_EXPONENT):
        return exact
    own = (~torch.isfinite(exact) & torch.isfinite(original)) | marks(original, exact)
    return torch.where(own, original.double(), exact)


def scale(original: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of the results, of which marks are none."""
    return largest(finite(original).abs()[~marks(original, exact)])


def marks(original: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Which values are marks: far above the others, and all the same in float64, or there the mark of float64."""
    if _all_below(original, 2.0**_LEAST_MARK_EXPONENT):
        return torch.zeros_like(original, dtype=torch.bool)
    magnitude = finite(original).abs()
    exponents = torch.frexp(magnitude[magnitude > 0]).exponent.unique()
    gaps = exponents[1:][(exponents.diff() > _GAP_EXPONENTS) & (exponents[1:] > _LEAST_MARK_EXPONENT)]
    if not gaps.numel():
        return torch.zeros_like(magnitude, dtype=torch.bool)
    exact = exact.double()
    same = (exact - original.double()).abs() <= 2 * LEAST_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
    other = ~torch.isfinite(exact) | (exact.abs() > 2.0**_GAP_EXPONENTS * magnitude)
    # Of large results some happen to be rounded well: where any beyond a gap is rounded as results are, all may be.
    for beyond in (magnitude >= 2.0 ** (int(gap) - 1) for gap in gaps):
        if bool((same | other)[beyond].all()):
            return beyond
    return torch.zeros_like(magnitude, dtype=torch.bool)


def why_incomparable(candidate: torch.Tensor | None, original: torch.Tensor) -> str | None:
    """Why a candidate fails before any distance is measured; None where it does not."""
    if candidate is None:
        return "the output is missing"
    if candidate.shape != original.shape:
        return f"its shape is {list(candidate.shape)}, and the original's {list(original.shape)}"
    if candidate.dtype != original.dtype:
        return f"its dtype is {candidate.dtype}, and the original's {original.dtype}"
    if original.is_floating_point() and not (_all_below(original, math.inf) and _all_below(candidate, math.inf)):
        strange = ~torch.isfinite(candidate) & torch.isfinite(original)
        if strange.any():
            return f"{int(strange.sum())} elements are NaN or infinite where the original's are not"
        unlike = torch.isinf(original) & (candidate != original)
        if unlike.any():
            return f"{int(unlike.sum())} elements are not infinite where the original's are"
    return None


def distance(candidate: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Element-wise distance in float64; zero where the reference itself is NaN or infinite."""
    difference = candidate.double() - expected.double()
    distance = finite(difference).abs()
    if expected.is_floating_point():
        if _all_below(difference, math.inf):
            return distance
        beyond = torch.isinf(difference) & torch.isfinite(candidate) & torch.isfinite(expected)
        return torch.where(beyond, math.inf, distance)  # of values near the ends of float64
    return torch.where(candidate == expected, 0.0, distance.clamp(min=1.0))  # float64 does not hold every integer


def finite(values: torch.Tensor) -> torch.Tensor:
    """The values in float64, zero where they are NaN or infinite."""
    return torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _all_below(values: torch.Tensor, limit: float) -> bool:
    """Whether all are finite, and nearer to zero than a limit. One pass, where there is nothing to look at closer."""
    if not values.numel() or not values.is_floating_point():
        return not values.numel()
    low, high = (values.float() if values.dtype.itemsize == 1 else values).aminmax()
    return bool(low > -limit) and bool(high < limit)  # NaN is neither


def largest(values: torch.Tensor) -> float:
    """The largest value; zero of none."""
    return float(values.max()) if values.numel() else 0.0


def cosine(candidate: torch.Tensor, expected: torch.Tensor) -> float:
    """Cosine similarity of two tensors as vectors, where both are finite."""
    a, b = candidate.double().flatten(), expected.double().flatten()
    if not (_all_below(a, math.inf) and _all_below(b, math.inf)):
        finite = torch.isfinite(a) & torch.isfinite(b)
        a, b = a[finite], b[finite]
    if torch.equal(a, b):
        return 1.0
    norms = a.norm() * b.norm()
    if torch.isinf(norms):  # squares that float64 does not hold
        a, b = a / a.abs().max(), b / b.abs().max()
        norms = a.norm() * b.norm()
    return float(torch.dot(a, b) / norms) if norms else 0.0


def argmax_agreement(candidate: torch.Tensor, original: torch.Tensor) -> float:
    """Share of positions whose largest element along the last axis is the same."""
    if original.dim() == 0 or original.numel() == 0:
        return 1.0
    return float((top(candidate, 1) == top(original, 1)).double().mean())


def top(values: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest elements along the last axis, which holds at least as many."""
    values = values.double()
    return values.argmax(-1, keepdim=True) if k == 1 else values.topk(k).indices
