"""Digests of the computation of a model. Graph and code are both needed, since neither is sufficient alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from optexport.api import symbolic_trace
from optexport.cache.model_key import make_model_key

MODULE = """
import torch

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.eps, self.linear = 1e-12, torch.nn.Linear(4, 4)

    def forward(self, x):
        minimum = {minimum}
        return self.linear(x + self.eps).clamp(min=minimum)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    monkeypatch.syspath_prepend(str(tmp_path))


def masked(folder: Path, minimum: str = "torch.finfo(x.dtype).min") -> nn.Module:
    (folder / "masked_computation.py").write_text(MODULE.format(minimum=minimum))
    sys.modules.pop("masked_computation", None)
    importlib.invalidate_caches()
    model: nn.Module = importlib.import_module("masked_computation").Masked()
    return model


def digest(model: nn.Module) -> str | None:
    return make_model_key(symbolic_trace(model, example_inputs={"x": torch.zeros(2, 4)}), model)


@pytest.mark.slow
def test_equal_models_have_equal_digests(tmp_path: Path) -> None:
    before = digest(masked(tmp_path))
    assert before is not None
    assert digest(masked(tmp_path)) == before


@pytest.mark.slow
def test_attribute_of_the_model_changes_the_digest(tmp_path: Path) -> None:
    model = masked(tmp_path)
    before = digest(model)
    model.eps = 1e-11
    assert digest(model) != before


@pytest.mark.slow
def test_code_that_differs_only_in_float64_changes_the_digest(tmp_path: Path) -> None:
    assert digest(masked(tmp_path)) != digest(masked(tmp_path, repr(torch.finfo(torch.float32).min)))


@pytest.mark.slow
def test_helper_in_another_folder_changes_the_digest(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path_factory.mktemp("elsewhere") / "helper_elsewhere.py"
    monkeypatch.syspath_prepend(str(helper.parent))
    monkeypatch.delitem(sys.modules, "helper_elsewhere", raising=False)
    model = masked(tmp_path, "__import__('helper_elsewhere').LEAST['float64' in str(x.dtype)]")
    helper.write_text("LEAST = (-1e30, -1e30)")
    before = digest(model)
    assert digest(model) == before
    helper.write_text("LEAST = (-1e30, -1e25)")  # a trace in float32 does not show this change
    assert digest(model) != before


def test_graph_that_calls_a_lambda_has_no_digest() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(lambda x: x, (graph.placeholder("x"),)))
    assert make_model_key(fx.GraphModule(nn.Module(), graph), nn.Linear(4, 4)) is None


@pytest.mark.slow
def test_model_has_no_digest_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    assert digest(masked(tmp_path)) is None
