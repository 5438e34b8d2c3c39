"""Tests the decision metrics: properties for any values, then known values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optexport.parity.metrics import (
    Tally,
    agreement,
    cosines,
    greedy_tokens,
    intersections_over_unions,
    normal_interval,
    unpadded_positions,
    wilson_interval,
)

Measure = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Tally]


def _everywhere(values: torch.Tensor) -> torch.Tensor:
    return torch.ones(values.shape[:-1], dtype=torch.bool)


# Arguments: candidate, original, expected, slack; shape [batch, sequence, classes] or [batch, height, width].
MEASURES: dict[str, Measure] = {
    "argmax": agreement,
    "top 3": lambda c, o, expected, slack: agreement(c, o, expected, slack, 3),
    "greedy tokens": lambda c, o, expected, slack: greedy_tokens(c, o, expected, slack, _everywhere(o)),
    "masks": intersections_over_unions,
    "classes": lambda c, o, expected, slack: intersections_over_unions(
        *(v.transpose(1, 2)[..., None] for v in (c, o, expected)), slack
    ),
    "masks in channels": lambda c, o, expected, slack: intersections_over_unions(
        c[:, :, None], o[:, :, None], expected[:, :, None], slack, classes=False
    ),
    "cosine": lambda c, o, expected, slack: cosines(c, o, slack),
}


@st.composite
def outputs(draw: st.DrawFn) -> torch.Tensor:
    """Draws values of any scale, some of them equal, some of them mask values."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(4, 9)))
    values = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    if draw(st.booleans()):
        values = values.round()
    if draw(st.booleans()):
        values[..., -1] = draw(st.sampled_from([-math.inf, -1e30, 0.0]))
    return values


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MEASURES)
@given(values=outputs())
def test_every_output_agrees_with_itself_without_ties(name: str, values: torch.Tensor) -> None:
    tally = MEASURES[name](values.clone(), values, values.double(), 0.0)
    assert bool((tally.values == 1.0).all())
    assert tally.ties == 0
    assert tally.values.dtype is torch.float64


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MEASURES)
@given(values=outputs(), seed=st.integers(0, 1000))
def test_the_order_of_the_batch_changes_no_count(name: str, values: torch.Tensor, seed: int) -> None:
    values = values.nan_to_num(neginf=-1.0)
    expected = values + values.std() * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    slack = 0.1 * float(values.abs().max())
    first = MEASURES[name](expected, values, values.double(), slack)
    second = MEASURES[name](expected[order], values[order], values[order].double(), slack)
    assert torch.allclose(first.values.sort().values, second.values.sort().values, rtol=0, atol=1e-12)
    assert first.ties == second.ties


DECIDING = sorted(set(MEASURES) - {"cosine"})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DECIDING)
@given(values=outputs(), seed=st.integers(0, 1000), share=st.floats(0.0, 0.99))
def test_values_within_the_slack_change_decisions_only_at_ties(
    name: str, values: torch.Tensor, seed: int, share: float
) -> None:
    exact = values.double().nan_to_num(neginf=-1.0)
    slack = 0.2 * float(exact.abs().max())
    generator = torch.Generator().manual_seed(seed)
    candidate, original = (
        exact + share * slack * (2 * torch.rand(exact.shape, generator=generator, dtype=torch.float64) - 1)
        for _ in range(2)
    )
    tally = MEASURES[name](candidate, original, exact, slack)
    assert bool((tally.values == 1.0).all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DECIDING)
@given(values=outputs(), seed=st.integers(0, 1000))
def test_less_slack_never_increases_agreement(name: str, values: torch.Tensor, seed: int) -> None:
    values = values.nan_to_num(neginf=-1.0)
    expected = values + values.std() * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    totals = []
    for slack in (0.0, 0.1, 1.0, 100.0):
        tally = MEASURES[name](expected, values, values.double(), slack * float(values.abs().max()))
        assert tally.ties >= 0
        totals.append(float(tally.values.sum()) / max(1, tally.values.numel()))
    assert totals == sorted(totals)
    assert totals[-1] in (0.0, 1.0)  # 0 without any mask


