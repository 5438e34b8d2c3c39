"""What continuous integration reads of a proof: JUnit XML, a Markdown summary, and lines that mark errors.

All are made from the record of the proof that a bundle's manifest holds, or that a `ParityError` carries.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from optexport.bundle.layout import NO_ROOM, check_outside, check_written_over
from optexport.bundle.manifest import DecisionRecord, OutputRecord, ParityRecord, TargetRecord
from optexport.config.metrics import beside_gate
from optexport.errors import ConfigError, OptexportError, on_one_line, printable

_SUITE = "optexport"
_JUNIT = re.compile(rb"(<\?xml.*?)?<testsuite", re.DOTALL)
_SHOWN_DATA = 4
# The share of an output's largest value up to which a tolerance may be meant.
_MEANT = 0.1


def junit(proof: ParityRecord) -> str:
    """JUnit XML with one test case for each output, place and case of the proof."""
    cases = []
    for target, output in _outputs(proof):
        for case in output.cases:
            element = ElementTree.Element(
                "testcase", classname=f"{_SUITE}.{target.title}", name=f"{output.output} at {case.case}"
            )
            if case.failure is not None:
                failure = ElementTree.SubElement(element, "failure", message=case.failure, type="ParityError")
                failure.text = _explained(proof, output)
            cases.append(element)
    for target, decision in _decisions(proof):
        element = ElementTree.Element("testcase", classname=f"{_SUITE}.{target.title}", name=_measured(decision))
        if decision.failure is not None:
            ElementTree.SubElement(element, "failure", message=decision.failure, type="GateError")
        cases.append(element)
    return _suite(cases)


def junit_of_error(error: OptexportError) -> str:
    """JUnit XML of a run that ended before anything could be compared."""
    element = ElementTree.Element("testcase", classname=_SUITE, name="run")
    failure = ElementTree.SubElement(element, "error", message=error.message, type=type(error).__name__)
    failure.text = str(error)
    return _suite([element])


def _suite(cases: list[ElementTree.Element]) -> str:
    def count(tag: str) -> str:
        return str(sum(case.find(tag) is not None for case in cases))

    counts: dict[str, str] = {"tests": str(len(cases)), "failures": count("failure"), "errors": count("error")}
    for case in cases:
        for element in case.iter():
            element.attrib = {key: _printable(value) for key, value in element.attrib.items()}
            element.text = None if element.text is None else _printable(element.text)
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts}).extend(cases)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """A text in the characters that XML 1.0 allows."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "?", text)


