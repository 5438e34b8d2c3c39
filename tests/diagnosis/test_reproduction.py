"""The folder of a failed check: its files, its text, and when it is written and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optexport import export
from optexport.diagnosis import reproduction
from tests._helpers import exports
from tests.diagnosis.failures import Relu, failing


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
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "parity.md").read_text(encoding="utf-8")
    table = text.partition("The folder `OUTPUT-failure/`")[2].partition("`optexport diagnose")[0]
    models = {"model.onnx", "model.onnx.data", "model.pt2", "model.torchscript.pt", "model.pt", "before.pt", "after.pt"}
    assert [name for name in sorted(reproduction._NAMES - models) if f"`{name}`" not in table] == []
