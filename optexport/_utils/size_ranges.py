"""Describes the sizes that a dimension may have."""

from __future__ import annotations


def describe_range(minimum: int, maximum: int | None, multiple_of: int) -> str:
    """Returns a range in words, such as ``64 to 1024, multiples of 8``."""
    sizes = f"{minimum} to {'any' if maximum is None else maximum}"
    return sizes if multiple_of == 1 else f"{sizes}, multiples of {multiple_of}"
