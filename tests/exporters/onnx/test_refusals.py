"""Refusals of the ONNX export name the operator, the line of the model, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.errors import ExportError
from optexport.exporters.onnx import exporter
from tests.exporters import files


class Factors(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.linalg.svdvals(y)


def test_missing_operator_is_refused_with_its_line(tmp_path: Path) -> None:
    subject = files.prepare(Factors(), {"x": torch.randn(4, 3)}, {"x": {0: "rows"}})
    with pytest.raises(ExportError) as raised:
        files.save_onnx(subject, tmp_path / "model.onnx")
    assert "aten._linalg_svd, at test_refusals.py:19: return torch.linalg.svdvals(y)" in str(raised.value)
    assert "ONNX has no operator for it" in str(raised.value)
    assert "outside the model" in str(raised.value)
    assert "opset" not in str(raised.value)


def test_another_opset_is_advised_only_if_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = files.prepare(nn.ReLU(), {"input": torch.randn(4, 3)}, {"input": {0: "rows"}})
    convert = exporter._convert_patched

    def refuse_default(*args: object) -> object:
        if args[-1] is None:
            raise ValueError("opset 20 lacks it")
        return convert(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(exporter, "_convert_patched", refuse_default)
    with pytest.raises(ExportError, match="opset 20 lacks it") as raised:
        exporter.convert(subject.flat, subject.signature, subject.example)
    assert raised.value.hint == "Set export.opset to 23."
