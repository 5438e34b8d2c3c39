"""Tests boundary ids, zeros and large values, and the faults that only they and padding find."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from optexport.config.inputs import TensorConfig
from optexport.config.schema import Effort
from optexport.errors import ParityError
from optexport.parity.cases.basic_cases import make_cases
from optexport.parity.cases.case import Case
from optexport.parity.cases.special_values import special_cases
from optexport.parity.checker import ParityChecker
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference_run import run_original
from optexport.signature.signature import Batch, Dim, Signature, TensorSpec
from tests._helpers.exports import quick

EFFORTS = get_args(Effort)
IDS = 40


def text(rows: int, columns: int, *, decoder: bool = False) -> Batch:
    ids = torch.arange(4, 4 + rows * columns).reshape(rows, columns) % (IDS - 10) + 5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**inputs, "decoder_attention_mask": torch.ones(rows, columns + 2, dtype=torch.int64)} if decoder else inputs


def signature(batch: Batch, *dims: Dim) -> Signature:
    names = [dim.name for dim in dims]
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), (*names, *tensor.shape[len(names) :]))
        for name, tensor in batch.items()
    )
    return Signature(specs, (), {dim.name: dim for dim in dims})


def failing(model: nn.Module, wrong: nn.Module, checked: list[Case]) -> set[str]:
    """Returns the cases at which the wrong model fails."""

    def call(module: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"y": module(**batch)}

    reference = run_original(call, model, checked)
    (output,) = (
        ParityChecker(reference, measure_tolerances(reference, 4.0))
        .check("here", lambda batch: call(wrong, dict(batch)))
        .outputs
    )
    return {case.case for case in output.cases if case.failure is not None}


# Choice of cases


def test_each_constant_input_is_tried_alone() -> None:
    """An untrained scale of 0 was 0 in every case. A model may refuse noise in one of two constant inputs."""
    example = {"scale": torch.tensor(0.0), "share": torch.full((2, 4), 0.25), "x": torch.randn(2, 4)}
    batches = {case.name: case.batch for case in special_cases(example, {}, "standard", 0)}
    assert {name for name in batches if name.startswith("noise")} == {"noise as scale", "noise as share"}
    assert batches["noise as scale"]["scale"] != 0
    assert torch.equal(batches["noise as scale"]["share"], example["share"])


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_constant_input_is_tried_with_noise(value: float) -> None:
    """Equal values do not show which element is used, or how far apart the elements are."""
    example = {"image": torch.full((2, 3, 4), value), "other": torch.randn(2, 4)}
    (case,) = [case for case in special_cases(example, {}, "standard", 0) if case.name == "noise as image"]
    image = case.batch["image"]
    assert image.std() > 0.1
    assert bool((image >= 0).all() if value >= 0 else (image < 0).all())
    assert torch.equal(case.batch["other"], example["other"])
    assert not case.extreme


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 50), st.sampled_from([torch.int64, torch.int32]))
def test_ids_at_both_ends_of_the_vocabulary_are_tried(rows: int, columns: int, count: int, dtype: torch.dtype) -> None:
    ids = torch.full((rows, columns), min(9, count - 1), dtype=dtype)
    (case,) = special_cases({"ids": ids}, {"ids": count}, "standard", 0)
    tried_ids, ends = case.batch["ids"], {0, min(1, count - 1), max(0, count - 2), count - 1}
    assert tried_ids.dtype is dtype
    assert tried_ids.shape == ids.shape
    assert 0 <= int(tried_ids.min()) <= int(tried_ids.max()) < count
    if rows * columns >= len(ends):
        assert ends <= set(tried_ids.flatten().tolist())
    if columns >= 8:
        assert all(ends <= set(row) for row in tried_ids.tolist())
        assert bool((tried_ids == ids).any())  # and ids of the example too


def test_zeros_and_large_values_leave_masks_and_ids_unchanged() -> None:
    example = {"x": torch.randn(2, 3), "mask": torch.ones(2, 3), "ids": torch.tensor([1, 2])}
    for case in special_cases(example, {"ids": 4}, "standard", 0):
        if case.name == "boundary ids" or case.name.startswith("padded"):
            continue
        assert case.extreme
        assert case.optional
        assert torch.equal(case.batch["mask"], example["mask"])
        assert torch.equal(case.batch["ids"], example["ids"])


@given(
    st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]),
    st.lists(st.integers(1, 9), max_size=3),
    st.sampled_from(EFFORTS),
)
def test_large_integers_are_tried_for_one_input_at_a_time(dtype: torch.dtype, shape: list[int], effort: Effort) -> None:
    example = {"seconds": torch.ones(shape, dtype=dtype), "days": torch.ones(2, dtype=dtype)}
    cases = special_cases(example, {}, effort, 0)
    assert bool(cases) is (effort != "quick")
    for case in cases:
        (changed,) = [name for name, tensor in example.items() if not torch.equal(case.batch[name], tensor)]
        values = case.batch[changed]
        assert (values.dtype, values.shape) == (dtype, example[changed].shape)
        assert case.extreme
        assert case.optional
        assert effort == "exhaustive" or bool((values >= 0).all())
    if dtype in (torch.int32, torch.int64) and cases:
        large = torch.cat([case.batch["days"] for case in cases])
        assert not torch.equal(large.float().to(dtype), large)  # float32 cannot represent all of them


@given(
    st.sampled_from(["uint8", "int32", "int64"]),
    st.integers(-9, 200) | st.none(),
    st.integers(1, 50) | st.none(),
    st.sampled_from(["standard", "exhaustive"]),
)
def test_integers_stay_within_the_declared_range(
    dtype: str, low: int | None, count: int | None, effort: Effort
) -> None:
    """Hours declared as 0 to 24 were checked at 16,777,216, which the model does not support."""
    low = low if low is None or dtype != "uint8" else abs(low)
    high = count if low is None or count is None else low + count
    spec = TensorConfig(shape=["batch", 3], dtype=dtype, low=low, high=high)
    example = {"hour": torch.full((2, 3), 5, dtype=getattr(torch, dtype))}
    cases = special_cases(example, {}, effort, 0, declared={"hour": spec})
    values = torch.stack([case.batch["hour"] for case in cases])
    assert low is None or int(values.min()) >= low
    assert high is None or int(values.max()) == high - 1


def test_no_large_integers_are_tried_if_they_set_output_sizes() -> None:
    example = {"repeats": torch.tensor([1, 2])}
    assert special_cases(example, {}, "exhaustive", 0, has_value_dependent_sizes=True) == []


class Hours(nn.Module):
    def __init__(self, *, in_float32: bool = False) -> None:
        super().__init__()
        self.in_float32 = in_float32

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        return (seconds.float() / 3 * 3).long() if self.in_float32 else seconds


def test_integers_rounded_by_float32_are_found() -> None:
    """A file that divided time stamps in float32 passed if the data had no current time stamp."""
    example = {"seconds": torch.tensor([[60, 3600], [7, 9]])}
    checked = [Case("traced", example), *special_cases(example, {}, "standard", 0)]
    assert failing(Hours(), Hours(in_float32=True), checked) == {"seconds from 16,777,216"}


def test_large_values_of_every_dtype_are_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        cases = special_cases({"x": torch.randn(64, 64).to(dtype)}, {}, "standard", 0)
        assert all(bool(torch.isfinite(case.batch["x"]).all()) for case in cases)
        assert all(case.batch["x"].dtype is dtype for case in cases)


def test_boolean_inputs_are_tried_and_masks_are_never_all_true() -> None:
    example = {"keep": torch.tensor([[True, False, False]]), "key_mask": torch.tensor([[True, True, False]])}
    batches = {case.name: case.batch for case in special_cases(example, {}, "standard", 0) if "padded" not in case.name}
    assert set(batches) == {"keep every second true", "keep all true", "key_mask every second true"}
    assert batches["keep every second true"]["keep"].tolist() == [[True, False, True]]
    assert batches["keep all true"]["keep"].all()
    for name, batch in batches.items():
        assert all(torch.equal(batch[second], example[second]) for second in batch if second not in name)


def test_mask_without_true_gets_padding_at_the_end() -> None:
    example = {"padding_mask": torch.zeros(3, 5, dtype=torch.bool)}
    batches = {case.name: case.batch for case in special_cases(example, {}, "standard", 0)}
    padded = [False, False, False, True, True]
    assert batches["padding_mask true at the end"]["padding_mask"].tolist() == [padded, [False] * 5, padded]


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_single_boolean_is_negated(effort: Effort) -> None:
    for value in (True, False):
        example = {"flag": torch.tensor(value), "rows": torch.tensor([value]), "mask": torch.tensor([value])}
        batches = {case.name: case.batch for case in special_cases(example, {}, effort, 0)}
        for name in ("flag", "rows"):
            assert batches[f"{name} negated"] == {**example, name: torch.tensor(not value).reshape(example[name].shape)}
        assert "mask negated" not in batches


class Switched(nn.Module):
    """Branches on the identity of a value, which a trace does not see."""

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return x if flag.item() is False else 2 * x


def test_a_branch_that_the_trace_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="flag negated"):
        quick(Switched(), {"x": torch.randn(3, 4), "flag": torch.tensor(True)}, tmp_path / "bundle", formats=["pt2"])


class Pool(nn.Module):
    """Takes another branch if all entries are kept, except while tracing."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and keep.all():
            return torch.ones(x.shape[0], x.shape[2])
        return (x * keep[..., None]).sum(1)


