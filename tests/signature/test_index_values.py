"""Values that index an axis: they fit every size, keep their order, and keep the ends of their range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.signature.index_values import IndexValues, list_ranges
from optexport.signature.resizing import make_traceable, resize
from optexport.signature.signature import Dim, Signature, TensorSpec
from tests.tiers import examples


@settings(max_examples=examples(200))
@given(st.integers(1, 50), st.integers(1, 50), st.sampled_from([(0, -1), (1, 0), (0, 0)]), st.data())
def test_fitted_values_are_in_range_and_in_order(
    old: int, new: int, ends: tuple[int, int], data: st.DataObject
) -> None:
    low, high = ends
    values = sorted(data.draw(st.lists(st.integers(low, old + high), min_size=1, max_size=9)))
    fitted = IndexValues(("n",), low, high).fit(torch.tensor(values), {"n": old}, {"n": new}).tolist()
    assert fitted == sorted(fitted)
    assert low <= fitted[0] <= fitted[-1] <= new + high
    if old > 1:
        assert fitted[0] == low or values[0] > low
        assert fitted[-1] == new + high or values[-1] < old + high
    if old == new:
        assert fitted == values


def test_values_below_the_range_stay() -> None:
    labels = torch.tensor([-100, 6, -1, 3])
    assert IndexValues(("n",)).fit(labels, {"n": 7}, {"n": 3}).tolist() == [-100, 2, -1, 1]


def test_values_of_two_dimensions_fit_the_smaller() -> None:
    values = torch.tensor([0, 5, 7])
    index, old = IndexValues(("h", "w")), {"h": 8, "w": 6}
    assert index.fit(values, old, {"h": 20, "w": 3}).tolist() == [0, 2, 2]
    assert index.fit(values, old, {"h": 7, "w": 6}).tolist() == [0, 5, 5]
    assert index.fit(values, old, old).tolist() == [0, 5, 7]


def test_a_narrow_dtype_does_not_overflow() -> None:
    values = torch.tensor([199], dtype=torch.uint8)
    assert IndexValues(("n",)).fit(values, {"n": 200}, {"n": 256}).tolist() == [255]


def test_ranges_depend_on_the_ends_of_the_values() -> None:
    def ranges(*values: int) -> list[tuple[int, int]]:
        indexes = list_ranges(torch.tensor(values), ["n"], {"n": 7})
        return [(index.low, index.high) for index in indexes if not index.adds_up]

    assert ranges(7, 2) == [(1, 0), (0, 0)]  # lengths
    assert ranges(0, 7) == [(0, 0)]  # ends of segments
    assert ranges(0, 6) == [(0, -1)]  # positions
    assert ranges(1, 6) == [(1, 0), (0, -1)]


def test_sorted_vectors_stay_sorted_and_keep_their_ends() -> None:
    signature = Signature((TensorSpec("ids", "int64", ("n",)),), (), {"n": Dim("n")})
    for values in ([0, 0, 1, 1, 2], [7, 5, 2]):
        for size in (1, 2, 4, 11):
            (ids,) = resize({"ids": torch.tensor(values)}, signature, {"n": size}).values()
            assert ids.tolist() == sorted(ids.tolist(), reverse=values[0] > values[-1])
            assert ids[0] == values[0]
            assert size == 1 or ids[-1] == values[-1]


def test_every_row_of_a_shortened_mask_shows_and_hides_something() -> None:
    signature = Signature((), (), {"n": Dim("n")})
    rows = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 0]])
    for name in ("mask", "key_padding_mask"):
        for mask in (rows, rows.bool()):
            specs = (TensorSpec(name, "int64", (2, "n")),)
            resized = resize({name: mask}, Signature(specs, (), signature.dims), {"n": 2})[name]
            assert resized.sum(1).tolist() == [1, 1]
            assert resized.dtype == mask.dtype
            (single,) = resize({name: mask}, Signature(specs, (), signature.dims), {"n": 1}).values()
            assert single.tolist() == [[name == "mask"]] * 2


def test_resized_example_has_values_that_fit() -> None:
    batch = {"x": torch.randn(3, 9), "lengths": torch.tensor([9, 4, 7])}
    dynamic = {"x": {0: "batch", 1: Dim("time", 2, 5)}, "lengths": {0: "batch"}}
    lengths = make_traceable(batch, dynamic, {"lengths": ["time"]})["lengths"]
    assert lengths.tolist() == [5, 2, 4]


@pytest.mark.parametrize("low", [0, 1])
@pytest.mark.parametrize("values", [[2, 3, 4], [9], [1, 8], [0, 9, 0], [3, 0, 6]])
def test_lengths_of_parts_add_up_to_every_size(values: list[int], low: int) -> None:
    index = IndexValues(("n",), low, 0, adds_up=True)
    for size in (1, 2, 9, 10, 50):
        fitted = index.fit(torch.tensor(values), {"n": 9}, {"n": size})
        assert int(fitted.sum()) == size
        assert int(fitted.min()) >= (low if size >= len(values) and size != 9 else 0)
    assert index.fit(torch.tensor(values), {"n": 9}, {"n": 9}).tolist() == values
