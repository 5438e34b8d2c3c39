"""Dimensions of a trace: named, tied and bounded as declared, or fixed and reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetModel

from optexport.api import symbolic_trace, trace
from optexport.errors import TraceError
from optexport.signature.signature import Dim
from optexport.testing import outputs
from tests._helpers import models
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.tracing.test_trace import Two, X


class Fixed(nn.Module):
    """Adds a table of seven positions, so the second axis can have no other size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table).reshape(-1, 28)


def test_declared_dimension_fixed_by_the_model_is_named() -> None:
    x = torch.randn(2, 7, 4)
    with pytest.raises(TraceError, match=r"input x, axis 1: the model fixes sequence to 7") as raised:
        symbolic_trace(Fixed(), example_inputs={"x": x}, dynamic={"x": {0: "batch", 1: "sequence"}})
    assert raised.value.exit_code == 3
    assert raised.value.hint
    with pytest.raises(TraceError, match=r"sequence"):
        symbolic_trace(Fixed(), example_inputs={"x": x}, dynamic={"x": {0: "batch", 1: Dim("sequence", 2, 16)}})


def test_undeclared_dimension_fixed_by_the_model_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="optexport"):
        graph_module = symbolic_trace(Fixed(), example_inputs={"x": torch.randn(2, 7, 4)})
    assert "x[1] = 7" in caplog.text
    assert "x[0]" not in caplog.text
    assert outputs(graph_module, torch.randn(5, 7, 4))[0].shape == (5, 28)


def test_declared_range_refused_by_the_model_is_named() -> None:
    model = Program(lambda m, x: x + m.table[: x.shape[1]], table=nn.Parameter(torch.randn(7, 4)))
    x = torch.randn(2, 5, 4)
    batch = Dim("batch", 1, 8)
    fits = {"x": {0: batch, 1: Dim("sequence", 2, 7)}}
    graph_module = symbolic_trace(model, example_inputs={"x": x}, dynamic=fits)
    assert outputs(graph_module, torch.randn(3, 7, 4))[0].shape == (3, 7, 4)
    with pytest.raises(TraceError, match="Set the largest size of sequence to 7: the model takes no larger one."):
        symbolic_trace(model, example_inputs={"x": x}, dynamic={"x": {0: batch, 1: Dim("sequence", 2, 512)}})


class Chunks(nn.Module):
    """Pads to a multiple of 4, and cuts back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        y = nn.functional.pad(x, (0, 0, 0, (-n) % 4))
        return (y.view(y.shape[0], -1, 4, 3) * 2).flatten(1, 2)[:, :n]


@pytest.mark.parametrize("low", [1, 5])
def test_range_of_an_axis_that_is_padded_to_a_multiple(low: int) -> None:
    """torch.export failed: "Cannot create Dim with inconsistent min=0, max=-10"."""
    dynamic = {"x": {0: "batch", 1: Dim("length", low, 40)}}
    traced = trace(Chunks(), {"x": torch.randn(2, 10, 3)}, dynamic)
    assert traced.signature.dims["length"] == Dim("length", low, 40)
    for size in (7, 12, 40):
        x = torch.randn(3, size, 3)
        assert torch.equal(outputs(traced.graph_module, x)[0], x * 2)


def test_declared_dimensions_are_named_tied_and_bounded() -> None:
    x = {"first": torch.randn(3, 4), "second": torch.randn(3, 3)}
    rows = Dim("rows", 2, 64)
    traced = trace(randomise(Two()), x, {"first": {0: rows}, "second": {0: rows}})
    first, second = traced.signature.inputs
    assert first.shape == ("rows", 4)
    assert second.shape == ("rows", 3)
    assert traced.signature.dims["rows"] == rows
    assert [spec.shape for spec in traced.signature.outputs] == [("rows", 3), ("rows",)]
    assert not traced.fixed


def test_undeclared_axes_stay_static() -> None:
    traced = trace(randomise(Two()), {"first": X}, {"first": {0: "rows"}})
    assert traced.signature.inputs[0].shape == ("rows", 4)
    traced = trace(randomise(Two()), {"first": X}, {})
    assert traced.signature.inputs[0].shape == (5, 4)


@pytest.mark.slow
def test_dimensions_of_a_transformers_model_have_usual_names() -> None:
    traced = trace(models.model("bart"), models.inputs("bart", 2, 6))
    shapes = {spec.name: spec.shape for spec in traced.signature.inputs}
    assert shapes == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "sequence"),
        "decoder_input_ids": ("batch", "decoder_sequence"),
    }
    named = {spec.name: spec.shape for spec in traced.signature.outputs}
    assert named["last_hidden_state"] == ("batch", "decoder_sequence", 16)
    assert named["encoder_last_hidden_state"] == ("batch", "sequence", 16)


def test_axes_that_must_be_equal_share_one_name() -> None:
    x = {"first": X, "second": torch.randn(5, 3)}
    traced = trace(randomise(Two()), x)
    assert traced.signature.inputs[0].shape[0] == traced.signature.inputs[1].shape[0]


@pytest.mark.slow
def test_size_that_makes_a_view_divide_by_zero_is_in_doubt() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.layer(x).transpose(0, 1).contiguous().view(-1, 6).view(2, -1, 3, 6)

    x = torch.randn(4, 2, 3, 6)
    traced = trace(randomise(Program(body, layer=nn.Linear(6, 6))), {"x": x})
    assert traced.suspect_sizes
    assert outputs(traced.graph_module, x)[0].shape == (2, 4, 3, 6)


@pytest.mark.slow
def test_undeclared_range_starts_above_sizes_that_break_it() -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = randomise(ResNetModel(config))
    traced = trace(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    minimum = traced.signature.dims["width"].min
    assert 2 < minimum < 32
    assert traced.suspect_sizes == ()
    pixels = torch.randn(1, 3, 37, minimum)
    with torch.no_grad():
        assert torch.equal(traced.graph_module(pixel_values=pixels)[0], model(pixel_values=pixels)[0])
        with pytest.raises(RuntimeError):
            traced.graph_module(pixel_values=pixels[..., : minimum - 1])


class Shuffled(nn.Module):
    """Checks in floats if half of a size is whole. torch.export has no answer for a dynamic size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 0.5 != 0:
            raise ValueError
        return x.reshape(x.shape[0], int(x.shape[1] * 0.5), 2).sum(1)


