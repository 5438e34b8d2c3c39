"""Tests of the savings in ``torch.onnx``: what they leave out changes no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.onnx._internal.exporter import _fx_passes, _registration

from optexport.exporters.onnx import transformers_fixes
from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests.exporters import files

X = torch.linspace(-2, 2, 12).reshape(3, 4)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the graphs that ``torch.onnx`` decomposes."""
    graphs: list[Any] = []
    original = _fx_passes.decompose_with_registry

    def decompose(program: Any, registry: Any) -> Any:
        graphs.append(program)
        return original(program, registry)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", decompose)
    return graphs


def check(compute: Callable[..., Any], folder: Path) -> Path:
    """Saves a model, compares it at another size, and returns the file."""
    subject = files.prepare(Program(compute), {"x": X}, {"x": {0: Dim("batch", 1, 32)}})
    path = folder / "model.onnx"
    files.save_onnx(subject, path)
    files.assert_outputs(subject, path, {"x": torch.randn(7, 4)})
    return path


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: x.relu() @ x.transpose(0, 1),
        lambda m, x: (x.double().float() * 2, (x * 3).long()),
        lambda m, x: ((x > 0) & (x < 1)).to(x.dtype),
        lambda m, x: ((x > 0) | (x < -1), (x > 0) ^ (x > 1)),
        lambda m, x: (x.relu().to(torch.float32), x.transpose(0, 1).contiguous()),
        lambda m, x: (x.contiguous(), x.to(x.dtype), x + 1),
        lambda m, x: x.view(x.shape[0], 4).reshape(-1, 4) + x.shape[0] // 2,
        lambda m, x: (torch.ops.aten.alias(x.relu()), torch.ops.aten.alias(x), x.sin().detach(), x + 1),
    ],
    ids=["products", "dtypes", "and", "or, xor", "conversions as outputs", "inputs as outputs", "sizes", "aliases"],
)
def test_graph_of_translated_operators_is_not_decomposed(
    compute: Callable[..., Any], tmp_path: Path, decomposed: list[Any]
) -> None:
    check(compute, tmp_path)
    assert not decomposed


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: torch.clone(x).add_(1),
        lambda m, x: torch.nn.functional.softplus(x).logit(0.1) * torch.special.entr(x.abs()),
    ],
    ids=["a write", "an operator without a translation"],
)
def test_other_graph_is_decomposed(compute: Callable[..., Any], tmp_path: Path, decomposed: list[Any]) -> None:
    check(compute, tmp_path)
    assert decomposed


def test_needless_conversions_and_reshapes_leave_no_node(tmp_path: Path, decomposed: list[Any]) -> None:
    path = check(lambda m, x: x.contiguous().to(torch.float32).reshape(x.shape[0], 4).relu(), tmp_path)
    assert not decomposed
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Relu"]


def test_torchlib_is_read_once_and_its_registry_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _registration.ONNXRegistry.from_torchlib
    subject, path = files.prepare(Program(lambda m, x: x.relu()), {"x": X}, None), tmp_path / "model.onnx"
    files.save_onnx(subject, path)
    monkeypatch.setattr(transformers_fixes, "onnx_translations", dict)
    monkeypatch.setattr(_registration, "onnxscript_apis", None)  # an export would read torchlib from here
    files.save_onnx(subject, path)
    files.assert_outputs(subject, path, subject.example)
    assert original == _registration.ONNXRegistry.from_torchlib
