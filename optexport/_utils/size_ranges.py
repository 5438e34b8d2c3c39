"""Computes and describes the sizes that a dimension may have."""

from __future__ import annotations

import math


def round_up(size: int, multiple_of: int) -> int:
    """Returns the smallest multiple that is at least a size."""
    return -(-size // multiple_of) * multiple_of


def describe_range(minimum: int, maximum: float | None, multiple_of: int) -> str:
    """Returns a range in words, such as ``64 to 1024, multiples of 8``; without a largest size, ``64 or more``."""
    sizes = f"{minimum} or more" if maximum in (None, math.inf) else f"{minimum} to {maximum}"
    return sizes if multiple_of == 1 else f"{sizes}, multiples of {multiple_of}"
