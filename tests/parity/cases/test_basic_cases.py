"""Tests the batches that a model is checked on: their sizes and values."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optexport.config.schema import Effort
from optexport.parity.cases.basic_cases import cut_to, make_cases
from optexport.signature.signature import Batch, Dim, Signature, TensorSpec
from tests.tiers import examples

EFFORTS = get_args(Effort)
BUDGET = 8192
AT_ENDS = 1 << 20
LONGEST = 12  # stands in for the maximum of an unbounded range

_LARGE = {"height": 384, "width": 584}

Checks = tuple[Batch, list[Batch], Signature]

dim_ranges = st.tuples(st.integers(1, 6), st.integers(0, 6) | st.none())


def signature_of(batch: Batch, axes: dict[str, dict[int, str]], dims: dict[str, Dim]) -> Signature:
    specs = tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)),
        )
        for name, tensor in batch.items()
    )
    return Signature(specs, (), dims)


def texts(rows: int, columns: int, *dims: Dim) -> tuple[Batch, Signature]:
    """Returns distinct token ids with their mask, and a signature with these dynamic dimensions."""
    ids = torch.arange(4, 4 + rows * columns).reshape(rows, columns)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    axes = {axis: dim.name for axis, dim in enumerate(dims)}
    return batch, signature_of(batch, dict.fromkeys(batch, axes), {dim.name: dim for dim in dims})


@st.composite
def checked(draw: st.DrawFn) -> Checks:
    """Draws an example batch, data to check and a signature."""
    dims, sizes = [], []
    for name in draw(st.sampled_from([["batch"], ["batch", "sequence"]])):
        low, more = draw(dim_ranges)
        step = draw(st.sampled_from([1, 1, 2, 3]))
        dims.append(Dim(name, low * step, None if more is None else max(low + more, 2) * step, step))
        sizes.append(step * draw(st.integers(max(low, 2), (dims[-1].max or LONGEST * step) // step)))
    rows, columns = (*sizes, 5)[:2]
    batch, signature = texts(rows, columns, *dims)
    if draw(st.booleans()):
        batch["pixel_values"] = torch.arange(1, 1 + 3 * rows).reshape(rows, 3) / 7
        axes = {axis: dim.name for axis, dim in enumerate(dims)}
        every = {**dict.fromkeys(batch, axes), "pixel_values": {0: "batch"}}
        signature = signature_of(batch, every, dict(signature.dims))
    return batch, draw(st.sampled_from([[], [batch]])), signature


def with_data(example: tuple[Batch, Signature]) -> Checks:
    return example[0], [example[0]], example[1]


def untraced(example: Batch, signature: Signature, count: int = 3) -> int:
    """Counts the declared sizes that were not traced, up to ``wanted``."""
    traced = signature.sizes(example)
    choices = [
        range(dim.min, (dim.max or traced[name] + count * dim.multiple_of) + 1, dim.multiple_of)
        for name, dim in signature.dims.items()
    ]
    other_sizes = (
        sizes for sizes in itertools.product(*choices) if sizes != tuple(traced[name] for name in signature.dims)
    )
    return sum(1 for _ in itertools.islice(other_sizes, count))


@given(checked(), st.sampled_from(EFFORTS))
@example(with_data(texts(2, 5, Dim("batch", 2, 64))), "standard")
@example(with_data(texts(8, 5, Dim("batch", 1, 8))), "standard")
@example(with_data(texts(2, 5, Dim("batch", 1, 4))), "quick")
def test_at_least_three_untraced_sizes_are_checked_if_possible(checks: Checks, effort: Effort) -> None:
    batch, real, signature = checks
    sizes = [tuple(signature.sizes(case.batch).items()) for case in make_cases(batch, real, signature, effort=effort)]
    assert len(set(sizes) - {tuple(signature.sizes(batch).items())}) >= untraced(batch, signature)


@given(checked(), st.sampled_from(EFFORTS))
def test_every_size_is_inside_its_declared_range(checks: Checks, effort: Effort) -> None:
    for case in make_cases(*checks, effort=effort):
        for name, size in checks[2].sizes(case.batch).items():
            assert size in checks[2].dims[name]


@given(checked())
@example(with_data(texts(2, 5, Dim("batch", 1, 64))))
@example(with_data(texts(2, 5, Dim("batch", 1, 9), Dim("sequence", 2, 40))))
def test_both_ends_of_every_declared_range_are_checked(checks: Checks) -> None:
    """Most errors in a range show at its ends."""
    signature = checks[2]
    tried_sizes = [signature.sizes(case.batch) for case in make_cases(*checks)]
    for name, dim in signature.dims.items():
        sizes = {size[name] for size in tried_sizes}
        assert dim.min in sizes
        assert dim.max is None or dim.max in sizes


def test_each_end_is_checked_alone_if_all_at_once_are_too_large() -> None:
    """An image of 1024 by 1024 was cut to 512 by 512, so no case reached the declared maximum."""
    dims = [Dim("batch", 1, 8), Dim("height", 16, 1024), Dim("width", 16, 1024)]
    batch = {"x": torch.randn(2, 3, 32, 48)}
    spec = TensorSpec("x", "float32", ("batch", 3, "height", "width"))
    signature = Signature((spec,), (spec,), {dim.name: dim for dim in dims})
    tried_sizes = {tuple(case.batch["x"].shape) for case in make_cases(batch, [], signature)}
    assert {(1, 3, 1024, 16), (1, 3, 16, 1024)} <= tried_sizes


def test_maximum_that_nobody_declared_is_not_tried() -> None:
    """Attention over all positions of an image of 384 by 584 took more memory than most machines have."""
    dims = [Dim("batch", 1, 8), *(Dim(name, 8, size, 8, has_assumed_max=True) for name, size in _LARGE.items())]
    spec = TensorSpec("x", "float32", ("batch", 3, "height", "width"))
    signature = Signature((spec,), (spec,), {dim.name: dim for dim in dims})
    shapes = {tuple(case.batch["x"].shape) for case in make_cases({"x": torch.randn(2, 3, 32, 48)}, [], signature)}
    assert (1, 3, 64, 192) in shapes
    assert max(height for _, _, height, _ in shapes) <= 128
    assert max(width for *_, width in shapes) == 192


@pytest.mark.slow
@given(checked())
def test_inputs_sharing_a_dimension_have_the_same_size(checks: Checks) -> None:
    for case in make_cases(*checks):
        sizes: dict[str, set[int]] = {}
        for name, axis, dim in checks[2].axes():
            sizes.setdefault(dim.name, set()).add(case.batch[name].shape[axis])
        assert all(len(tried_sizes) == 1 for tried_sizes in sizes.values())


@pytest.mark.slow
@given(checked())
def test_a_static_axis_keeps_its_size(checks: Checks) -> None:
    for case in make_cases(*checks):
        for spec in checks[2].inputs:
            fixed = [(axis, size) for axis, size in enumerate(spec.shape) if isinstance(size, int)]
            assert all(case.batch[spec.name].shape[axis] == size for axis, size in fixed)
            assert case.batch[spec.name].dtype is spec.torch_dtype


@given(checked())
def test_integers_come_from_the_example_input(checks: Checks) -> None:
    batch, real, signature = checks
    for case in make_cases(batch, real, signature):
        if "input_ids" in batch:
            assert set(case.batch["input_ids"].flatten().tolist()) <= set(batch["input_ids"].flatten().tolist())
            assert set(case.batch["attention_mask"].flatten().tolist()) <= {0, 1}


@pytest.mark.slow
@given(checked())
def test_cases_are_deterministic_and_leave_inputs_unchanged(
    checks: Checks,
) -> None:
    batch, real, signature = checks
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    first, second = make_cases(batch, real, signature), make_cases(batch, real, signature)
    assert [case.name for case in first] == [case.name for case in second]
    for case, repeated in zip(first, second, strict=True):
        assert all(torch.equal(case.batch[name], repeated.batch[name]) for name in batch)
    assert all(torch.equal(batch[name], copies[name]) for name in batch)
    assert first[0].batch is batch
    data = [case.batch for case in first if case.data]
    assert all(any(all(torch.equal(row[name], case[name]) for name in row) for case in data) for row in real)


@pytest.mark.slow
@given(checked())
def test_case_names_and_sizes_are_unique(checks: Checks) -> None:
    batch, real, signature = checks
    cases = make_cases(batch, real, signature)
    assert len({case.name for case in cases}) == len(cases)
    sizes = [tuple(signature.sizes(case.batch).items()) for case in cases[1:] if not case.data]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(st.integers(2, 9), st.integers(2, 300), st.integers(1, 2), st.integers(300, 5000))
def test_case_size_stays_within_the_budget(batch: int, sequence: int, low: int, high: int) -> None:
    example, signature = texts(batch, sequence, Dim("batch", low, 1000), Dim("sequence", low, high))
    limit = max(BUDGET, 4 * 2 * batch * sequence)
    for case in make_cases(example, [], signature, effort="quick"):
        assert sum(tensor.numel() for tensor in case.batch.values()) <= limit
    for case in make_cases(example, [], signature):
        at_an_end = any(tensor.shape[axis] in (1, 2) for tensor in case.batch.values() for axis in (0, 1))
        assert sum(tensor.numel() for tensor in case.batch.values()) <= (AT_ENDS if at_an_end else limit)


def test_exhaustive_effort_does_not_cut_sizes() -> None:
    example, signature = texts(2, 9, Dim("batch", 1, 40), Dim("sequence", 2, 300))
    tried_sizes = [signature.sizes(case.batch) for case in make_cases(example, [], signature, effort="exhaustive")]
    assert {"batch": 40, "sequence": 300} in tried_sizes
    assert {1, 2, 15, 16, 17, 31, 32, 33, 40} <= {sizes["batch"] for sizes in tried_sizes}
    assert {2, 3, 16, 127, 128, 129, 255, 256, 257, 300} <= {sizes["sequence"] for sizes in tried_sizes}


@pytest.mark.slow
@given(checked())
def test_more_effort_never_checks_fewer_sizes(checks: Checks) -> None:
    batch, real, signature = checks
    quick, standard, exhaustive = (len(make_cases(batch, real, signature, effort=effort)) for effort in EFFORTS)
    assert quick <= standard <= exhaustive


def test_a_static_model_is_checked_on_example_and_data_only() -> None:
    batch = {"x": torch.ones(2, 3)}
    signature = signature_of(batch, {}, {})
    assert [case.name for case in make_cases(batch, [], signature)] == ["traced"]
    data = {name: tensor.clone() for name, tensor in batch.items()}
    next(iter(data.values())).flatten()[0] += 1
    assert [case.name for case in make_cases(batch, [data, data], signature)] == ["traced", "data 0", "data 1"]


def test_masks_are_padded_right_left_and_over_whole_rows() -> None:
    batch, signature = texts(4, 9, Dim("batch", 1, 8), Dim("sequence", 1, 40))
    rows = [row for case in make_cases(batch, [], signature)[1:] for row in case.batch["attention_mask"]]
    assert any(row[0] == 1 and row[-1] == 0 for row in rows)
    assert any(row[0] == 0 and row[-1] == 1 for row in rows)
    assert any(not row.any() for row in rows)
    assert any(row.all() for row in rows)


def test_user_padding_stays_padding() -> None:
    batch, signature = texts(4, 9, Dim("batch", 1, 8))
    batch["attention_mask"][:, 7:] = 0
    assert all(not case.batch["attention_mask"][:, 7:].any() for case in make_cases(batch, [], signature))


def test_data_equal_to_the_traced_batch_is_checked_once_as_data() -> None:
    batch, data = {"x": torch.ones(2, 3)}, {"x": torch.zeros(2, 3)}
    signature = Signature((TensorSpec("x", "float32", (2, 3)),), (), {})
    copied = {"x": batch["x"].clone()}
    for effort in ("quick", "standard"):
        first, *rest = make_cases(batch, [copied, data], signature, effort=effort)
        assert (first.name, first.data) == ("traced", True)
        assert [case.name for case in rest] == ([] if effort == "quick" else ["data 1"])
    (first, second) = make_cases(batch, [data], signature)
    assert (first.data, second.name, second.data) == (False, "data", True)


def test_a_dimension_at_its_minimum_does_not_stop_cutting_others() -> None:
    """A run was refused as too large, although one dimension was at eight times its minimum."""
    x = torch.zeros(4, 8, 16)
    dims = {"a": Dim("a", 4, 8), "b": Dim("b", 1, 32), "n": Dim("n", 4, 1000)}
    signature = signature_of({"x": x}, {"x": {0: "a", 1: "b", 2: "n"}}, dims)
    cut = cut_to(4 * 700, {"x": x}, signature, {"a": 4, "b": 8, "n": 700}, fixed=["n"])
    assert cut == {"a": 4, "b": 1, "n": 700}
