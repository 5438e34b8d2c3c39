"""Tests that data are repeated for tracing and split into batches, and that unchecked rows are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.errors import ConfigError
from optexport.parity import original_run
from optexport.parity.cases.case import Case
from optexport.parity.cases.data_batches import describe_unchecked_data, make_traceable, split_batch
from optexport.pipeline import run as pipeline_run
from optexport.result import Result
from optexport.signature.signature import Dim
from tests.tiers import examples

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


@settings(max_examples=examples(60))
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 60) | st.none())
def test_every_row_is_in_one_batch_of_a_declared_size(rows: int, low: int, more: int | None) -> None:
    dim = Dim("batch", low, None if more is None else low + more)
    batch = {"x": torch.arange(rows * 3).reshape(rows, 3), "ids": torch.arange(rows), "scale": torch.ones(4)}
    cut = split_batch(batch, ["x", "ids"], dim)
    assert torch.cat([shard["ids"] for shard in cut]).tolist() == list(range(rows))
    assert all(torch.equal(shard["x"][:, 0], 3 * shard["ids"]) for shard in cut)
    assert all(torch.equal(shard["scale"], batch["scale"]) for shard in cut)
    if len(cut) > 1:
        sizes = [shard["ids"].shape[0] for shard in cut]
        assert max(sizes) <= max(32, low)
        assert dim.max == 1 or all(dim.min <= size <= (dim.max or size) for size in sizes)


@settings(max_examples=examples(60))
@given(st.integers(1, 300))
def test_batches_of_an_undeclared_axis_have_one_size(rows: int) -> None:
    cut = split_batch({"ids": torch.arange(rows)}, ["ids"], Dim("batch"), declared=False)
    assert len({shard["ids"].shape for shard in cut}) == 1
    ids = torch.cat([shard["ids"] for shard in cut]).tolist()
    assert ids == list(range(len(ids)))
    assert rows - len(ids) < 32
    if len(ids) < rows:
        checked = [Case(f"data {i}", batch, data=True) for i, batch in enumerate(cut)]
        assert describe_unchecked_data(cut, rows, checked) == (f"data: {len(ids)} of {rows} rows are checked",)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(3, 60), st.sampled_from([1 << 14, 1 << 16, 1 << 18, 1 << 21]))
def test_batch_size_stays_within_the_budget_or_two_rows(rows: int, numbers: int) -> None:
    batch = {"x": torch.zeros(1, numbers, dtype=torch.uint8).expand(rows, -1)}
    cut = split_batch(batch, ["x"], Dim("batch"))
    assert all(shard["x"].numel() <= max(1 << 20, 2 * numbers) for shard in cut)


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
    monkeypatch.setattr(original_run, "_DATA_BYTES", 300)
    parity = run(tmp_path, "standard").manifest.parity
    assert [case for case in parity.cases if case.startswith("data")] == ["data 1"]
    assert parity.left_out == ["data: 50 of 100 rows are checked"]


@given(st.integers(1, 9), st.integers(1, 9), st.tuples(st.integers(1, 6), st.integers(0, 6) | st.none()))
def test_an_example_is_resized_for_tracing_within_its_range(rows: int, columns: int, limits: tuple[int, int]) -> None:
    low, more = limits
    dim = Dim("batch", low, None if more is None else low + more)
    axes: dict[str, dict[int, str | Dim]] = {"x": {0: dim}, "mask": {0: dim, 1: "sequence"}}
    resized = make_traceable({"x": torch.ones(rows, 3), "mask": torch.ones(rows, columns)}, axes)
    assert resized["x"].shape[0] == resized["mask"].shape[0]
    assert dim.min <= resized["x"].shape[0] <= (dim.max or 99)
    assert resized["x"].shape[0] >= 2 or dim.max == 1
    assert resized["x"].shape[1] == 3
    assert resized["mask"].shape[1] == max(columns, 2)
    if dim.min <= rows and 2 <= rows <= (dim.max or rows):
        assert resized["x"].shape[0] == rows  # a valid size is not changed


def test_a_declared_axis_without_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs: x: axis 1 is declared dynamic, but has size 0"):
        make_traceable({"x": torch.ones(2, 0)}, {"x": {0: "batch", 1: "rows"}})
