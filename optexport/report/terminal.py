"""Prints the result of a run on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport._utils.markup import size_in_words, times_as_fast
from optexport.bench import report
from optexport.bundle.layout import REPORT
from optexport.bundle.manifest import (
    ChangeRecord,
    GateValueRecord,
    Manifest,
    PrecisionRecord,
)
from optexport.bundle.parity_records import ORIGINAL, TargetRecord
from optexport.bundle.verdict import passed_text, share_text
from optexport.config.metrics import counted_unit, round_for_gate
from optexport.errors import on_one_line
from optexport.parity.checker import TargetParity
from optexport.report import tuning
from optexport.report.change_text import changed_text, is_function
from optexport.report.gate_limits import list_gate_limits
from optexport.report.parity_text import (
    case_names,
    find_worst_case,
    list_coarse_gates,
    tolerance_text,
)
from optexport.result import RunData
from optexport.transformations.registry import RULES

_SHOWN_NEAR_MISSES = 3
# A terminal with fewer columns shows neither the means nor the ties of gates.
_WIDE = 100


def show(result: RunData, console: Console, *, verbose: bool = False) -> None:
    """Prints the summary of a finished run, with the verdict and locations at the end.

    Args:
        verbose: Whether to list rules that found nothing, format passes, and the cases.
    """
    manifest = result.manifest
    _show_signature(manifest, console)
    _show_transformations(manifest, console, verbose=verbose)
    if result.cache_hits:
        _print(console, f"From cache: {', '.join(result.cache_hits)} (set OPTEXPORT_CACHE= to disable)")
    if result.tuned:
        console.print("\n[bold]Tuning[/]", highlight=False)
        tuning.show(result.tuned, console)
    if result.bench is not None:
        console.print("\n[bold]Benchmark[/]", highlight=False)
        report.show(result.bench, console)
    _show_precision(manifest, console)
    _show_parity(manifest, result.parity, console, verbose=verbose)
    _show_verdict(result, console)
    _show_locations(result, console)


def _print(console: Console, text: str) -> None:
    """Prints a line. On a terminal, it breaks between words, and its further lines are indented.

    Elsewhere, for instance in a log, it does not break.
    """
    if console.is_terminal and len(text) > console.width:
        indent = " " * (len(text) - len(text.lstrip()))
        lines = textwrap.wrap(
            text, console.width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(lines)
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _show_signature(manifest: Manifest, console: Console) -> None:
    for title, tensors in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs)):
        text = "; ".join(tensor.describe() for tensor in tensors)
        console.print(f"[bold]{title}[/] {escape(on_one_line(text))}", soft_wrap=True, highlight=False)
    axes = "; ".join(f"{name} {dim.describe()}" for name, dim in manifest.dims.items())
    console.print(f"[bold]Dynamic axes[/] {escape(axes) or 'none'}", soft_wrap=True, highlight=False)
    for name, size in _unranged_axes(manifest).items():
        _print(console, f"  {name} is fixed at {size}: it has no range in inputs.dynamic")
    for name, values in manifest.values.items():
        _print(
            console, f"  values of {name} {'add up to' if values.adds_up else 'index'} {' and '.join(values.indexes)}"
        )
    if manifest.constants:
        constants = "; ".join(f"{name} = {on_one_line(str(value))}" for name, value in manifest.constants.items())
        console.print(f"[bold]Constants[/] {escape(constants)}", soft_wrap=True, highlight=False)
    for axis in manifest.fixed_axes:
        _print(console, f"  fixed by the model: {axis}")
    if manifest.is_strict_trace:
        _print(console, "Traced with torch.export(strict=True); the default trace failed or fixed more axes")
    for line in manifest.skipped_checks:
        _print(console, f"Check left out of the files, which do not raise: {line}")
    for line in manifest.branches:
        _print(console, f"Branch on values, both ways in the files: {line}")


def _unranged_axes(manifest: Manifest) -> dict[str, int]:
    """Returns the axes that the config names but does not make dynamic, with their sizes."""
    shapes = {
        name: table.get("shape", []) for name, table in (manifest.config.get("inputs", {}).get("tensors") or {}).items()
    }
    return {
        axis: size
        for tensor in manifest.inputs
        for axis, size in zip(shapes.get(tensor.name, []), tensor.shape, strict=False)
        if isinstance(axis, str) and isinstance(size, int)
    }


def _show_transformations(manifest: Manifest, console: Console, *, verbose: bool) -> None:
    graph = f" (graph of {manifest.nodes_before} nodes -> {manifest.nodes_after})" if verbose else ""
    console.print(f"\n[bold]Transformations[/]{graph}", highlight=False)
    if not manifest.transformations:
        console.print("  none")
    formats: list[str] = []
    shown = [rule for rule in manifest.transformations if verbose or rule.changes or rule.near_misses]
    for rule in shown:
        if rule.formats != formats:
            formats = rule.formats
            console.print(f"  for {', '.join(formats)}:")
        purpose = f": {RULES[rule.rule].summary}" if rule.rule in RULES else ""
        _print(console, f"  {rule.rule}{purpose}")
        text = "no match"
        if rule.changes:
            text = f"{changed_text(rule.changes)}, first at {_change_location(rule.changes[0])}"
        _print(console, f"    {text}")
        for miss in rule.near_misses[:_SHOWN_NEAR_MISSES]:
            _print(console, f"    skipped at {miss.node}: {miss.reason}")
        if (hidden := len(rule.near_misses) - _SHOWN_NEAR_MISSES) > 0:
            _print(console, f"    {hidden} more near misses in manifest.json")
    if (hidden := len(manifest.transformations) - len(shown)) > 0:
        _print(console, f"  {hidden} {'rule' if hidden == 1 else 'rules'} found nothing")
    for artifact in manifest.artifacts if verbose else ():
        if artifact.passes:
            _print(console, f"  format passes, {artifact.format}: {', '.join(artifact.passes)}")
    if manifest.undone and verbose:
        _print(console, f"  undo verified, bit-exact: {', '.join(manifest.undone)}")


def _change_location(change: ChangeRecord) -> str:
    """Returns the changed module, or the first changed node if a function was changed."""
    return change.target if change.target and not is_function(change.target) else (change.nodes or change.replaced)[0]


def _show_precision(manifest: Manifest, console: Console) -> None:
    for artifact in manifest.artifacts:
        if (record := artifact.precision) is None:
            continue
        text = f"{artifact.format} is {record.precision}, checked by gates: {_gate_values(record.chosen)}"
        console.print(f"\n[bold]Precision[/] {escape(text)}", soft_wrap=True, highlight=False)
        for line in _layer_lines(record):
            _print(console, f"  {line}")
        if any(gate.is_user_data for gate in manifest.parity.gates):
            _print(console, "  gates use your data only; at other sizes only gross errors are detected")
        if manifest.ungated:
            _print(console, f"  no gate and no tolerance: {', '.join(manifest.ungated)}")


def _layer_lines(record: PrecisionRecord) -> Iterator[str]:
    """Yields which layers have the lower precision, and why the others are in float32."""
    lowered = [layer for layer in record.layers if layer.kept is None]
    yield f"{len(lowered)} of {len(record.layers)} layers in {record.precision}"
    if record.float32_text:
        yield record.float32_text
    if len(lowered) < len(record.layers):
        yield f"with all {record.exception_text}in {record.precision}: {_gate_values(record.lowered)}"
    for layer in record.layers:
        if layer.kept is None:
            continue
        reason = "set by the config" if layer.kept == "asked for" else layer.kept
        alone = f"; lowered alone: {_gate_values(layer.alone)}" if layer.alone else ""
        yield f"in float32: {layer.layer} ({reason}{alone})"


def _gate_values(values: Sequence[GateValueRecord]) -> str:
    texts = ["none" if value.value is None else round_for_gate(value.value, value.min) for value in values]
    names = [f"{value.measure}{f' of {value.output}' if value.output else ''}" for value in values]
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _show_parity(manifest: Manifest, targets: Sequence[TargetParity], console: Console, *, verbose: bool) -> None:
    parity = manifest.parity
    console.print(f"\n[bold]Parity[/] on {len(parity.cases)} cases", highlight=False)
    if verbose:
        _print(console, f"  cases: {case_names(parity.cases)}")
        if parity.ways:
            _print(console, f"  noise floor: from the original as it runs by default, and {' and '.join(parity.ways)}")
    for line in _parity_notes(manifest):
        _print(console, f"  {line}")
    compared = [target for target in targets if target.target != ORIGINAL]
    console.print()
    console.print(parity_table(parity.compared))
    if any(target.gate_results for target in compared):
        console.print()
        console.print(gate_table(compared, is_narrow=console.width < _WIDE))


def _parity_notes(manifest: Manifest) -> Iterator[str]:
    """Yields what a reader must know to rely on the check."""
    parity = manifest.parity
    if parity.fallback:
        yield f"reference: the original itself, because float64 failed ({parity.fallback})"
    for name in parity.unguided:
        yield f"{name}: compared with the original itself, because float64 takes another path there"
    for text in manifest.few_digits:
        yield (
            f"large noise floor: the original differs from float64 in {text}; "
            "errors of that size pass. Set parity.atol to detect them."
        )
    for name in manifest.only_zeros:
        yield (
            f"only zeros: {name} is zero in all ordinary cases, so its check shows little. "
            "Set inputs.data to data that gives other values."
        )
    for text in list_coarse_gates(parity):
        yield f"few values: {text}, so it requires that all agree. Set inputs.data to a file with more rows."
    for text in parity.left_out:
        yield f"not checked: {text}"
    for artifact in manifest.artifacts:
        if artifact.fixed_shape is not None:
            yield f"{artifact.format}: fixed shape, because {artifact.fixed_shape}"


def parity_table(targets: Sequence[TargetRecord]) -> Table:
    """Returns a table with the error and tolerance of every target's worst output; the HTML report has all figures."""
    table = Table(box=None)
    table.add_column("target", no_wrap=True)
    table.add_column("worst output", overflow="fold")
    for heading in ("error", "tolerance", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for target in targets:
        worst = [(output, find_worst_case(output)) for output in target.outputs]
        output, case = max(worst, key=lambda pair: pair[1].used_share or 0.0)
        distance = output.max_abs if case.limit is None else case.distance  # without cases of extreme values
        error = "" if distance is None else f"{distance:.1e}"
        cells = [error, tolerance_text(target, output, case), share_text(case.used_share)]
        cells.append("ok" if target.passed else "FAILED")
        name = escape(on_one_line(output.output))
        table.add_row(target.title, name, *cells, style=None if target.passed else "red")
    return table


def gate_table(targets: Sequence[TargetParity], *, is_narrow: bool) -> Table:
    """Returns a table with every metric of every target; a narrow one lacks the means and ties."""
    table = Table(box=None)
    for heading in ("target", "metric"):
        table.add_column(heading, overflow="fold")
    for heading in ("value", "minimum", "count", *([] if is_narrow else ["mean (95 % interval)", "ties"])):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets:
        for gate_result in target.gate_results:
            interval = "" if gate_result.low is None else f" ({gate_result.low:.4g} to {gate_result.high:.4g})"
            value, minimum = round_for_gate(gate_result.value, gate_result.gate.min), f"{gate_result.gate.min:.15g}"
            cells = [value, minimum, f"{gate_result.count} {counted_unit(gate_result.gate.measure)}"]
            if not is_narrow:
                cells += [f"{gate_result.mean:.4g}{interval}", f"{gate_result.ties}"]
            style = None if gate_result.passed else "red"
            table.add_row(target.title, escape(gate_result.gate.name), *cells, style=style)
    return table


def _show_verdict(result: RunData, console: Console) -> None:
    manifest = result.manifest
    verdict = "[bold green]PASSED[/]" if result.passed else "[bold red]FAILED[/]"
    console.print(f"\n{verdict}  {passed_text(manifest)}", highlight=False)
    latencies, gains = _latencies(result), _gains(result)
    for artifact in manifest.artifacts:
        paths = [result.output / path for path in artifact.paths]
        size = size_in_words(sum(path.stat().st_size for path in paths if path.is_file()))
        precision = None if artifact.precision is None else artifact.precision.precision
        name = artifact.format if precision is None else f"{artifact.format} ({precision})"
        details = [latencies.get(name), gains.get(artifact.format)]
        _print(console, f"  {artifact.path:20} {size:>8}  {'; '.join(filter(None, details))}".rstrip())
    for limit in list_gate_limits(result):
        _print(console, f"  {limit.text}")
    for note in _gain_notes(result):
        _print(console, f"  {note}")
    for reason in manifest.application.missing if manifest.application is not None else ():
        _print(console, f"  not included: {reason}")


def _latencies(result: RunData) -> dict[str, str]:
    """Returns each file's median latency at the first measured shape."""
    texts: dict[str, str] = {}
    for figures in result.bench.figures if result.bench is not None else ():
        texts.setdefault(figures.artifact.name, f"{1e3 * figures.p50:.3g} ms at {figures.workload.label}")
    return texts


def _gains(result: RunData) -> dict[str, str]:
    """Returns how fast the file of each format is, compared with PyTorch, unless a benchmark shows it."""
    return {
        record.format: f"{record.ms:.3g} ms, {times_as_fast(record.speedup, record.low, record.high)}"
        for record in result.gain
        if result.bench is None
    }


def _gain_notes(result: RunData) -> Iterator[str]:
    """Yields what the gain is measured with, or why it is missing, and a hint if a file is slower than PyTorch."""
    if result.gain_skipped and result.bench is None:
        yield f"speed not compared with PyTorch: {result.gain_skipped}"
    if result.gain and result.bench is None:
        yield f"one call, compared with PyTorch at {result.gain[0].setting}"
    slower = [str(record.format) for record in result.gain if record.high < 1]
    lowered = [
        artifact.format
        for artifact in result.manifest.artifacts
        if artifact.precision is not None and artifact.format in slower
    ]
    if lowered:
        yield f"Hint: {lowered[0]} is slower than PyTorch; in float32 it may be faster"
    elif slower and result.tuned:
        yield f"Hint: {slower[0]} is slower than PyTorch; lower precision may help"
    elif slower:
        yield f"Hint: {slower[0]} is slower than PyTorch; tuning may find faster rules and passes"


def _show_locations(result: RunData, console: Console) -> None:
    locations = [] if result.seconds is None else [("time", f"{result.seconds:.0f} s")]
    locations.append(("bundle", str(result.output)))
    if (result.output / REPORT).is_file():
        locations.append(("report", str(result.output / REPORT)))
    if result.baseline is not None:
        locations.append(("baseline", str(result.baseline)))
    if result.run_page is not None:
        locations.append(("mlflow", f"run {result.run_id}"))
        locations += [("", line) for line in result.run_page.splitlines()]
    if result.registered is not None:
        locations.append(("registry", result.registered.summary))
        locations += [("", reason) for reason in result.registered.why]
    for title, text in locations:  # not broken into lines, so that they can be copied
        console.print(f"{title:9}{text}", soft_wrap=True, highlight=False, markup=False)