@given(margin=st.floats(0.01, 10.0), slack=st.floats(0.001, 10.0))
def test_a_changed_argmax_is_a_tie_up_to_twice_the_slack(margin: float, slack: float) -> None:
    original = torch.tensor([[0.0, margin, -20.0]], dtype=torch.float64)
    tally = agreement(original[:, [1, 0, 2]], original, original, slack)
    expected = margin <= 2 * slack
    assert (float(tally.values), tally.ties) == (float(expected), int(expected))


def test_a_flip_is_measured_between_the_swapped_elements() -> None:
    original = torch.tensor([[1.0, 0.99, 0.0]], dtype=torch.float64)
    candidate = torch.tensor([[1.0, 0.99, 2.0]], dtype=torch.float64)
    assert agreement(candidate, original, original, 0.01).values.tolist() == [0.0]
    assert agreement(original[:, [1, 0, 2]], original, original, 0.01).values.tolist() == [1.0]


def test_top_k_agreement_ignores_order() -> None:
    original = torch.tensor([[5.0, 4.0, 3.0, 1.0]])
    shuffled = torch.tensor([[3.0, 5.0, 4.0, 1.0]])
    assert agreement(shuffled, original, original, 0.0, 3) == Tally(torch.ones(1, dtype=torch.float64), 0)
    expected = torch.tensor([[5.0, 4.0, 1.0, 3.0]])
    assert agreement(expected, original, original, 0.0, 3).values.tolist() == [0.0]
    assert agreement(expected, original, original, 1.0, 3).values.tolist() == [1.0]


def test_the_largest_swapped_margin_decides_top_k_agreement() -> None:
    original = torch.tensor([[5.0, 4.0, 0.1, 0.0]])
    swapped = torch.tensor([[0.0, 0.1, 4.0, 5.0]])
    assert agreement(swapped, original, original, 2.4, 2).values.tolist() == [0.0]
    assert agreement(swapped, original, original, 2.5, 2).values.tolist() == [1.0]


def test_equal_values_may_be_chosen_in_any_order() -> None:
    for equal in (-math.inf, 0.0):
        original = torch.tensor([[5.0, equal, equal, equal]])
        for chosen in (1, 2, 3):
            candidate = original.clone()
            candidate[0, chosen] = 1.0
            assert agreement(candidate, original, original, 0.0, 2).values.tolist() == [1.0]


def test_a_sequence_agrees_as_a_whole_or_not_at_all() -> None:
    original = torch.eye(4).repeat(3, 1, 1)
    candidate = original.clone()
    candidate[1, 2] = torch.tensor([9.0, 0, 0, 0])
    tally = greedy_tokens(candidate, original, original.double(), 0.0, torch.ones(3, 4, dtype=torch.bool))
    assert tally.values.tolist() == [1.0, 0.0, 1.0]


def test_padding_and_sequences_of_only_padding_are_not_counted() -> None:
    original = torch.eye(4).repeat(3, 1, 1)
    candidate = original.flip(-1)
    candidate[:2, :2] = original[:2, :2]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    real = unpadded_positions({"attention_mask": mask}, original.shape[:-1])
    tally = greedy_tokens(candidate, original, original.double(), 0.0, real)
    assert tally.values.tolist() == [1.0, 0.0]
    assert agreement(candidate, original, original.double(), 0.0, 1, real).values.tolist() == [1.0] * 4 + [0.0]
    assert cosines(candidate, original, 0.0, real).values.tolist() == [1.0] * 4 + [0.0]


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}, 4),
        ({"attention_mask": torch.tensor([[True, False, False], [True, True, True]])}, 4),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.int64)}, 6),
        ({"attention_mask": torch.zeros(2, 3)}, 6),  # a float mask may be additive
        ({"attention_mask": torch.zeros(2, 3, dtype=torch.int64), "decoder_input_ids": torch.ones(2, 3)}, 6),
        ({"decoder_attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}, 4),
        ({}, 6),
    ],
    ids=["integers", "booleans", "another length", "floats", "of the encoder", "of the decoder", "none"],
)
def test_only_padding_masks_exclude_positions(batch: dict[str, torch.Tensor], counted: int) -> None:
    assert int(unpadded_positions(batch, torch.Size([2, 3])).sum()) == counted


