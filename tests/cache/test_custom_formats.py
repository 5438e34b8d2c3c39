"""The cache keeps no files of formats of other packages, because it does not know their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optexport
from optexport.errors import ExportError
from optexport.exporters import Format, get_format
from optexport.exporters.registry import registered


class Plain(Format):
    """Writes ONNX files under another name."""

    name = "plain"
    file_name = "model.plain"
    runtime = "ONNX Runtime"

    def write(self, graph: Any, path: Path, passes: Any) -> str | None:
        return get_format("onnx").write(graph, path, [])

    def open(self, path: Path, outputs: Any, device: Any) -> Any:
        return get_format("onnx").open(path, outputs, device)


class Broken(Plain):
    def write(self, graph: Any, path: Path, passes: Any) -> str | None:
        raise RuntimeError("broken")


class Empty(Plain):
    def write(self, graph: Any, path: Path, passes: Any) -> str | None:
        return None


def test_changed_code_of_a_format_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))

    def export() -> optexport.Result:
        model = nn.Linear(4, 2).eval()
        return optexport.export(model, {"input": torch.ones(3, 4)}, tmp_path / "out", formats=["plain"])

    for _ in range(2):
        with registered(Plain):
            assert "export plain" not in export().cache_hits
    with registered(Broken), pytest.raises(ExportError, match="the format plain failed: RuntimeError: broken") as error:
        export()
    assert error.value.location == f"{__name__}:Broken.write"
    with registered(Empty), pytest.raises(ExportError, match="the format plain wrote no file model.plain"):
        export()