@pytest.mark.slow
def test_a_branch_for_an_all_true_input_is_checked(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 5, 3), "keep": torch.arange(10).reshape(2, 5) > 3}
    with pytest.raises(ParityError, match="keep all true"):
        quick(Pool(), inputs, tmp_path / "pool")


class Best(nn.Module):
    """Returns the indices of the best valid scores."""

    def forward(self, scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~valid, -torch.inf).topk(2)[1]


@pytest.mark.slow
def test_an_all_false_selection_is_not_tried(tmp_path: Path) -> None:
    """All scores are equal if every entry is false, so the order of the best is arbitrary."""
    inputs = {"scores": torch.arange(21.0).reshape(3, 7), "valid": torch.arange(21).reshape(3, 7) % 5 != 0}
    names = [case.name for case in special_cases(inputs, {}, "standard", 0)]
    assert not any("false" in name for name in names)
    assert quick(Best(), inputs, tmp_path / "best").passed


@pytest.mark.parametrize("effort", EFFORTS)
def test_special_cases_have_unique_names_and_are_deterministic(effort: Effort) -> None:
    example = {**text(2, 6), "x": torch.randn(2, 4)}
    first, second = (special_cases(example, {"input_ids": IDS}, effort, 3) for _ in range(2))
    assert len({case.name for case in first}) == len(first)
    for case, repeated in zip(first, second, strict=True):
        assert all(torch.equal(case.batch[name], repeated.batch[name]) for name in example)


