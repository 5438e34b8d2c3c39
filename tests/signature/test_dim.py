"""Ranges of sizes, and multiples inside of these."""

from __future__ import annotations

import torch

from optexport.signature.resizing import make_traceable
from optexport.signature.signature import Dim


def test_ends_of_a_range_are_rounded_to_multiples() -> None:
    assert Dim("height", 1, 100, 8) == Dim("height", 8, 96, 8)
    assert Dim("height", multiple_of=8) == Dim("height", 8, None, 8)


def test_range_contains_only_multiples() -> None:
    dim = Dim("height", 16, 40, 8)
    assert [size for size in range(60) if size in dim] == [16, 24, 32, 40]


def test_size_is_fitted_to_the_next_smaller_multiple() -> None:
    dim = Dim("height", 16, 40, 8)
    assert [dim.fit(size) for size in (1, 16, 23, 39, 99)] == [16, 16, 16, 32, 40]


def test_traced_size_is_a_multiple() -> None:
    batch = make_traceable({"x": torch.zeros(1, 13)}, {"x": {0: "batch", 1: Dim("length", 1, 40, 8)}})
    assert batch["x"].shape == (2, 16)


def test_description_names_the_multiple() -> None:
    assert Dim("height", 16, None, 8).describe() == "16 or more, multiples of 8"


def test_range_without_a_multiple_stays_as_written() -> None:
    assert (Dim("height", 9, 15, 8).min, Dim("height", 9, 15, 8).max) == (9, 15)
