"""Models that keep values in global variables, class attributes and caches of functions, in the Python API."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from optexport.errors import TraceError
from optexport.tracing.trace import trace
from tests._helpers.exports import BATCH, X, quick, run

_LAST: torch.Tensor | None = None
_CALLS = 0
_TABLE: torch.Tensor | None = None
_FEATURES: list[torch.Tensor] = []


class _Context:
    last: Any = None


_CONTEXT = _Context()


def store_last(value: torch.Tensor) -> None:
    global _LAST
    _LAST = value


class AddsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if _LAST is None or _LAST.shape != x.shape else x + _LAST
        store_last(y)
        return y


class AddsLastOfObject(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if _CONTEXT.last is None or _CONTEXT.last.shape != x.shape else x + _CONTEXT.last
        _CONTEXT.last = y
        return y


class AddsLastOfClass(nn.Module):
    last: ClassVar[torch.Tensor | None] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.last is None or self.last.shape != x.shape else x + self.last
        AddsLastOfClass.last = y
        return y


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _CALLS
        _CALLS += 1
        return x if _CALLS < 500 else 2 * x


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (AddsLast, "_LAST"),
        (AddsLastOfObject, "_CONTEXT.last"),
        (AddsLastOfClass, "AddsLastOfClass.last"),
        (Counts, "_CALLS"),
    ],
)
def test_state_outside_the_model_is_refused_by_name(cls: type[nn.Module], name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"the outputs depend on what earlier calls wrote to {name} "):
        quick(cls().eval(), {"x": X}, tmp_path / "bundle", formats=["pt2"], dynamic=BATCH)
    assert (_LAST, _CONTEXT.last, AddsLastOfClass.last, _CALLS) == (None, None, None, 0)


def test_state_in_another_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "call_counter.py").write_text(
        "CALLS = 0\n\ndef step():\n    global CALLS\n    CALLS += 1\n    return CALLS\n"
    )
    (tmp_path / "counted_model.py").write_text(
        "import call_counter\nfrom torch import nn\n\nclass Counted(nn.Module):\n"
        "    def forward(self, x):\n        return x if call_counter.step() < 500 else 2 * x\n"
    )
    model = importlib.import_module("counted_model").Counted().eval()
    with pytest.raises(TraceError, match="the outputs depend on what earlier calls wrote to CALLS "):
        quick(model, {"x": X}, tmp_path / "bundle", formats=["pt2"], dynamic=BATCH)
    assert importlib.import_module("call_counter").CALLS == 0


class FillsOnce(nn.Module):
    """Builds a table in the first call, and keeps its features, which no output depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _TABLE
        if _TABLE is None:
            _TABLE = torch.arange(4) * 0.5
        _FEATURES.append(x * 2)
        return x + _TABLE


def test_values_outside_the_model_that_do_not_matter_are_restored(tmp_path: Path) -> None:
    result = quick(FillsOnce().eval(), {"x": X}, tmp_path / "bundle", formats=["pt2"], dynamic=BATCH)
    assert all(type(value) is torch.Tensor for value in (_TABLE, *_FEATURES) if value is not None)
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(result, x=x)["output"], x + torch.arange(4) * 0.5)


@functools.lru_cache
def slopes(heads: int) -> torch.Tensor:
    return 0.5 ** torch.arange(1, heads + 1)


class Slopes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * slopes(4) + self.shift(4)

    @staticmethod
    @functools.lru_cache
    def shift(size: int) -> torch.Tensor:
        return torch.arange(size) / 8


def test_cached_functions_keep_no_tensors_of_a_trace() -> None:
    traced = trace(Slopes().eval(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert type(slopes(4)) is torch.Tensor
    assert type(Slopes.shift(4)) is torch.Tensor
    x = torch.randn(7, 4)
    torch.testing.assert_close(traced.graph_module(x), Slopes()(x))
