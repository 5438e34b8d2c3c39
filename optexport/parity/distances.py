"""Distances between tensors, and detection of mask values."""

from __future__ import annotations

import math

import torch

# An output without rounding, such as a gather, has a noise floor of zero. This many units in the last place of its
# largest value replace it.
MIN_FLOOR_ULPS = 2
# Mask values, such as -1e30 at masked positions, are not results. A mask value exceeds 2 ** 13 and lies a factor of 2
# ** 10 above the next smaller values. It is also not rounded as results are. The noise floor and the scale exclude mask
# values, which would dominate them. Mask values have their own limit of a few units in the last place.
_MIN_MASK_EXPONENT = 13
MIN_MASK_VALUE = 2.0**_MIN_MASK_EXPONENT
_GAP_EXPONENTS = 10


def expected_values(exact: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Returns the values that a target is compared with, float64 or the original dtype.

    The values are the float64 ones, with three exceptions that use the original's own: elements that overflow in
    float64 only, mask values such as the smallest float32, and integer outputs.

    Args:
        exact: The output in float64.
        original: The output in the original's precision, same shape.
    """
    if not original.is_floating_point():
        return original
    exact = exact.double()
    if _all_below(exact, math.inf) and _all_below(original, MIN_MASK_VALUE):
        return exact
    own = (~torch.isfinite(exact) & torch.isfinite(original)) | is_mask_value(original, exact)
    return torch.where(own, original.double(), exact)


def scale(original: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest magnitude of an output, mask values excluded.

    Args:
        original: The output in the original's precision.
        exact: The output in float64, same shape.
    """
    return largest(finite(original).abs()[~is_mask_value(original, exact)])


def max_magnitude(tensor: torch.Tensor) -> float:
    """Returns the largest magnitude among the finite values of a tensor; 0 if there is none."""
    return largest(finite(tensor).abs())


def is_mask_value(original: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Finds mask values: far above all others, and equal or masked in float64 too.

    Args:
        original: The output in the original's precision.
        exact: The output in float64, same shape.

    Returns:
        A bool tensor of the same shape.
    """
    if _all_below(original, MIN_MASK_VALUE):
        return torch.zeros_like(original, dtype=torch.bool)
    magnitude = finite(original).abs()
    exponents = torch.frexp(magnitude[magnitude > 0]).exponent.unique()
    gaps = exponents[1:][(exponents.diff() > _GAP_EXPONENTS) & (exponents[1:] > _MIN_MASK_EXPONENT)]
    if not gaps.numel():
        return torch.zeros_like(magnitude, dtype=torch.bool)
    exact = exact.double()
    is_equal = (exact - original.double()).abs() <= 2 * MIN_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
    is_masked = ~torch.isfinite(exact) | (exact.abs() > 2.0**_GAP_EXPONENTS * magnitude)
    # Some large results round exactly by chance. If any value above a gap is rounded, all of them may be results.
    for beyond in (magnitude >= 2.0 ** (int(gap) - 1) for gap in gaps):
        if bool((is_equal | is_masked)[beyond].all()):
            return beyond
    return torch.zeros_like(magnitude, dtype=torch.bool)


def find_comparison_problem(candidate: torch.Tensor | None, original: torch.Tensor) -> str | None:
    """Returns the reason why no distance can be measured, or None.

    Args:
        candidate: Output of the target; None if it is missing.
        original: Output of the original.
    """
    if candidate is None:
        return "the output is missing"
    if candidate.shape != original.shape:
        return f"expected shape {list(original.shape)}, found {list(candidate.shape)}"
    if candidate.dtype != original.dtype:
        return f"expected dtype {original.dtype}, found {candidate.dtype}"
    if original.is_floating_point() and not (_all_below(original, math.inf) and _all_below(candidate, math.inf)):
        broken = ~torch.isfinite(candidate) & torch.isfinite(original)
        if broken.any():
            return f"{int(broken.sum())} elements are NaN or infinite, but finite in the original"
        differing = torch.isinf(original) & (candidate != original)
        if differing.any():
            return f"{int(differing.sum())} elements are not infinite, but infinite in the original"
    return None


def distance(candidate: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the distance per element in float64, zero if the reference is NaN or infinite.

    Args:
        candidate: Output of the target, same shape.
        expected: Values to compare with.
    """
    difference = candidate.double() - expected.double()
    distance = finite(difference).abs()
    if expected.is_floating_point():
        if _all_below(difference, math.inf):
            return distance
        beyond = torch.isinf(difference) & torch.isfinite(candidate) & torch.isfinite(expected)
        return torch.where(beyond, math.inf, distance)  # differences can overflow float64
    return torch.where(candidate == expected, 0.0, distance.clamp(min=1.0))  # float64 cannot represent every integer


def finite(values: torch.Tensor) -> torch.Tensor:
    """Returns the values in float64, with NaN and infinity replaced by zero."""
    return torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _all_below(values: torch.Tensor, limit: float) -> bool:
    """Checks in one pass if all values are finite and below a limit in magnitude."""
    if not values.numel() or not values.is_floating_point():
        return not values.numel()
    low, high = (values.float() if values.dtype.itemsize == 1 else values).aminmax()
    return bool(low > -limit) and bool(high < limit)  # comparisons with NaN are false


def largest(values: torch.Tensor) -> float:
    """Returns the largest value, or zero for an empty tensor."""
    return float(values.max()) if values.numel() else 0.0


def cosine(candidate: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the cosine similarity of two tensors as vectors, over elements finite in both.

    Args:
        candidate: Output of the target.
        expected: Values to compare with, same number of elements.
    """
    a, b = candidate.double().flatten(), expected.double().flatten()
    if not (_all_below(a, math.inf) and _all_below(b, math.inf)):
        finite = torch.isfinite(a) & torch.isfinite(b)
        a, b = a[finite], b[finite]
    if torch.equal(a, b):
        return 1.0
    norms = a.norm() * b.norm()
    if torch.isinf(norms):  # their squares overflow in float64
        a, b = a / a.abs().max(), b / b.abs().max()
        norms = a.norm() * b.norm()
    return float(torch.dot(a, b) / norms) if norms else 0.0


def argmax_agreement(candidate: torch.Tensor, original: torch.Tensor) -> float:
    """Returns the share of positions with the same largest element along the last axis.

    Args:
        candidate: Output of the target, same shape.
        original: Output of the original.
    """
    if original.dim() == 0 or original.numel() == 0:
        return 1.0
    return float((top(candidate, 1) == top(original, 1)).double().mean())


def top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the indices of the k largest elements along the last axis.

    Args:
        values: Tensor whose last axis has at least k elements.
        k: Number of elements.
    """
    values = values.double()
    return values.argmax(-1, keepdim=True) if k == 1 else values.topk(k).indices
