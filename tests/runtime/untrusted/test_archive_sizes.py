"""Sizes in ``.pt2`` files: only arithmetic reaches torch, which evaluates sizes as Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport import export
from optexport.errors import SourceError
from optexport.runtime.untrusted import archives, program_texts
from optexport.signature.signature import Dim
from tests._helpers.archives import give_sizes, refused, saved
from tests._helpers.graphs import Program


def test_size_that_contains_python_is_refused(archive: Path, tmp_path: Path) -> None:
    """torch passes sizes to sympy, which evaluates them."""
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    give_sizes(archive, code)
    refused(archive, tmp_path / "ran")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "code",
    [
        "S('eval')(S('chr')(95))",
        "Symbol('x').__class__",
        "Max('__import__')('os')",
        "Lambda(x, x)",
        "Function('f')",
        "[exit() for x in (1,)]",
        "(lambda: 1)()",
        "Symbol(f'{exit()}')",
        "Integer(1) if exit() else Integer(2)",
        "L['x'].size().__class__",
        "L['x'].storage()",
        "eval('1')",
        "Symbol('a b')",
        "Symbol",
        "Integer(*exit())",
        "Integer(**exit())",
    ],
)
def test_expression_beyond_arithmetic_is_refused(archive: Path, code: str) -> None:
    give_sizes(archive, code)
    with pytest.raises(SourceError, match="only names and sizes are allowed|Python|damaged"):
        archives.load_pt2(archive)


def test_deeply_nested_brackets_are_refused(archive: Path) -> None:
    text = "(" * 100_000 + "1" + ")" * 100_000
    give_sizes(archive, text)
    with pytest.raises(SourceError, match="only names and sizes are allowed") as raised:
        archives.load_pt2(archive)
    assert len(str(raised.value)) < 500


def test_fractions_in_sizes_are_arithmetic(tmp_path: Path) -> None:
    model = Program(lambda m, x: nn.functional.interpolate(x, scale_factor=1.5))
    dynamic = {"x": {2: torch.export.Dim("height", max=64), 3: torch.export.Dim("width", max=64)}}
    path = saved(model, tmp_path / "model.pt2", dynamic, torch.rand(2, 3, 8, 8))
    assert archives.load_pt2(path).module()(x=torch.rand(2, 3, 6, 6)).shape == (2, 3, 9, 9)


class Windows(nn.Module):
    """Attention within windows: pads to a multiple of one, and cuts the padding off again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, window = x.shape[1], 16
        padded = nn.functional.pad(x, (0, 0, 0, (window - length % window) % window)).view(x.shape[0], -1, window, 8)
        scores = (self.linear(padded) @ padded.transpose(-1, -2)).unsqueeze(2) + torch.ones(2, window, window)
        return (scores.softmax(-1).mean(2) @ padded).flatten(1, 2)[:, :length]


@pytest.mark.slow
def test_sizes_of_a_model_with_windows_are_arithmetic(tmp_path: Path) -> None:
    """Its strides are products of the maxima of quotients."""
    dynamic = {"x": {0: Dim("batch", 1, 4), 1: Dim("sequence", 17, 300)}}
    result = export(Windows().eval(), {"x": torch.rand(2, 20, 8)}, tmp_path / "out", formats=["pt2"], dynamic=dynamic)
    assert result.passed
    assert archives.load_pt2(tmp_path / "out" / "model.pt2").module()(x=torch.rand(2, 33, 8))[0].shape == (2, 33, 8)


def test_piecewise_size_is_arithmetic_but_a_call_in_it_is_not() -> None:
    first = "ExprCondPair(Integer(1), Equality(Symbol('u0', integer=True), Integer(1)))"
    size = f"Piecewise({first}, ExprCondPair({{}}, true))"
    assert program_texts._is_expression(size.format("Integer(0)"))
    assert not program_texts._is_expression(size.format("exec('0')"))