def test_cosine_is_per_row_at_any_scale() -> None:
    original = torch.tensor([[3.0, 4.0], [1e-30, 0.0], [0.0, 0.0], [1e30, 1e30], [0.0, 0.0]])
    candidate = torch.tensor([[4.0, 3.0], [0.0, 1e-30], [0.0, 0.0], [-1e30, -1e30], [1.0, 0.0]])
    assert cosines(candidate, original).values.tolist() == pytest.approx([0.96, 0.0, 1.0, -1.0, 0.0])


def test_mask_iou_compares_the_positions_above_zero() -> None:
    original = torch.tensor([[[1.0, 2.0], [-1.0, 3.0]], [[-1.0, -1.0], [-1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]])
    candidate = torch.tensor([[[1.0, -2.0], [1.0, 3.0]], [[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]])
    for add in (lambda v: v, lambda v: v[:, None]):  # [batch, height, width] and [batch, 1, height, width]
        tally = intersections_over_unions(add(candidate), add(original), add(original), 0.5)
        assert tally.values.tolist() == [0.5, 0.0], "a mask that is empty in both is not counted"


def test_a_pixel_within_the_slack_of_the_threshold_may_cross_it() -> None:
    original = torch.tensor([[[1.0, 0.1], [1.0, -1.0]]])
    candidate = torch.tensor([[[1.0, -0.1], [1.0, -1.0]]])
    forgiven = intersections_over_unions(candidate, original, original, 0.1 + 1e-6)
    assert (forgiven.values.tolist(), forgiven.ties) == ([1.0], 1)
    counted = intersections_over_unions(candidate, original, original, 0.09)
    assert (counted.values.tolist(), counted.ties) == ([pytest.approx(2 / 3)], 0)


def test_channels_are_classes_unless_declared_as_masks() -> None:
    original = torch.tensor([[[[2.0, 2.0, 1.0, 1.0]], [[1.0, 1.0, 2.0, 2.0]], [[-1.0] * 4]]])
    candidate = torch.tensor([[[[2.0, 2.0, 2.0, 1.0]], [[1.0, 1.0, 1.0, 2.0]], [[-1.0] * 4]]])
    classes = intersections_over_unions(candidate, original, original, 0.0)
    assert classes.values.tolist() == pytest.approx([2 / 3, 1 / 2]), "the third class is nowhere"
    masks = intersections_over_unions(candidate, original, original, 0.0, classes=False)
    assert masks.values.tolist() == [1.0, 1.0], "of the third channel nothing is above zero"


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17 (1998), table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_the_wilson_interval(hits: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(hits, count) == pytest.approx((low, high), abs=5e-5)


@given(count=st.integers(1, 10**6), data=st.data())
def test_the_wilson_interval_contains_its_share_and_is_symmetric(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    interval, mirrored = wilson_interval(hits, count), wilson_interval(count - hits, count)
    assert interval is not None
    assert mirrored is not None
    low, high = interval
    assert 0.0 <= low <= hits / count <= high <= 1.0
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx(interval, abs=1e-12)


def test_a_mean_of_several_values_has_a_normal_interval() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    half = 1.959963984540054 * math.sqrt(5 / 3) / 2
    assert normal_interval(values) == pytest.approx((2.5 - half, 2.5 + half))
    assert normal_interval(values[:1]) is None
    assert wilson_interval(0, 0) is None


@pytest.mark.parametrize("nothing", [0.0, 1e-9])
def test_a_nonzero_row_does_not_agree_with_a_zero_row(nothing: float) -> None:
    original = torch.tensor([[3.0, 4.0], [nothing, 0.0], [0.0, nothing]])
    candidate = torch.tensor([[3.0, 4.0], [0.4, 0.0], [2.0, 0.0]])  # one of them could be rounding at a lower precision
    assert cosines(candidate, original, 1e-6).values.tolist() == [1.0, 0.0]
    real = torch.tensor([True, True, False])
    assert cosines(candidate, original, 1e-6, real).values.tolist() == [1.0]
