"""Inputs whose values index an axis: exported without a word about them, or declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from optexport.errors import ConfigError, TraceError
from optexport.signature.signature import Dim
from tests._helpers.exports import quick, run

X = torch.randn(3, 7, 4)
DYNAMIC: dict[str, Any] = {"x": {0: "batch", 1: Dim("time", 2, 40)}, "lengths": {0: "batch"}}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.linear(x[torch.arange(x.shape[0]), lengths - 1])


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))


class Short(nn.Module):
    """Fails at short sequences, whatever the lengths are."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(x.shape[0]), 4 + 0 * lengths]


def test_last_token_is_right_at_other_sizes(tmp_path: Path) -> None:
    model = Last().eval()
    result = quick(model, {"x": X, "lengths": torch.tensor([7, 2, 5])}, tmp_path / "bundle", dynamic=DYNAMIC)
    assert result.manifest.values["lengths"].indexes == ["time"]
    batch = {"x": torch.randn(2, 20, 4), "lengths": torch.tensor([20, 3])}
    torch.testing.assert_close(run(result, **batch)["output"], model(**batch))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
def test_edges_are_right_at_other_numbers_of_nodes(file_format: str, tmp_path: Path) -> None:
    model = Messages().eval()
    inputs = {"x": torch.randn(6, 4), "edges": torch.randint(0, 6, (2, 9))}
    dynamic = {"x": {0: Dim("nodes", 2, 60)}, "edges": {1: "edges"}}
    result = quick(model, inputs, tmp_path / "bundle", formats=[file_format], dynamic=dynamic)
    batch = {"x": torch.randn(30, 4), "edges": torch.randint(0, 30, (2, 50))}
    torch.testing.assert_close(run(result, **batch)["output"], model(**batch), rtol=1e-4, atol=1e-5)


class Parts(nn.Module):
    """Cuts rows into parts of given lengths; returns their means, and the parts with padding."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = torch.split(x, lengths.tolist())
        return torch.stack([part.mean(0) for part in parts]), pad_sequence(parts, batch_first=True, padding_value=-1.0)


@pytest.mark.slow
def test_parts_of_lengths_are_right_at_other_lengths(tmp_path: Path) -> None:
    model = Parts().eval()
    inputs = {"x": torch.randn(9, 4), "lengths": torch.tensor([2, 3, 4])}
    result = quick(model, inputs, tmp_path / "bundle", formats=["onnx", "torchscript"], dynamic={"x": {0: "rows"}})
    assert result.manifest.values["lengths"].adds_up
    for lengths in ([1, 1, 7], [4, 4, 1], [12, 3, 5]):
        batch = {"x": torch.randn(sum(lengths), 4), "lengths": torch.tensor(lengths)}
        for actual, expected in zip(run(result, **batch).values(), model(**batch), strict=True):
            torch.testing.assert_close(actual, expected)


def test_wrong_names_of_values_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    inputs = {"x": X, "lengths": torch.tensor([7, 2, 5])}
    for values, message in (
        ({"length": {"indexes": "time"}}, 'values: length: .*\nHint: Did you mean "lengths"'),
        ({"x": {"indexes": "time"}}, "values: x: expected whole numbers, found float32"),
        (
            {"lengths": {"indexes": "tim"}},
            "no input has an axis 'tim'\nHint: Did you mean \"time\".* Name the axis in `dynamic`",
        ),
        ({"lengths": {"index": "time"}}, "inputs.values.lengths"),
        ({"lengths": "time"}, "inputs.values.lengths: expected a table"),
        ("lengths", "values: 'lengths' is not a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            quick(Last().eval(), inputs, tmp_path / "bundle", dynamic=DYNAMIC, values=values)


def test_refusal_at_a_made_up_batch_asks_for_the_axis(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Hint: If the values of lengths are .* \[inputs.values\] lengths = "):
        quick(Short(), {"x": X, "lengths": torch.tensor([7, 2, 5])}, tmp_path / "bundle", dynamic=DYNAMIC)
