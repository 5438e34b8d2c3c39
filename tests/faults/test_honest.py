"""Tests that correct runs cause no false alarms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.honest import run_honestly

TARGETS = ["original", "graph", "torchscript", "onnx", "onnx-optimized", "pt2"]


def _raises_no_alarm(seed: int, output: Path) -> None:
    result = run_honestly(seed, output)
    assert [target.target for target in result.parity] == TARGETS
    assert result.passed
    assert sum(len(changed) for changed in result.transformed_nodes.values()) > 0, "no rule had anything to do"


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("seed", range(4))
def test_correct_run_causes_no_false_alarm(seed: int, tmp_path: Path) -> None:
    _raises_no_alarm(seed, tmp_path / "bundle")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_two_hundred_correct_runs_cause_no_false_alarm(seed: int, tmp_path: Path) -> None:
    _raises_no_alarm(seed, tmp_path / "bundle")
