"""The steps that a run shows: each has its number, and the last number is the total."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests._helpers.cli import Caller, config

_BY_FORMAT = 'transformations = [{ use = "fuse-bias", formats = ["onnx"] }, { use = "merge-linears" }]'
_METRICS = "\n[parity.metrics]\ncosine = 0.5\n"

# Config, options, and a step that shows that the config has its effect.
RUNS: dict[str, tuple[str, list[str], str]] = {
    "plain": (config(), [], "check graph"),
    "baseline": (config(), ["--baseline"], "baseline: export pt2"),
    "two graphs": (config(more=_BY_FORMAT).replace('"pt2"', '"onnx", "pt2"'), [], "transform for onnx"),
    "rule left out": (
        config(more=_BY_FORMAT).replace('"pt2"', '"onnx", "pt2"'),
        ["--without", "fuse-bias"],
        "transform",
    ),
}
SLOW_RUNS: dict[str, tuple[str, list[str], str]] = {
    "tracked": (config().replace("enabled = false", 'uri = "sqlite:///mlflow.db"'), [], "track"),
    "int8": (config().replace('"pt2"', '"onnx"') + f'[precision]\nonnx = "int8"{_METRICS}', [], "check lowered onnx"),
    "tuned with a baseline": (config() + '[tune]\nbudget = "60s"\n', ["--baseline"], "tune pt2"),
}
NIGHTLY_RUNS: dict[str, tuple[str, list[str], str]] = {
    "measured": (config() + "[bench]\nenabled = true\nrounds = 1\n", [], "measure"),
    "half": (
        config().replace('"pt2"', '"pt2", "torchscript"') + f'[precision]\npt2 = "bfloat16"{_METRICS}',
        [],
        "check lowered graph for pt2",
    ),
    "tuned": (config().replace('"pt2"', '"onnx", "pt2"') + '[tune]\nbudget = "60s"\n', [], "tune onnx"),
}

_LINE = re.compile(r" *(\d+)(?:/(\d+))? (\S.*?) +(\d+\.\d) s")


def read_steps(stderr: str) -> list[tuple[int, int | None, str]]:
    """Returns number, total and name of each step."""
    lines = [match for line in stderr.splitlines() if (match := _LINE.fullmatch(line))]
    return [(int(line[1]), int(line[2]) if line[2] else None, line[3]) for line in lines]


def check_numbers(steps: list[tuple[int, int | None, str]]) -> None:
    """Checks that the numbers rise by one up to the total, which appears once it is known and does not change."""
    assert [number for number, _, _ in steps] == [*range(1, len(steps) + 1)]
    totals = [total for _, total, _ in steps]
    first = next(index for index, total in enumerate(totals) if total is not None)
    assert totals[first:] == [len(steps)] * (len(steps) - first)


@pytest.mark.parametrize(
    "name",
    [
        *RUNS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY_RUNS),
    ],
)
def test_last_number_is_the_total(name: str, tmp_path: Path) -> None:
    text, options, step = {**RUNS, **SLOW_RUNS, **NIGHTLY_RUNS}[name]
    done = Caller(tmp_path)("run", text, *options)
    assert done.exit_code == 0, done.stderr
    steps = read_steps(done.stderr)
    check_numbers(steps)
    assert step in [name for _, _, name in steps]
    assert (steps[0][1] is None) is ("tune" in name)  # the search decides how many graphs there are
    assert ("track" in [name for _, _, name in steps]) is (name == "tracked")


def test_failed_step_is_not_shown_as_finished(tmp_path: Path) -> None:
    done = Caller(tmp_path)("run", config("halves:fails"))
    assert done.exit_code == 3
    assert [(number, name) for number, _, name in read_steps(done.stderr)] == [(1, "import libraries")]


def test_steps_can_be_hidden(tmp_path: Path) -> None:
    done = Caller(tmp_path)("run", config(), "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout
