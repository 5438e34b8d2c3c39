"""Numbers that a model reads from tensors, and branches on them: as exact in every file as in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.exporters import torchscript
from tests._helpers.graphs import Program
from tests.exporters import files

Function = Callable[[Any, Any], Any]

X = {"x": torch.randn(3, 4)}
ROWS = {"x": {0: "rows"}}


def _assert_files(model: nn.Module, example: dict[str, torch.Tensor], place: Path, *inputs: torch.Tensor) -> None:
    """Asserts that an ONNX and a TorchScript file give the outputs of the model for other values of its last input."""
    dynamic = {name: {0: "rows"} for name, tensor in example.items() if name == "x"}
    subject = files.prepare(model.eval(), example, dynamic)
    batches = [{**example, [*example][-1]: tensor} for tensor in inputs]
    files.save_onnx(subject, place / "model.onnx")
    files.assert_outputs(subject, place / "model.onnx", *batches)
    assert torchscript.save(subject.program, subject.signature, example, place / "model.pt") is None
    script = torch.jit.load(place / "model.pt")
    for batch in batches:
        for result, expected in zip(script(**batch), files.eager(subject, batch).values(), strict=True):
            torch.testing.assert_close(result, expected, equal_nan=True)


def above(m: nn.Module, x: torch.Tensor) -> Any:
    return x + 1 if x.max().item() > 0.3 else x


def at_least(m: nn.Module, x: torch.Tensor) -> Any:
    return x + 1 if x.max().item() >= 0.3 else x


def equal(m: nn.Module, x: torch.Tensor) -> Any:
    return x + 1 if x.max().item() == 0.3 else x


def unequal(m: nn.Module, x: torch.Tensor) -> Any:
    return x + 1 if x.max().item() != 0.7 else x


def sum_of_two(m: nn.Module, x: torch.Tensor) -> Any:
    a, b = x[0, :2].tolist()
    return x * 2 if a + b * 0.1 > 0.33 else x - a


def whole_part(m: nn.Module, x: torch.Tensor) -> Any:
    return x * int(x.max().item() * 10) + round(x.min().item() * 10) % 3


def divides_by_a_number(m: nn.Module, x: torch.Tensor) -> Any:
    a, b = x[0, 0].item(), x[0, 1].item()
    ratio = a / b if b != 0 else 0.0
    return x * ratio if ratio > 1 else x * min(ratio, 0.5)


def passes_numbers(m: nn.Module, x: torch.Tensor) -> Any:
    v = x.mean().item()
    y = x.clone()
    y[y > 0] = v
    y += v
    return (
        *(y, x.clamp(min=v), x.clamp(-1, abs(v)), 2.0**x * v, v - x, x // (abs(v) + 1), x % (abs(v) + 1)),
        *(torch.full((x.shape[0], 2), v), x.masked_fill(x < 0, v), torch.where(x > 0, x, v), torch.tensor(v)),
    )


def reads_before_a_write(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.clone()
    v = y[0, 0].item()
    y.add_(1)
    return y * v if v > 0.3 else y


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "function",
    [
        *(above, at_least, equal, unequal, sum_of_two, whole_part),
        *(divides_by_a_number, passes_numbers, reads_before_a_write),
    ],
    ids=lambda function: function.__name__,
)
def test_numbers_are_exact_in_float64(function: Function, tmp_path: Path) -> None:
    """float32(0.3) is above the Python float 0.3, and float32(0.7) is below 0.7."""
    limits = [torch.full((3, 4), value) for value in (0.3, 0.7, 0.0, 2.5)]
    _assert_files(Program(function), X, tmp_path, *limits, torch.randn(5, 4), -torch.rand(2, 4))


class Chosen(nn.Module):
    """Calls a function with a second input."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> Any:
        return self.function(x, k)


def by_number(x: torch.Tensor, k: torch.Tensor) -> Any:
    v = k.item()
    if v == 0:
        return x
    if v in (2, 3):
        return x * 3
    return x * v


def by_member(x: torch.Tensor, k: torch.Tensor) -> Any:
    return x * 2 if 3 in k.tolist() else x


def by_element(x: torch.Tensor, k: torch.Tensor) -> Any:
    return x * 2 if 3 in k and not k.sum().item() > 5 else x


def by_flag(x: torch.Tensor, k: torch.Tensor) -> Any:
    if not k.item():
        x = x - 1
    return x * k.item() if k.item() and x.sum().item() > 0 else -x


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (by_number, [1, 0, 2, 3, 9, -1]),
        (by_member, [[1, 3], [1, 2], [3, 0], [0, 0]]),
        (by_element, [[1, 3], [1, 2], [3, 7], [0, 0]]),
        (by_flag, [True, False]),
    ],
)
def test_whole_numbers_and_flags_choose_a_way(function: Any, values: list[Any], tmp_path: Path) -> None:
    example = {"x": torch.randn(3, 4), "k": torch.tensor(values[0])}
    _assert_files(Chosen(function), example, tmp_path, *map(torch.tensor, values))


def mean_of_large(m: nn.Module, x: torch.Tensor) -> Any:
    large = x[x > 0.5]
    return x if large.numel() == 0 else x * large.mean()


def test_number_of_masked_elements_chooses_a_way(tmp_path: Path) -> None:
    _assert_files(Program(mean_of_large), X, tmp_path, torch.zeros(2, 4), torch.ones(5, 4), torch.randn(3, 4))


def replaces_nan(m: nn.Module, x: torch.Tensor) -> Any:
    v = x.sum().item()
    return torch.nan_to_num(x) if v != v else x


def finds_infinity(m: nn.Module, x: torch.Tensor) -> Any:
    v = x.sum().item()
    return x * 0 if v - v != 0 else x + v * 0


def rounds(m: nn.Module, x: torch.Tensor) -> Any:
    v = x.max().item()
    return x * 2 if v + 0.1 - 0.1 == v else x


def covers_all_but_nan(m: nn.Module, x: torch.Tensor) -> Any:
    v = x.sum().item()
    if v > 0:
        return x
    return x * 2 if v <= 0 else x * 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "function", [replaces_nan, rounds, finds_infinity, covers_all_but_nan], ids=lambda function: function.__name__
)
def test_comparisons_treat_numbers_as_floats(function: Function, tmp_path: Path) -> None:
    """A real number equals itself, and addition does not round it."""
    special = [torch.tensor([[value, 1.0, -2.0, 0.5]]) for value in (torch.nan, torch.inf, -torch.inf, 0.3, 0.7)]
    _assert_files(Program(function), X, tmp_path, *special, torch.randn(5, 4))


class _Cut(nn.Module):
    """Computes a size from a number."""

    def __init__(self, body: Function) -> None:
        super().__init__()
        self._body = body

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> Any:
        return self._body(x, share.item())


@pytest.mark.parametrize(
    "body",
    [
        lambda x, share: x[:, : int(20 * share)],
        lambda x, share: x[:, : math.ceil(share * 20)] * 2,
        lambda x, share: torch.arange(int(20 * share)) + x[:, :1],
    ],
)
def test_size_from_a_number_is_as_exact_as_in_python(body: Function, tmp_path: Path) -> None:
    """``int(20 * 0.9)`` of the float32 next to 0.9 is 17, and 18 if the product is a float32 too."""
    example = {"x": torch.randn(3, 20), "share": torch.tensor(0.5)}
    _assert_files(_Cut(body), example, tmp_path, *map(torch.tensor, (0.9, 0.7, 0.1, 0.35, 0.15)))
