"""User data that were not checked are counted, and all rows are checked by default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from optexport.parity import own_precision_run
from optexport.parity.cases.case import Case
from optexport.parity.cases.data_batches import describe_unchecked_data
from optexport.pipeline import run as pipeline_run
from optexport.report.result import Result
from optexport.signature.resizing import split_batch
from optexport.signature.signature import Dim

MODULE = """
from torch import nn

def load():
    return nn.Linear(4, 2).eval()
"""

CONFIG = """
[model]
source = "python:rows:load"
[inputs]
data = "rows.npz"
[inputs.dynamic]
batch = [1, 64]
[parity]
effort = "{effort}"
[export]
formats = ["pt2"]
output = "bundle"
[tracking]
enabled = false
"""


def test_unchecked_data_is_counted_in_rows_or_batches() -> None:
    cut = split_batch({"x": torch.zeros(100, 3)}, ["x"], Dim("batch"))
    checked = [Case(f"data {i}", batch, data=True) for i, batch in enumerate(cut)]
    assert len(cut) == 4
    assert describe_unchecked_data(cut, 100, checked) == ()
    assert describe_unchecked_data(cut, 100, [Case("traced", cut[0]), *checked[:2]]) == (
        "data: 50 of 100 rows are checked",
    )
    assert describe_unchecked_data(cut, 0, checked[:1]) == ("data: 1 of 4 batches are checked",)


def run(folder: Path, effort: str, rows: int = 100) -> Result:
    (folder / "rows.py").write_text(MODULE, encoding="utf-8")
    np.savez(folder / "rows.npz", input=np.random.default_rng(0).normal(size=(rows, 4)).astype("float32"))
    (folder / "mine.toml").write_text(CONFIG.format(effort=effort), encoding="utf-8")
    return pipeline_run.run(folder / "mine.toml")


@pytest.mark.slow
def test_all_rows_are_checked_except_with_quick_effort(tmp_path: Path) -> None:
    standard = run(tmp_path, "standard").manifest.parity
    assert standard.cases[0] == "traced"  # the first batch of the data
    assert [case for case in standard.cases if case.startswith("data")] == ["data 1", "data 2", "data 3"]
    assert standard.left_out == []
    quick = run(tmp_path, "quick").manifest.parity
    assert [case for case in quick.cases if case.startswith("data")] == []
    assert quick.left_out == ["data: 25 of 100 rows are checked"]


@pytest.mark.slow
def test_rows_with_results_too_large_for_disk_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_precision_run, "_DATA_BYTES", 300)
    parity = run(tmp_path, "standard").manifest.parity
    assert [case for case in parity.cases if case.startswith("data")] == ["data 1"]
    assert parity.left_out == ["data: 50 of 100 rows are checked"]
