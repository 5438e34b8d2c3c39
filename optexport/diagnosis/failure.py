"""The error of a failed parity check, and the texts that describe it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from optexport.bundle.layout import SCRIPT
from optexport.bundle.parity_records import atol_above_rounding
from optexport.diagnosis.reproduction import Finding, write_folder
from optexport.errors import GateError, OptexportError, ParityError, first_line, on_one_line
from optexport.parity.checker import CaseParity, OutputParity, ParityChecker, TargetParity
from optexport.parity.record import parity_record


def diagnose_failure(
    checker: ParityChecker,
    folder: Path,
    config_text: str | None,
    find: Callable[[], Finding],
    find_smallest: Callable[[], str | None],
) -> OptexportError:
    """Diagnoses a failed parity check, writes its folder, and returns the error.

    Problems during the diagnosis become part of the message and never hide the failed check.

    Args:
        checker: Checker with at least one failed target.
        folder: Folder to write.
        config_text: Content of the config; None to write no config.
        find: Runs the diagnosis.
        find_smallest: Describes the smallest input that still fails, or returns None.
    """
    finding: Finding | None = None
    try:
        finding = find()
        explanation = finding.explanation
    except Exception as problem:  # model and plugin code may raise anything
        explanation = f"The diagnosis failed: {_describe(problem)}."
    try:
        smallest = find_smallest()
    except Exception as problem:  # model and plugin code may raise anything
        explanation += f"\nThe search for a smaller input failed: {_describe(problem)}."
    else:
        explanation += f"\nSmallest input that fails: {smallest}." if smallest else ""
    try:
        has_script = write_folder(folder, checker, finding, config_text, explanation)
    except Exception as problem:  # for example a full disk, or an unrelated folder at that path
        explanation += f"\nThe folder for the tensors could not be written: {_describe(problem)}."
        written = None
    else:
        written = folder
        script = f"Reproduce: python {folder / SCRIPT}"
        explanation += f"\n{script if has_script else f'No script reproduces the failure. Its tensors: {folder}'}"
    lines = describe_failures(checker.targets)
    kind = GateError if all(target.outputs_passed for target in checker.targets) else ParityError
    hint = None if finding is None else finding.hint
    if (too_small := _find_small_tolerance(checker)) is not None:
        explanation, hint = f"{too_small[0]}\n{explanation}", too_small[1]
    error = kind("\n".join(lines), details=explanation, hint=hint, parity=parity_record(checker))
    error.folder = written
    return error


def _find_small_tolerance(checker: ParityChecker) -> tuple[str, str] | None:
    """Returns an explanation and a hint if a failed output has a fixed tolerance below its noise floor, or None."""
    failed = {output.output for target in checker.targets for output in target.outputs if not output.passed}
    for name in sorted(failed):
        tolerance = checker.tolerances[name]
        if tolerance.fixed and tolerance.limit < tolerance.floor:
            text = (
                f"The tolerance of {on_one_line(name)} is below its noise floor of {tolerance.floor:.1e}, by which the "
                "original itself differs from float64. Rounding alone can exceed it."
            )
            return text, (
                f"Set parity.atol to at least {atol_above_rounding(tolerance.floor):.2g}, or remove parity.atol and "
                "parity.rtol; the tolerance is then measured."
            )
    return None


def describe_failures(targets: Sequence[TargetParity]) -> list[str]:
    """Returns a line for each failed output of each target, then for each failed gate."""
    outputs = [
        f"{target.target}: {on_one_line(output.output)}{_describe_failure(case)}"
        for target in targets
        for output in target.outputs
        if (case := _find_failing_case(output)) is not None
    ]
    gates = [
        f"{target.target}: {d.failure}" for target in targets for d in target.gate_results if d.failure is not None
    ]
    return outputs + gates


def _describe_failure(case: CaseParity) -> str:
    if case.limit < case.distance < math.inf and case.limit > 0:
        return f" is off by {case.distance:.1e}, tolerance {case.limit:.1e} (case: {case.case})"
    return f": {case.failure} (case: {case.case})"


def _find_failing_case(output: OutputParity) -> CaseParity | None:
    return next((case for case in output.cases if case.failure is not None), None)


def find_unnamed_case(target: TargetParity, case: str) -> str | None:
    """Returns the name of a case, or None if the line of a failure names it already."""
    failing = map(_find_failing_case, target.outputs)
    return None if any(named is not None and named.case == case for named in failing) else case


def find_unmeasured_output(target: TargetParity, case: str) -> str | None:
    """Returns the reason why an output has no distance on a case, or None."""
    results = ((output.output, result) for output in target.outputs for result in output.cases if result.case == case)
    return next((f"{name}: {result.failure}" for name, result in results if result.distance == math.inf), None)


def _describe(problem: Exception) -> str:
    if not isinstance(problem, OptexportError):
        return f"{type(problem).__name__}: {first_line(problem)}".rstrip(".")
    return f"{problem.location}: {problem.message}" if problem.location else problem.message


def describe_margin(targets: Sequence[TargetParity]) -> str:
    """Describes how close passing targets are to their tolerance."""
    worst = max((o for target in targets for o in target.outputs), key=lambda o: o.max_abs / (o.limit or 1.0))
    names = ", ".join(target.title for target in targets)
    if worst.limit == math.inf:
        return f"all targets pass their gates ({names})"
    return (
        f"all targets pass ({names}); worst output: {worst.output}, off by {worst.max_abs:.1e}, "
        f"tolerance {worst.limit:.1e}"
    )
