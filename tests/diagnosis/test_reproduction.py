"""The folder of a failed check: its files, its text, and when it is written and removed."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from torch import fx

from optexport import export
from optexport.diagnosis import reproduction
from optexport.transformations import (
    Transformation,
)
from tests._helpers import exports
from tests.diagnosis.failures import Relu, Spoil, failing


class Once(Transformation):
    """Changes the outputs, and raises when it is applied again."""

    preserves_computation = True
    calls = itertools.count()

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        if next(self.calls):
            raise LookupError("only once")
        return Spoil().transform(graph_module)


@pytest.mark.slow
def test_error_during_diagnosis_does_not_hide_the_failure(tmp_path: Path) -> None:
    text = failing(tmp_path / "block", Once())
    assert "graph: hidden is off by " in text
    assert re.search(r"\n  The diagnosis failed: .*:Once: .*LookupError: only once\.\n", text)
    assert (tmp_path / "block-failure" / "parity.json").is_file()


@pytest.mark.slow
def test_failure_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "block-failure").mkdir()
    (tmp_path / "block-failure" / "letter.txt").write_text("mine")
    text = failing(tmp_path / "block", Relu())
    assert "Relu caused the difference." in text
    assert "is not a folder of a failed check, so it is not replaced" in text
    assert [path.name for path in (tmp_path / "block-failure").iterdir()] == ["letter.txt"]


@pytest.mark.slow
def test_failure_folder_is_reproducible_and_removed_on_success(tmp_path: Path) -> None:
    failing(tmp_path / "block", Relu())
    first = {path.name: path.read_bytes() for path in (tmp_path / "block-failure").iterdir()}
    failing(tmp_path / "block", Relu())
    assert {path.name: path.read_bytes() for path in (tmp_path / "block-failure").iterdir()} == first
    document = json.loads(first["parity.json"])
    assert [target["target"] for target in document["targets"]] == ["original", "graph"]
    export(exports.block(), exports.batch(), tmp_path / "block", dynamic=exports.DYNAMIC, formats=["pt2"])
    assert [path.name for path in tmp_path.iterdir()] == ["block"]


def test_every_file_of_a_failure_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    table = text.partition("The folder `OUTPUT-failure/`")[2].partition("`optexport diagnose")[0]
    models = {"model.onnx", "model.onnx.data", "model.pt2", "model.torchscript.pt", "model.pt", "before.pt", "after.pt"}
    assert [name for name in sorted(reproduction._NAMES - models) if f"`{name}`" not in table] == []
