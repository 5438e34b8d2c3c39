"""Tests that every mask gets every kind of padding, and each mask a different one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optexport.config.schema import Effort
from optexport.parity.cases.basic_cases import make_cases
from optexport.parity.cases.special_values import special_cases
from optexport.signature.signature import Dim
from tests._helpers.exports import quick
from tests.parity.cases.test_special_values import EFFORTS, IDS, signature, text
from tests.tiers import examples


def kinds_of_padding(masks: list[torch.Tensor]) -> set[str]:
    special = set()
    for row in (row for mask in masks for row in mask):
        if not row.any():
            special.add("whole")
        elif row[0] == 1 and row[-1] == 0:
            special.add("right")
        elif row[0] == 0 and row[-1] == 1:
            special.add("left")
    return special


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("decoder", [False, True])
@settings(max_examples=examples(20))
@given(rows=st.integers(1, 9), columns=st.integers(3, 40))
def test_every_kind_of_padding_is_checked_at_the_traced_size(
    effort: Effort, decoder: bool, rows: int, columns: int
) -> None:
    example = text(rows, columns, decoder=decoder)
    special = special_cases(example, {}, effort, 0)
    for name in [name for name in example if "mask" in name]:
        assert all(case.batch[name].shape == example[name].shape for case in special)
        assert kinds_of_padding([case.batch[name] for case in special]) == {"right", "left", "whole"}


@given(st.sampled_from([torch.int64, torch.float32, torch.bool]), st.sampled_from([(3, 6), (2, 4, 5), (2, 3, 4, 4)]))
def test_masks_of_any_name_are_padded_and_images_only_partly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A ``padding_mask`` was never padded, so a graph that ignored it passed."""
    example = {"x": torch.ones(2, 3), "key_padding_mask": torch.ones(shape, dtype=dtype)}
    masks = [case.batch["key_padding_mask"] for case in special_cases(example, {}, "quick", 0)]
    assert masks
    assert all(mask.dtype is dtype for mask in masks)
    assert any(not mask.all() for mask in masks)
    if len(shape) > 2:
        assert all(mask.any(-1).all() for mask in masks)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_two_masks_are_never_padded_alike(rows: int) -> None:
    """A rule that swapped the masks of two texts passed."""
    example = {f"{name}_attention_mask": torch.ones(rows, 6, dtype=torch.int64) for name in ("query", "document")}
    for case in special_cases(example, {}, "quick", 0):
        query, document = case.batch.values()
        assert all(not torch.equal(*pair) for pair in zip(query, document, strict=True))


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_kind_of_padding_is_checked_at_untraced_sizes(effort: Effort) -> None:
    example = text(4, 9)
    special = make_cases(example, [], signature(example, Dim("batch", 1, 64), Dim("sequence", 1, 64)), effort=effort)
    masks = [case.batch["attention_mask"] for case in special if case.batch["input_ids"].shape != (4, 9)]
    assert kinds_of_padding(masks) == {"right", "left", "whole"}


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**20))
def test_padding_only_removes_tokens(rows: int, columns: int, seed: int) -> None:
    example = text(rows, columns)
    example["attention_mask"] = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(seed))
    for case in special_cases(example, {"input_ids": IDS}, "standard", 0):
        if not case.name.startswith("padded"):
            continue
        assert bool((case.batch["attention_mask"] <= example["attention_mask"]).all())
        assert torch.equal(case.batch["input_ids"], example["input_ids"])


def test_other_inputs_are_not_padded() -> None:
    example = {"scale": torch.ones(4, 5), "attention_mask": torch.zeros(4, 1, 5, 5), "position_ids": torch.ones(4, 5)}
    for case in special_cases(example, {}, "quick", 0):
        assert all(torch.equal(case.batch[name], tensor) for name, tensor in example.items())
    assert special_cases(example, {}, "quick", 0) == []


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("mask", "tried"),
    [
        (torch.zeros(4, 8), [{0, 1}, {0, LEAST}]),
        (torch.zeros(2, 1, 3, 3), [{0, 1}, {0, LEAST}]),
        (torch.zeros(4, 8, dtype=torch.int64), [{0, 1}]),
        (torch.ones(4, 2, dtype=torch.int64), [{0, 1}]),
        (torch.tensor([1, 1, 0, 1]), [{0, 1}]),
        (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), [{0, 1}]),
        (torch.ones(4), [{0, 1}]),
        (torch.tensor(1.0), [{0}]),
        (torch.tensor(True), [{0}]),
        (torch.full((4, 8), 0.5), [{0, 0.5}]),
        (torch.tensor([[0.0, 0.0, -1e9]]), [{0, -1e9}]),
    ],
    ids=str,
)
def test_a_mask_unchanged_by_padding_is_tried_with_other_values(mask: torch.Tensor, tried: list[set[float]]) -> None:
    """Rules that dropped or swapped such masks passed, because no case changed their values."""
    special = special_cases({"any_mask": mask}, {}, "standard", 0)
    masks = [case.batch["any_mask"] for case in special if not torch.equal(case.batch["any_mask"], mask)]
    assert [set(values.flatten().tolist()) for values in masks] == [{float(torch.tensor(v)) for v in t} for t in tried]
    for values in masks:
        assert (values.dtype, values.shape) == (mask.dtype, mask.shape)
        assert bool((values != mask).any())


class Positions(nn.Module):
    """Counts positions from the first real token, so left padding has no valid position."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = nn.Embedding(64, 3)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return x[..., None] + self.targets(attention_mask.cumsum(1) - 1)


@pytest.mark.slow
def test_padding_refused_by_the_model_is_skipped_and_reported(tmp_path: Path) -> None:
    """The error said that the model fails at a size that it accepts."""
    inputs = {"x": torch.randn(4, 7), "attention_mask": torch.ones(4, 7, dtype=torch.int64)}
    dynamic = {name: {0: Dim("batch", 1, 8), 1: Dim("sequence", 2, 32)} for name in inputs}
    result = quick(Positions(), inputs, tmp_path / "out", dynamic=dynamic)
    notes = [note for note in result.manifest.parity.left_out if "the original model fails with this padding" in note]
    assert any(note.startswith("batch 1, sequence 2") or "sequence" in note for note in notes)
    assert {"batch 8, sequence 2", "padded right, left, whole"} <= set(result.manifest.parity.cases)
