"""Models that fix a size or ask for a value in the usual trace are traced strictly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import optexport
from optexport.errors import TraceError
from optexport.signature.signature import Dim, Dynamic
from optexport.tracing import dynamo_exporter
from optexport.tracing.program_export import export_with_axes
from optexport.tracing.trace import trace


class Length(nn.Module):
    """Divides by the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / len(x)


class Segments(nn.Module):
    """Sums the rows of each segment."""

    def forward(self, x: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        count = int(segment.max()) + 1
        return torch.zeros(count, x.shape[1]).index_add(0, segment, x)[segment]


@pytest.mark.parametrize("dynamic", [{"x": {0: "rows"}}, {"x": {0: Dim("rows", 1, 50)}}, None], ids=str)
@pytest.mark.sample(1)
def test_length_of_a_tensor_stays_dynamic(dynamic: Dynamic | None) -> None:
    model = Length().eval()
    traced = trace(model, {"x": torch.randn(3, 4)}, dynamic)
    assert traced.is_strict
    assert list(traced.graph_module.state_dict()) == ["linear.weight", "linear.bias"]
    x = torch.randn(7, 4)
    assert torch.equal(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_number_that_depends_on_values_stays_dynamic() -> None:
    example = {"x": torch.randn(5, 4), "segment": torch.tensor([0, 2, 2, 1, 3])}
    traced = trace(Segments(), example, {"x": {0: "rows"}, "segment": {0: "rows"}})
    assert traced.is_strict
    x, segment = torch.randn(7, 4), torch.tensor([0, 5, 5, 1, 2, 3, 4])
    assert torch.equal(traced.graph_module(x, segment), Segments()(x, segment))


class Checked(nn.Module):
    """Has an axis that only a strict trace keeps, and compares a number with itself."""

    def __init__(self, *, is_tensor: bool) -> None:
        super().__init__()
        self.is_tensor = is_tensor

    def forward(self, x: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        count = int(segment.max()) + 1
        total = x.sum()
        sums = torch.zeros(count, x.shape[1]).index_add(0, segment, x)
        if self.is_tensor:
            return torch.where(total != total, torch.zeros(()), sums)
        value = total.item()
        return sums * 0 if value != value else sums


def test_a_number_that_may_be_nan_differs_from_itself() -> None:
    example = {"x": torch.randn(5, 4), "segment": torch.tensor([0, 2, 2, 1, 3])}
    dynamic = {"x": {0: "rows"}, "segment": {0: "rows"}}
    model = Checked(is_tensor=True)
    x = torch.full((7, 4), torch.nan)
    segment = torch.tensor([0, 5, 5, 1, 2, 3, 4])
    traced = trace(model, example, dynamic)
    assert torch.equal(traced.graph_module(x, segment), model(x, segment))
    with pytest.raises(TraceError):  # not traced as if no number were NaN
        trace(Checked(is_tensor=False), example, dynamic)


def test_usual_trace_is_preferred() -> None:
    assert not trace(nn.Linear(4, 4), {"input": torch.randn(3, 4)}, {"input": {0: "rows"}}).is_strict


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["onnx", "torchscript"])
def test_files_of_a_strict_trace_take_other_sizes(tmp_path, format_name: str) -> None:
    example, dynamic = {"x": torch.randn(3, 4)}, {"x": {0: "rows"}}
    result = optexport.export(Length().eval(), example, tmp_path / "bundle", formats=[format_name], dynamic=dynamic)
    assert result.manifest.is_strict_trace
    bundle = optexport.Bundle.load(tmp_path / "bundle")
    (two,) = bundle(x=torch.ones(2, 4)).values()
    (five,) = bundle(x=torch.ones(5, 4)).values()
    torch.testing.assert_close(torch.as_tensor(two[0]) * 2, torch.as_tensor(five[0]) * 5)


class Waves(nn.Module):
    """Multiplies by a table that is computed from a NumPy array."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = np.arange(4) / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(np.cos(self.steps)).float()


def test_strict_trace_without_the_values_of_an_array_is_refused() -> None:
    with dynamo_exporter.tracing_strictly(), pytest.raises(TraceError, match="lost the values of a NumPy array"):
        export_with_axes(Waves(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