def test_axis_of_size_one_has_a_single_reason() -> None:
    row, size = trace(Shuffled(), {"x": torch.randn(1, 8)}).fixed
    assert row == "x[0] = 1; the example has one row; declare the axis to allow more"
    assert "if that were dynamic" in size


def test_size_that_cannot_be_dynamic_is_fixed_unless_declared() -> None:
    traced = trace(Shuffled(), {"x": torch.randn(3, 8)})
    assert traced.signature.inputs[0].shape == ("batch", 8)
    (fixed,) = traced.fixed
    assert fixed.startswith(
        "x[1] = 8; if that were dynamic, torch.export could not trace the model, and stopped at test_dimensions.py"
    )
    with pytest.raises(TraceError, match=r"could not trace the model, and stopped at test_dimensions\.py"):
        trace(Shuffled(), {"x": torch.randn(3, 8)}, {"x": {0: "batch", 1: "width"}})


class PadsIfNecessary(nn.Module):
    """Pads images to a multiple of 4, but only those that are none, and cuts the result back."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 4, 4), nn.ConvTranspose2d(4, 3, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        if height % 4 or width % 4:
            x = nn.functional.pad(x, (0, -width % 4, 0, -height % 4), mode="replicate")
        return self.up(self.down(x))[..., :height, :width]


class KnowsOneSize(nn.Module):
    """Has a mask for the size of its training, and computes that of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8).cumsum(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 8:
            return x * self.mask
        return x * torch.ones(x.shape[1]).cumsum(0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "shape", "others"),
    [
        (PadsIfNecessary, (2, 3, 8, 12), [(1, 3, 8, 8), (2, 3, 9, 12), (3, 3, 8, 13), (2, 3, 15, 21)]),
        (KnowsOneSize, (2, 8), [(1, 5), (3, 8), (2, 16)]),
    ],
)
def test_branch_for_the_sizes_of_the_example_is_traced_at_other_sizes(
    make: type[nn.Module], shape: tuple[int, ...], others: list[tuple[int, ...]]
) -> None:
    model = randomise(make().eval())
    sizes: dict[int, str | Dim] = {
        axis: Dim(f"size_{axis}", 4, 64) for axis in range(1, len(shape)) if shape[axis] != 3
    }
    graph_module = symbolic_trace(model, example_inputs={"x": torch.randn(shape)}, dynamic={"x": {0: "batch", **sizes}})
    for other in (shape, *others):
        x = torch.randn(other)
        torch.testing.assert_close(outputs(graph_module, x)[0], model(x))


def test_larger_sizes_must_give_the_results_of_the_example() -> None:
    model = Program(lambda m, x: x.sum(1) if x.shape[1] == 8 else x.mean(1))
    with pytest.raises(TraceError, match="it requires sequence = 8, because of test_dimensions"):
        symbolic_trace(
            model, example_inputs={"x": torch.randn(2, 8)}, dynamic={"x": {0: "batch", 1: Dim("sequence", 2, 64)}}
        )
