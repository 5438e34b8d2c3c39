"""Writes the JUnit XML file of ``--junit``, which CI systems show as test results."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from optexport._utils.paths import NO_ROOM, check_overwritable
from optexport.bundle.gate_limits import GateLimit
from optexport.bundle.layout import check_outside
from optexport.bundle.parity_records import ParityRecord
from optexport.errors import ConfigError, GateError, OptexportError
from optexport.report.parity_text import explain, list_gate_results, list_outputs, metric_title

_SUITE = "optexport"
_JUNIT_START = re.compile(rb"(<\?xml.*?)?<testsuite", re.DOTALL)


def render(parity: ParityRecord, error: OptexportError | None = None, limits: Iterable[GateLimit] = ()) -> str:
    """Returns JUnit XML with a test case for every target, output and case, and for every gate.

    Args:
        error: The error that ended the run. If all cases passed, it has a case of its own, such as a gate on the size.
        limits: The limits of ``[gate]`` that the run met.
    """
    tests = []
    for target, output in list_outputs(parity):
        for case in output.cases:
            test = ElementTree.Element(
                "testcase", classname=f"{_SUITE}.{target.title}", name=f"{output.output} at {case.case}"
            )
            if case.failure is not None:
                failure = ElementTree.SubElement(test, "failure", message=case.failure, type="ParityError")
                failure.text = explain(parity, output)
            tests.append(test)
    for target, gate_result in list_gate_results(parity):
        test = ElementTree.Element("testcase", classname=f"{_SUITE}.{target.title}", name=metric_title(gate_result))
        if gate_result.failure is not None:
            ElementTree.SubElement(test, "failure", message=gate_result.failure, type="GateError")
        tests.append(test)
    for limit in limits:
        test = ElementTree.Element("testcase", classname=f"{_SUITE}.{limit.format}", name=f"gate {limit.gate}")
        ElementTree.SubElement(test, "system-out").text = limit.text
        tests.append(test)
    if error is not None and not any(test.find("failure") is not None for test in tests):
        tests.append(_error_case(error))
    return _render_suite(tests)


def render_error(error: OptexportError) -> str:
    """Returns JUnit XML of a run that failed before anything was compared."""
    return _render_suite([_error_case(error)])


def _error_case(error: OptexportError) -> ElementTree.Element:
    test = ElementTree.Element("testcase", classname=_SUITE, name="run")
    tag = "failure" if isinstance(error, GateError) else "error"
    element = ElementTree.SubElement(test, tag, message=error.message, type=type(error).__name__)
    element.text = str(error)
    return test


def _render_suite(tests: list[ElementTree.Element]) -> str:
    def count(tag: str) -> str:
        return str(sum(test.find(tag) is not None for test in tests))

    counts: dict[str, str] = {"tests": str(len(tests)), "failures": count("failure"), "errors": count("error")}
    for test in tests:
        for element in test.iter():
            element.attrib = {key: _replace_invalid(value) for key, value in element.attrib.items()}
            element.text = None if element.text is None else _replace_invalid(element.text)
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts}).extend(tests)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _replace_invalid(text: str) -> str:
    """Replaces characters that XML 1.0 does not allow."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "?", text)


def start(path: Path | None, protected: Iterable[Path]) -> None:
    """Writes a JUnit file that says the run did not finish, in case it is killed.

    Args:
        path: The JUnit file; None writes nothing.
        protected: Files and folders that the JUnit file must not overwrite: config, output, bundle.

    Raises:
        ConfigError: The file cannot be written, or would replace something else.
    """
    if path is None:
        return
    check_outside("junit", path, protected)
    check_overwritable("junit", path, _JUNIT_START, "JUnit file")
    if path.is_fifo() or path.is_char_device():  # its reader would take this text for the result
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_error(OptexportError("the run did not finish")), encoding="utf-8")
    except OSError as error:
        raise _as_write_error(path, error) from error


def write(
    path: Path | None, parity: ParityRecord | None, error: OptexportError | None, limits: Iterable[GateLimit] = ()
) -> None:
    """Writes the JUnit file of a finished run.

    Args:
        path: The JUnit file; None writes nothing.
        parity: The parity record; by default the record of the error.
        error: The error that ended the run. If the file cannot be written, that problem is only printed, so that this
            error still decides the exit code.
        limits: The limits of ``[gate]`` that the run met.

    Raises:
        ConfigError: The run succeeded, but the file cannot be written.
        OSError: The disk is full.
    """
    if parity is None and error is not None:
        parity = error.parity
    if path is None or (parity is None and error is None):
        return
    text = render(parity, error, limits) if parity is not None else render_error(error) if error is not None else ""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        hint = f"The bundle is complete. Write the file again: optexport verify BUNDLE --junit {path}"
        write_error = _as_write_error(path, problem, hint)
        if error is None:
            raise write_error from problem
        print(f"Cannot write the JUnit file: {problem}", file=sys.stderr)


def _as_write_error(path: Path, error: OSError, hint: str | None = None) -> ConfigError | OSError:
    """Returns the error to raise: ConfigError, but a full disk stays an OSError."""
    if error.errno in NO_ROOM:
        error.filename = str(path)
        return error
    return ConfigError(f"cannot write the file: {error}", location=f"`junit={path}`", hint=hint)