def test_an_undeclared_case_may_be_refused_and_is_reported() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.any():
                raise ValueError("nothing but zeros")
            return torch.log(x.abs().sum() / 300)

    def call(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"y": model(**batch)}

    example = {"x": torch.rand(3, 4) + 1}
    cases = [Case("traced", example), *special_cases(example, {}, "standard", 0)]
    reference = run_original(call, Picky(), cases)
    assert [case.name for case in reference.cases] == ["traced", "values 64 times as large"]
    assert reference.skipped == ("zeros: the original model fails, ValueError: nothing but zeros",)


def test_an_extreme_case_is_skipped_if_the_original_gives_nan() -> None:
    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    example = {"x": torch.randn(3, 4) + 2}
    cases = [Case("traced", example), *special_cases(example, {}, "standard", 0)]
    reference = run_original(lambda model, batch: {"y": model(**batch)}, Exponential(), cases)
    assert [case.name for case in reference.cases] == ["traced", "zeros"]
    assert reference.skipped == ("values 64 times as large: the original model returns NaN or infinity",)


# Faults that only these cases find


class Words(nn.Module):
    """Averages the embeddings of all tokens except padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, 6)

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (self.words(input_ids) * self.weights(attention_mask)[..., None]).sum(1)


class CountsFromTheLeft(Words):
    """Assumes that padding is at the right."""

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        return super().weights((torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).long())


class DividesByNothing(Words):
    """Omits the guard against 0 / 0 in a row of only padding."""

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        return mask / mask.sum(1, keepdim=True)


def words(kind: type[Words] = Words) -> Words:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("wrong", [CountsFromTheLeft, DividesByNothing])
@pytest.mark.parametrize("effort", EFFORTS)
def test_a_wrong_use_of_the_mask_is_found_at_a_fixed_shape(effort: Effort, wrong: type[Words], rows: int) -> None:
    example = text(rows, 7)
    sizes = make_cases(example, [example], signature(example), effort=effort)
    special = special_cases(example, {"input_ids": IDS}, effort, 0)
    failing_cases = failing(words(), words(wrong), [*sizes, *special])
    assert failing_cases
    assert all(name.startswith("padded") for name in failing_cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("row", [0, 1, IDS - 2, IDS - 1])
def test_a_wrong_boundary_row_is_found_only_by_boundary_ids(row: int) -> None:
    wrong = words()
    with torch.no_grad():
        wrong.words.weight[row] += 0.1
    example = text(4, 9)
    sizes = make_cases(example, [example], signature(example, Dim("batch", 1, 16), Dim("sequence", 1, 40)))
    special = special_cases(example, {"input_ids": IDS}, "standard", 0)
    assert failing(words(), wrong, [*sizes, *special]) == {"boundary ids"}


class Apply(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x)  # type: ignore[operator]
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        (lambda x: functional.normalize(x, dim=-1), lambda x: x / x.norm(dim=-1, keepdim=True), "zeros"),
        (
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-10),
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
            "zeros",
        ),
        (lambda x: x.softmax(-1), lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "values 64 times as large"),
        (functional.softplus, lambda x: (1 + x.exp()).log(), "values 64 times as large"),
        (lambda x: functional.hardtanh(x, -8, 8), lambda x: x, "values 64 times as large"),
    ],
    ids=["normalisation without eps", "RMS norm without eps", "softmax that overflows", "softplus", "clamp"],
)
def test_a_missing_guard_is_found_only_at_an_extreme_case(right: object, wrong: object, where: str) -> None:
    example = {"x": torch.randn(3, 8)}
    sizes = make_cases(example, [example], signature(example, Dim("batch", 1, 16)))
    special = special_cases(example, {}, "standard", 0)
    assert failing(Apply(right), Apply(wrong), [*sizes, *special]) == {where}
    assert failing(Apply(right), Apply(right), [*sizes, *special]) == set()
