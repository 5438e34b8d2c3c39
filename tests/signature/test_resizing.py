"""Resizing batches: all rows differ, and values stay valid."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optexport.signature.resizing import resize, resize_tensor
from optexport.signature.signature import Dim, Signature, TensorSpec
from tests.tiers import examples


@settings(max_examples=examples(200))
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 70), st.integers(1, 20))
@example(2, 3, 4, 3)
@example(2, 8, 4, 1)
def test_repeated_rows_differ(rows: int, length: int, expected: int, sequence: int) -> None:
    """All rows differ if there are enough values: one row of n values has n rotations."""
    tensor = torch.arange(rows * length).reshape(rows, length)
    resized = resize_tensor(tensor, {0: expected, 1: sequence})
    assert len({tuple(row) for row in resized.tolist()}) == min(expected, rows * length)


@given(st.integers(1, 4), st.integers(1, 70))
@example(1, 40)
def test_repeated_real_rows_differ_and_have_no_larger_values(rows: int, expected: int) -> None:
    tensor = torch.arange(1, 1 + rows * 6).reshape(rows, 6) * torch.tensor(math.pi).sqrt()
    resized = resize_tensor(tensor, {0: expected})
    assert len({tuple(row) for row in resized.tolist()}) == expected
    assert resized.abs().max() <= tensor.abs().max()


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_tensor_that_is_large_enough_is_only_cut(rows: int, columns: int, fewer: int, shorter: int) -> None:
    tensor = torch.randn(rows, columns)
    resized = resize_tensor(tensor, {0: min(rows, fewer), 1: min(columns, shorter)})
    assert torch.equal(resized, tensor[: min(rows, fewer), : min(columns, shorter)])


def test_scalar_and_zero_one_mask_keep_their_values() -> None:
    mask = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    resized = resize(
        {"scale": torch.tensor(0.5), "mask": mask},
        Signature(
            (TensorSpec("scale", "float32", ()), TensorSpec("mask", "float32", ("batch", 2))),
            (),
            {"batch": Dim("batch")},
        ),
        {"batch": 40},
    )
    assert resized["scale"] == 0.5
    assert set(resized["mask"].flatten().tolist()) == {0.0, 1.0}
