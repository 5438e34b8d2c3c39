"""Tables of benchmarks fit into a terminal, no cell is broken, and the short form counts their verdicts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from optexport.bench.artifact import Artifact
from optexport.bench.report import Figures, PairwiseComparison, Report, show
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Comparison


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


@pytest.mark.parametrize("width", [80, 120, 150])
def test_speedups_over_one_baseline_are_in_the_same_table(width: int, tmp_path: Path) -> None:
    workload = Workload({"batch": 32, "sequence": 512}, 32, tmp_path / "inputs")
    artifacts = [
        Artifact(f"build/a-model: {name}", tmp_path, name, 95_000_000, proven=True)
        for name in ("torchscript", "onnx", "pt2")
    ]
    figures = tuple(Figures(a, workload, 0.123456, 0.2, 0.3, None, None, 123.4, 1.25, 10**9) for a in artifacts)
    comparison = Comparison(1.234, 1.01, 1.56, "faster", rounds=12)
    pairs = tuple(PairwiseComparison(a, artifacts[0], workload, comparison) for a in artifacts[1:])
    console = Console(width=width, file=io.StringIO(), record=True)
    show(Report(Settings(), figures, pairs), console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    rows = [line for line in lines if line.lstrip().startswith(("torchscript", "onnx", "pt2"))]
    assert lines[0] == "build/a-model"
    assert [row.split()[-1] for row in rows] == ["baseline", "faster", "faster"]
    assert [" 1.23 (1.01 to 1.56) " in row for row in rows] == [False, True, True]
    assert ("p90 ms" in "".join(lines[:4])) == (width >= 145)
    assert "Measured with 1 thread each, in 12 rounds; speedups are over torchscript." in lines
    assert "baseline" not in "".join(line for line in lines if line not in rows)
    assert all(len(line) <= width for line in lines)


def test_short_form_counts_the_verdicts_of_the_table(tmp_path: Path) -> None:
    artifacts = [Artifact(name, tmp_path, name, 1) for name in "abcde"]
    workload = Workload({}, 1, tmp_path / "inputs")
    figures = tuple(Figures(a, workload, 0.1, 0.2, 0.3, None, None, 1.0, 1.0, 1) for a in artifacts)
    ends = ((0.99, 1.02, "inconclusive"), (0.7, 1.4, "inconclusive"), (0.5, 0.8, "slower"), (0.5, 0.9, "slower"))
    comparisons = [Comparison(1.0, low, high, verdict) for low, high, verdict in ends]
    pairs = tuple(
        PairwiseComparison(a, artifacts[0], workload, comparison)
        for a, comparison in zip(artifacts[1:], comparisons, strict=True)
    )
    report = Report(Settings(), figures, pairs)
    assert "equal within 2 %" in report.summary()
    assert repr(report) == "Report(a, b, c, d, e; 1 equal, 1 inconclusive, 2 slower)"