def markdown(proof: ParityRecord, title: str) -> str:
    """A summary as Markdown: the verdict, one row for each place and output, and why each fails that does."""
    failures = [(target, output) for target, output in _outputs(proof) if _failure(output) is not None]
    gates = [decision for _, decision in _decisions(proof) if decision.failure is not None]
    where = f"{len(proof.cases)} batches: {_literal(batches(proof.cases))}"
    lines = [
        f"### {_literal(title)}: parity {'failed' if failures or gates else 'passed'}",
        "",
        f"Compared with {_literal(proof.compared_with)} on {where}.",
        "",
        "| place | output | distance | floor | limit | from the place before | would pass | |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for target, output in _outputs(proof):
        bound = proof.bounds[output.output]
        limit = _number(bound.limit)
        if target.precision is not None and all(case.limit is None for case in output.cases):
            limit = "gates" if any(d.output in (None, output.output) for d in target.decisions) else "none"
        cells = [target.title, _literal(output.output), _number(output.max_abs), _number(bound.floor)]
        cells += [limit, _number(output.step), _tolerance(output)]
        cells.append("passed" if _failure(output) is None else "**failed**")
        lines.append(f"| {' | '.join(cells)} |")
    if any(target.decisions for target in proof.targets):
        lines += [
            "",
            "| place | decision | value | 95 % interval | of | at least | |",
            "|---|---|---:|---|---:|---:|---|",
        ]
    for target, decision in _decisions(proof):
        interval = "-" if decision.low is None else f"{decision.low:.6g} to {decision.high:.6g}"
        value = "-" if decision.value is None else beside_gate(decision.value, decision.min)
        cells = [target.title, _literal(_measured(decision)), value, interval]
        cells += [str(decision.count), f"{decision.min:.15g}", "passed" if decision.failure is None else "**failed**"]
        lines.append(f"| {' | '.join(cells)} |")
    for target, output in failures:
        told = _literal(f"{_failure(output)}. {_explained(proof, output)}")
        lines += ["", f"- **{target.target}, {_literal(output.output)}**: {told}"]
    return "\n".join(lines) + "\n"


def batches(cases: Sequence[str]) -> str:
    """The names of the batches that were checked; of many batches of data the first and the last."""
    data = [name for name in cases if name.startswith("data ")]
    if len(data) <= _SHOWN_DATA:
        return "; ".join(cases)
    run = f"{data[0]} to {data[-1].removeprefix('data ')}"
    return "; ".join(run if name == data[0] else name for name in cases if name == data[0] or name not in data)


def _literal(text: str) -> str:
    """A text as it stands in a cell of a table or a line of Markdown, where none of it is markup."""
    return re.sub(r"[\\`*|<>\[\]~&]|\b_|_\b", r"\\\g<0>", on_one_line(text))


def error_lines(proof: ParityRecord) -> list[str]:
    """A line for each output that fails, in the form that GitHub shows as an error of the job."""
    return [
        _annotation(f"{_SUITE}: {target.target}, {output.output}", f"{_failure(output)}. {_explained(proof, output)}")
        for target, output in _outputs(proof)
        if _failure(output) is not None
    ] + [
        _annotation(f"{_SUITE}: {target.target}, {_measured(decision)}", decision.failure)
        for target, decision in _decisions(proof)
        if decision.failure is not None
    ]


def _annotation(title: str, message: str) -> str:
    """One error in the form of GitHub's workflow commands, whose documentation says what is to be escaped."""

    def escape(text: str) -> str:
        return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    return f"::error title={escape(title).replace(':', '%3A').replace(',', '%2C')}::{escape(message)}"


def _outputs(proof: ParityRecord) -> Iterator[tuple[TargetRecord, OutputRecord]]:
    return ((target, output) for target in proof.targets for output in target.outputs)


def _decisions(proof: ParityRecord) -> Iterator[tuple[TargetRecord, DecisionRecord]]:
    return ((target, decision) for target in proof.targets for decision in target.decisions)


def _measured(decision: DecisionRecord) -> str:
    return decision.measure if decision.output is None else f"{decision.measure} of {decision.output}"


def _failure(output: OutputRecord) -> str | None:
    return next((f"at {case.case}: {case.failure}" for case in output.cases if case.failure is not None), None)


def _explained(proof: ParityRecord, output: OutputRecord) -> str:
    if output.tolerance is None:
        return "No tolerance would have passed."
    bound, multiple = proof.bounds[output.output], ""
    if output.multiple is not None:
        of_what = "the original" if bound.fixed else "float64"
        multiple = f" It is {output.multiple:g} times as far from {of_what} as the original is from float64."
    largest = bound.largest
    if largest is not None and output.tolerance > _MEANT * largest:
        return (
            f"A tolerance that it passed would prove nothing: it would be more than {_MEANT:g} of the largest value, "
            f"{_number(largest)}.{multiple}"
        )
    return f"With {_tolerance(output)} against the original it would have passed.{multiple}"


def _tolerance(output: OutputRecord) -> str:
    return "none" if output.tolerance is None else f"atol={output.tolerance:.2g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def start(junit_file: Path | None, kept: Iterable[Path]) -> None:
    """Writes that the work did not end, which stands in the JUnit file until it has.

    Args:
        kept: What the file must not change: the config, and the folders of a run; or a bundle.

    Raises:
        ConfigError: The file cannot be written, or something else would be written over.
    """
    if junit_file is None:
        return
    check_outside("--junit", junit_file, kept)
    check_written_over("--junit", junit_file, _JUNIT, "JUnit file")
    if junit_file.is_fifo() or junit_file.is_char_device():  # a pipe, whose reader would take the first text for all
        return
    try:
        junit_file.parent.mkdir(parents=True, exist_ok=True)
        junit_file.write_text(junit_of_error(OptexportError("it did not end")), encoding="utf-8")
    except OSError as problem:
        raise _unwritable(junit_file, problem) from problem


def _unwritable(junit_file: Path, problem: OSError, hint: str | None = None) -> ConfigError | OSError:
    """What the program fails with; a full disk is no mistake of its call, and does not say itself which file it is."""
    if problem.errno in NO_ROOM:
        problem.filename = str(junit_file)
        return problem
    return ConfigError(f"it cannot be written: {problem}", location=f"--junit {junit_file}", hint=hint)


def publish(title: str, proof: ParityRecord | None, error: OptexportError | None, junit_file: Path | None) -> None:
    """Writes the JUnit file, if one is asked for, and tells GitHub, if the program runs there.

    Args:
        title: What was proven: the config or the bundle.
        proof: What was compared, if it came to that.
        error: What the program fails with, if it does. It stays what the program fails with: that a file cannot be
            written is then said beside it.

    Raises:
        ConfigError: The JUnit file can no longer be written, though the work is done.
        OSError: Its disk is full.
    """
    if proof is None and error is not None:
        proof = error.proof
    text = junit(proof) if proof is not None else None if error is None else junit_of_error(error)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        lines = [] if proof is None else error_lines(proof)
        if error is not None and not lines:
            lines = [_annotation(f"{_SUITE}: {type(error).__name__}", str(error))]
        for line in lines:
            print(line, file=sys.stderr)
    if proof is not None and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(markdown(proof, title))
        except OSError as problem:  # in a container that the file is not mounted in; the work is done all the same
            print(f"The summary of the job cannot be written: {problem}", file=sys.stderr)
    if junit_file is not None and text is not None:
        try:
            junit_file.write_text(text, encoding="utf-8")
        except OSError as problem:
            told = _unwritable(junit_file, problem, "All else is done.")
            if error is None:
                raise told from problem
            print(f"The JUnit file cannot be written: {problem}", file=sys.stderr)
