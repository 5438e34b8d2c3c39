"""Reports to GitHub Actions: error annotations, and a Markdown summary of the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from optexport._utils.markup import escape_markdown, table_row
from optexport.bundle.markdown import GATE_TABLE, file_lines, limit_rows
from optexport.bundle.parity_records import OutputRecord, ParityRecord, TargetRecord
from optexport.config.metrics import round_for_gate
from optexport.errors import OptexportError, printable
from optexport.report.parity_text import (
    atol_text,
    case_names,
    explain,
    find_failure,
    list_gate_results,
    list_outputs,
    metric_title,
    number_text,
)

if TYPE_CHECKING:
    from optexport.result import RunData

_PROGRAM = "optexport"
_TARGET_TABLE = """
| target | output | error | noise floor | tolerance | change in this step | would pass with | |
|---|---|---:|---:|---:|---:|---|---|"""
_METRIC_TABLE = """
| target | metric | value | 95 % interval | count | minimum | |
|---|---|---:|---|---:|---:|---|"""


def markdown(
    parity: ParityRecord, title: str, error: OptexportError | None = None, result: RunData | None = None
) -> str:
    """Returns the job summary as Markdown: verdict, tables, and explained failures.

    Args:
        error: The error that ended the program, such as a gate on the size although the parity checks passed.
        result: The result of the run, if it has a bundle.
    """
    failures = [(target, output) for target, output in list_outputs(parity) if find_failure(output) is not None]
    failed = bool(failures) or any(gate_result.failure is not None for _, gate_result in list_gate_results(parity))
    verdict = f"parity {'failed' if failed else 'passed'}"
    if error is not None and not failed:
        verdict = f"failed with exit code {error.exit_code}, {verdict}"
    cases = f"{len(parity.cases)} cases: {escape_markdown(case_names(parity.cases))}"
    lines = [
        f"### {escape_markdown(title)}: {verdict}",
        "",
        *([] if error is None or failed else [*_describe_error(error), ""]),
        f"Compared with {escape_markdown(parity.compared_with)} on {cases}.",
        _TARGET_TABLE,
        *(_target_row(parity, target, output) for target, output in list_outputs(parity)),
        *_metric_lines(parity),
        *([] if result is None else _bundle_lines(result)),
    ]
    for target, output in failures:
        text = escape_markdown(f"{find_failure(output)}. {explain(parity, output)}")
        lines += ["", f"- **{target.target}, {escape_markdown(output.output)}**: {text}"]
    return "\n".join(lines) + "\n"


def _describe_error(error: OptexportError) -> Iterator[str]:
    """Yields an error with its location as code, its details as a list, and its hint as a paragraph."""
    first, *others = str(error).split("\n")
    start = f"{error.location}: "
    if error.location and "`" not in error.location and first.startswith(start):
        yield f"`{error.location}`: {escape_markdown(first.removeprefix(start))}"
    else:
        yield escape_markdown(first)
    yield ""
    for line in others:
        if line.startswith("Hint: "):
            yield ""
            yield escape_markdown(line)
        else:
            yield f"- {escape_markdown(line.strip())}"


def _bundle_lines(result: RunData) -> Iterator[str]:
    """Yields the files, the limits of ``[gate]``, and the page on an MLflow server."""
    from optexport.report.gate_limits import list_gate_limits  # imports torch

    yield from file_lines(result.manifest, result.gain, result.gain_skipped)
    if limits := list_gate_limits(result):
        yield GATE_TABLE
        yield from limit_rows(limits)
    if result.run_page is not None and result.run_page.startswith("http"):  # otherwise a command comes first
        yield f"\nMLflow: <{result.run_page}>"


def _target_row(parity: ParityRecord, target: TargetRecord, output: OutputRecord) -> str:
    bound = parity.bounds[output.output]
    tolerance = number_text(bound.limit)
    if target.precision is not None and all(case.limit is None for case in output.cases):
        has_gate = any(gate_result.output in (None, output.output) for gate_result in target.gate_results)
        tolerance = "gates" if has_gate else "none"
    return table_row(
        target.title,
        escape_markdown(output.output),
        number_text(output.max_abs),
        number_text(bound.floor),
        tolerance,
        number_text(output.step),
        atol_text(parity, output),
        "passed" if find_failure(output) is None else "**failed**",
    )


def _metric_lines(parity: ParityRecord) -> list[str]:
    rows = []
    for target, gate_result in list_gate_results(parity):
        interval = "-" if gate_result.low is None else f"{gate_result.low:.6g} to {gate_result.high:.6g}"
        value = "-" if gate_result.value is None else round_for_gate(gate_result.value, gate_result.min)
        title = escape_markdown(metric_title(gate_result))
        verdict = "passed" if gate_result.failure is None else "**failed**"
        rows.append(
            table_row(target.title, title, value, interval, str(gate_result.count), f"{gate_result.min:.15g}", verdict)
        )
    return [_METRIC_TABLE, *rows] if rows else []


def error_lines(parity: ParityRecord) -> list[str]:
    """Returns an error annotation for every failed output and metric."""
    outputs = [
        _annotation(
            f"{_PROGRAM}: {target.target}, {output.output}", f"{find_failure(output)}. {explain(parity, output)}"
        )
        for target, output in list_outputs(parity)
        if find_failure(output) is not None
    ]
    metrics = [
        _annotation(f"{_PROGRAM}: {target.target}, {metric_title(gate_result)}", gate_result.failure)
        for target, gate_result in list_gate_results(parity)
        if gate_result.failure is not None
    ]
    return outputs + metrics


def _annotation(title: str, message: str) -> str:
    """Returns a workflow command that shows an error.

    Escapes as https://docs.github.com/actions/reference/workflow-commands-for-github-actions asks.
    """

    def escape(text: str) -> str:
        return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    return f"::error title={escape(title).replace(':', '%3A').replace(',', '%2C')}::{escape(message)}"


def publish(
    title: str, parity: ParityRecord | None, error: OptexportError | None, result: RunData | None = None
) -> None:
    """Prints error annotations and appends the job summary, in GitHub Actions only.

    Args:
        title: Name of the config or bundle.
        parity: The parity record; by default the record of the error.
        error: The error that ended the program.
        result: The result of the run, if it has a bundle.
    """
    if parity is None and error is not None:
        parity = error.parity
    if os.environ.get("GITHUB_ACTIONS") == "true":
        lines = [] if parity is None else error_lines(parity)
        if error is not None and not lines:
            lines = [_annotation(f"{_PROGRAM}: {type(error).__name__}", str(error))]
        for line in lines:
            print(line, file=sys.stderr)
    if parity is not None and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(markdown(parity, title, error, result))
        except OSError as problem:  # a container may not mount the file, and the run itself succeeded
            print(f"Cannot write the job summary: {problem}", file=sys.stderr)
