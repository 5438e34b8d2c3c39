"""Warns about gates that count too few values to let one of them differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport import export
from optexport.report.parity_text import list_coarse_gates
from tests._helpers.models import randomise


@pytest.mark.parametrize(
    ("rows", "minimum", "needed"),
    [(4, 0.99, 100), (4, 0.75, None), (4, 0.8, 5), (4, 1.0, None), (4, 0.0, None), (101, 0.99, None)],
)
def test_gate_on_too_few_rows_is_named(rows: int, minimum: float, needed: int | None, tmp_path: Path) -> None:
    batch = {"input": torch.randn(rows, 8)}
    options = {"formats": "pt2", "effort": "quick", "transformations": [], "metrics": {"argmax_agreement": minimum}}
    result = export(randomise(nn.Linear(8, 3)), batch, tmp_path / "bundle", dynamic={"input": {0: "batch"}}, **options)
    text = f"argmax_agreement of output of at least {minimum:g} counts {rows} positions (needs {needed})"
    assert list_coarse_gates(result.manifest.parity) == ([] if needed is None else [text])
    summary = result.summary()
    assert f" {rows} positions " in summary
    assert (
        f"few values: {text}, so it requires that all agree. Set inputs.data to a file with more rows." in summary
    ) is bool(needed)
    page = (result.output / "report.html").read_text(encoding="utf-8")
    assert (f"{text}, so it requires that all agree." in page) is bool(needed)
