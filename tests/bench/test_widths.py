"""Tables of benchmarks fit into a terminal: no word and no number is broken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from optexport.bench.artifact import Artifact
from optexport.bench.report import Figures, Report, show
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_cell_is_broken(width: int, tmp_path: Path) -> None:
    workload = Workload({"batch": 32, "sequence": 512}, 32, tmp_path / "inputs")
    figures = tuple(
        Figures(
            Artifact(name, tmp_path, name, 95_000_000), workload, 0.123456, 0.2, 0.3, None, None, 123.4, 1.25, 10**9
        )
        for name in ("onnx", "torchscript")
    )
    console = Console(width=width, file=io.StringIO(), record=True)
    show(Report(Settings(), figures, ()), console)
    text = console.export_text()
    for part in ("artifact", "shape", "torchscript", "batch=32", "sequence=512", "p50 ms", "p99 ms", "123", "file"):
        assert part in text, part
    assert ("p90 ms" in text.splitlines()[1]) == (width >= 100)
    assert all(len(line) <= width for line in text.splitlines())
