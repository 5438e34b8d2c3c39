"""Resizing batches: all rows differ, values stay valid, and no row of a split batch is lost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optexport.errors import ConfigError
from optexport.parity.cases.case import Case
from optexport.parity.cases.data_batches import describe_unchecked_data
from optexport.signature.resizing import iter_larger_batches, make_traceable, resize, resize_tensor, split_batch
from optexport.signature.signature import Dim, Dynamic, Signature, TensorSpec
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


@given(st.integers(1, 12), st.integers(1, 9))
@example(12, 1)
def test_row_of_padded_ids_keeps_its_start(rows: int, length: int) -> None:
    ids = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]])
    signature = Signature((TensorSpec("ids", "int64", ("b", "t")),), (), {"b": Dim("b"), "t": Dim("t")})
    resized = resize({"ids": ids}, signature, {"b": rows, "t": length})["ids"]
    assert resized.shape == (rows, length)
    assert bool((resized != 0).any(1).all())


@settings(max_examples=examples(60))
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 60) | st.none())
def test_every_row_is_in_one_batch_of_a_declared_size(rows: int, low: int, more: int | None) -> None:
    dim = Dim("batch", low, None if more is None else low + more)
    batch = {"x": torch.arange(rows * 3).reshape(rows, 3), "ids": torch.arange(rows), "scale": torch.ones(4)}
    cut = split_batch(batch, ["x", "ids"], dim)
    assert torch.cat([shard["ids"] for shard in cut]).tolist() == list(range(rows))
    assert all(torch.equal(shard["x"][:, 0], 3 * shard["ids"]) for shard in cut)
    assert all(torch.equal(shard["scale"], batch["scale"]) for shard in cut)
    if len(cut) > 1:
        sizes = [shard["ids"].shape[0] for shard in cut]
        assert max(sizes) <= max(32, low)
        assert dim.max == 1 or all(dim.min <= size <= (dim.max or size) for size in sizes)


@settings(max_examples=examples(60))
@given(st.integers(1, 300))
def test_batches_of_an_undeclared_axis_have_one_size(rows: int) -> None:
    cut = split_batch({"ids": torch.arange(rows)}, ["ids"], Dim("batch"), declared=False)
    assert len({shard["ids"].shape for shard in cut}) == 1
    ids = torch.cat([shard["ids"] for shard in cut]).tolist()
    assert ids == list(range(len(ids)))
    assert rows - len(ids) < 32
    if len(ids) < rows:
        checked = [Case(f"data {i}", batch, data=True) for i, batch in enumerate(cut)]
        assert describe_unchecked_data(cut, rows, checked) == (f"data: {len(ids)} of {rows} rows are checked",)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(3, 60), st.sampled_from([1 << 14, 1 << 16, 1 << 18, 1 << 21]))
def test_batch_size_stays_within_the_budget_or_two_rows(rows: int, numbers: int) -> None:
    batch = {"x": torch.zeros(1, numbers, dtype=torch.uint8).expand(rows, -1)}
    cut = split_batch(batch, ["x"], Dim("batch"))
    assert all(shard["x"].numel() <= max(1 << 20, 2 * numbers) for shard in cut)


@given(st.integers(1, 9), st.integers(1, 9), st.tuples(st.integers(1, 6), st.integers(0, 6) | st.none()))
def test_an_example_is_resized_for_tracing_within_its_range(rows: int, columns: int, limits: tuple[int, int]) -> None:
    low, more = limits
    dim = Dim("batch", low, None if more is None else low + more)
    axes: dict[str, dict[int, str | Dim]] = {"x": {0: dim}, "mask": {0: dim, 1: "sequence"}}
    resized = make_traceable({"x": torch.ones(rows, 3), "mask": torch.ones(rows, columns)}, axes)
    assert resized["x"].shape[0] == resized["mask"].shape[0]
    assert dim.min <= resized["x"].shape[0] <= (dim.max or 99)
    assert resized["x"].shape[0] >= 2 or dim.max == 1
    assert resized["x"].shape[1] == 3
    assert resized["mask"].shape[1] == max(columns, 2)
    if dim.min <= rows and 2 <= rows <= (dim.max or rows):
        assert resized["x"].shape[0] == rows  # a valid size is not changed


def test_a_declared_axis_without_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs: x: axis 1 is declared dynamic, but has size 0"):
        make_traceable({"x": torch.ones(2, 0)}, {"x": {0: "batch", 1: "rows"}})


@pytest.mark.parametrize(
    ("dynamic", "sizes"),
    [
        ({"x": {0: "batch"}}, []),
        ({"x": {0: "batch", 1: "time"}}, [13, 53]),
        ({"x": {1: Dim("time", 1, 20)}}, [13, 20]),
        ({"x": {1: Dim("time", 4, 64, multiple_of=4)}}, [44, 52]),
        ({"x": {1: Dim("time", 1, 12)}}, []),
    ],
)
def test_larger_batches_have_sizes_without_small_factors(dynamic: Dynamic, sizes: list[int]) -> None:
    batches = iter_larger_batches({"x": torch.randn(2, 12)}, dynamic)
    assert [tuple(batch["x"].shape) for batch in batches] == [(2, size) for size in sizes]
