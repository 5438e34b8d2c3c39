"""Runs the notebook of the examples, and compares what it shows."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.pages import ROOT
from tests.docs.test_public import _private_uses

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def _cells() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = _cells()
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "\n".join(str(output) for cell in notebook.cells for output in cell.get("outputs", []))
    assert "True {'merge-linears': ['scale_shift_merged']}" in shown
    assert "They compute the same, to rounding" in shown
    assert "image/png" in shown
    assert "build/merged/report.html" in shown
    assert (tmp_path / "build" / "merged" / "report.html").is_file()
    displayed = [[o for o in cell.outputs if o.output_type != "stream"] for cell in notebook.cells if "outputs" in cell]
    assert {len(outputs) for outputs in displayed} <= {0, 1}  # each result once
    assert sum("PASSED" in str(outputs) for outputs in displayed) == 1


def test_notebook_uses_public_names_and_stores_no_outputs() -> None:
    code = [cell for cell in _cells().cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code if cell.outputs] == []
    assert [use for cell in code for use in _private_uses(cell.source)] == []
