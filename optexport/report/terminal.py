"""What a run says at its end, for people and for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport.bench import report
from optexport.bundle.manifest import ChangeRecord, GateValueRecord, Manifest, TensorRecord
from optexport.config.metrics import beside_gate
from optexport.errors import on_one_line
from optexport.parity.checker import TargetParity
from optexport.report import ci
from optexport.result import Result
from optexport.tuning import outcome

_SHOWN_NEAR_MISSES = 3
_WIDE = 120


def show(result: Result, console: Console) -> None:
    """Prints the summary of a run that ended well."""
    manifest = result.manifest
    for title, tensors in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs)):
        shown = "; ".join(_signature(tensor) for tensor in tensors)
        console.print(f"[bold]{title}[/] {escape(on_one_line(shown))}", soft_wrap=True, highlight=False)
    sizes = [f"{name} {dim.min} to {dim.max or 'any'}" for name, dim in manifest.dims.items()]
    console.print(f"[bold]Sizes[/] {escape('; '.join(sizes)) or 'all fixed'}", soft_wrap=True, highlight=False)
    _show_transformations(manifest, console)
    _show_parity(manifest, result.parity, console)
    _show_precision(manifest, console)
    if result.kept:
        kept = ", ".join(result.kept)
        console.print(
            f"[bold]Kept[/] of an earlier run: {escape(kept)}; OPTEXPORT_CACHE= computes all anew",
            soft_wrap=True,
            highlight=False,
        )
    if result.tuned:
        console.print("[bold]Tuned[/]", highlight=False)
        outcome.show(result.tuned, console)
    if result.bench is not None:
        console.print("[bold]Measured[/]", highlight=False)
        report.show(result.bench, console)
    _show_files(result, console)
    if result.run_page is not None:
        console.print(f"\n[bold]MLflow[/] run {result.run_id}", highlight=False)
        for line in result.run_page.splitlines():
            console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)
    if result.registered is not None:
        console.print(f"[bold]Registered[/] {escape(result.registered.told)}", soft_wrap=True, highlight=False)
        for reason in result.registered.why:
            console.print(f"  {escape(reason)}", soft_wrap=True, highlight=False)


def _signature(tensor: TensorRecord) -> str:
    return f"{tensor.name} [{', '.join(map(str, tensor.shape))}] {tensor.dtype}"


def _show_transformations(manifest: Manifest, console: Console) -> None:
    console.print(f"\n[bold]Transformations[/] ({manifest.nodes_before} nodes -> {manifest.nodes_after})")
    if not manifest.transformations:
        console.print("  none")
    formats: list[str] = []
    for t in manifest.transformations:
        if t.formats != formats:
            formats = t.formats
            console.print(f"  for {', '.join(formats)}:")
        replaced = sum(len(change.replaced) for change in t.changes)
        made = sum(len(change.nodes) for change in t.changes)
        done = f"{replaced} {'node' if replaced == 1 else 'nodes'} -> {made}" if t.changes else "nothing to change"
        first = f", first at {escape(_where(t.changes[0]))}" if t.changes else ""
        console.print(f"  {escape(t.rule):38} {done}{first}", highlight=False, soft_wrap=True)
        for miss in t.near_misses[:_SHOWN_NEAR_MISSES]:
            console.print(f"    skipped at {escape(miss.node)}: {escape(miss.reason)}", highlight=False, soft_wrap=True)
        if (more := len(t.near_misses) - _SHOWN_NEAR_MISSES) > 0:
            console.print(f"    and {more} more near misses, all in manifest.json")
    if manifest.undone:
        undone = escape(" and ".join(manifest.undone))
        console.print(f"  undone again on a copy: {undone}; the graph before came back, to the bit", soft_wrap=True)


def _where(change: ChangeRecord) -> str:
    """The module that was changed, or else the node."""
    is_function = change.target.startswith(("operator.", "torch."))
    return change.target if change.target and not is_function else (change.nodes or change.replaced)[0]


def _show_parity(manifest: Manifest, targets: Sequence[TargetParity], console: Console) -> None:
    proof = manifest.parity
    verdict = "[bold green]passed[/]" if all(target.passed for target in targets) else "[bold red]failed[/]"
    batches = escape(ci.batches(proof.cases))
    console.print(
        f"\n[bold]Parity[/] {verdict}, on {len(proof.cases)} batches: {batches}", soft_wrap=True, highlight=False
    )
    if proof.ways:
        console.print(f"  floor: the original as it is run here, and {' and '.join(proof.ways)}", highlight=False)
    if proof.fallback:
        console.print(f"  float64 could not be had ({escape(proof.fallback)}): compared with the original itself")
    for where in proof.unguided:
        console.print(f"  {escape(where)}: float64 goes another way there, so compared with the original itself")
    for what in manifest.few_digits:
        console.print(
            f"  [bold]few digits[/]: float64 differs in {escape(what)}: "
            "a fault of that size passes, unless parity.atol is set",
            soft_wrap=True,
            highlight=False,
        )
    for what in manifest.only_zeros:
        console.print(
            f"  [bold]only zeros[/]: {escape(what)} is nothing else on ordinary batches, which shows little: "
            "give data on which it is more, as inputs.data",
            soft_wrap=True,
            highlight=False,
        )
    for what in proof.left_out:
        console.print(f"  not checked: {escape(what)}", soft_wrap=True, highlight=False)
    console.print(parity_table(targets, wide=console.width >= _WIDE))
    if any(target.decisions for target in targets):
        console.print(decision_table(targets))
    for artifact in manifest.artifacts:
        if artifact.fixed_shape is not None:
            console.print(f"  {artifact.format}: [bold]fixed shape[/], since {escape(artifact.fixed_shape)}")
    for axis in manifest.fixed_axes:
        console.print(f"  fixed by the model: {escape(axis)}", highlight=False)


def parity_table(targets: Sequence[TargetParity], *, wide: bool) -> Table:
    """One row for every output at every place: its distance beside the floor; the rest where there is room."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("place", "output"):
        table.add_column(heading, no_wrap=True)
    for heading in ("distance", "floor", "multiple", *(("limit", "step", "argmax", "would pass") if wide else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets:
        for o in target.outputs:
            cells = [f"{value:.2g}" for value in (o.max_abs, o.floor, o.multiple)]
            if wide:
                gated = any(decision.gate.output in (None, o.output) for decision in target.decisions)
                limit = f"{o.limit:.2g}" if math.isfinite(o.limit) else "gates" if gated else "none"
                cells += [limit, f"{o.step:.2g}", f"{o.argmax_agreement:.2%}", f"atol={o.tolerance:.2g}"]
            table.add_row(target.title, escape(on_one_line(o.output)), *cells, style=None if o.passed else "red")
    return table


def decision_table(targets: Sequence[TargetParity]) -> Table:
    """One row for every gate at every place: the value that it is on, and what that was counted over."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("place", "decisions"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "gate", "mean (95 % interval)", "count", "ties"):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets:
        for d in target.decisions:
            interval = "" if d.low is None else f" ({d.low:.6g} to {d.high:.6g})"
            value, least = beside_gate(d.value, d.gate.min), f"{d.gate.min:.15g}"
            cells = [value, least, f"{d.mean:.6g}{interval}", f"{d.count}", f"{d.ties}"]
            table.add_row(target.title, escape(d.gate.name), *cells, style=None if d.passed else "red")
    return table


def _show_precision(manifest: Manifest, console: Console) -> None:
    """Says of each file of lower precision what of it is lowered, and why the rest is not."""
    for artifact in manifest.artifacts:
        if (record := artifact.precision) is None:
            continue
        lowered = [layer for layer in record.layers if layer.kept is None]
        text = f"{artifact.format} is {record.precision}, and held to the gates: {_told(record.chosen)}"
        console.print(f"[bold]Precision[/] {escape(text)}", soft_wrap=True, highlight=False)
        console.print(f"  {len(lowered)} of {len(record.layers)} layers are lowered", highlight=False)
        if any(gate.real for gate in manifest.parity.gates):
            told = "gates count on the data alone; at other sizes gross faults alone are found"
            console.print(f"  {told}", soft_wrap=True, highlight=False)
        if ungated := manifest.ungated:
            console.print(f"  held to nothing: {escape(', '.join(ungated))}", soft_wrap=True, highlight=False)
        if len(lowered) < len(record.layers):
            told = f"  with all {record.but_asked_for}lowered: {escape(_told(record.lowered))}"
            console.print(told, soft_wrap=True, highlight=False)
        for layer in record.layers:
            if layer.kept is not None:
                why = layer.kept if not layer.alone else f"{layer.kept}; lowered alone: {_told(layer.alone)}"
                console.print(f"  in float32: {escape(f'{layer.layer} ({why})')}", soft_wrap=True, highlight=False)


def _told(values: Sequence[GateValueRecord]) -> str:
    """What gates are on."""
    texts = ["none" if value.value is None else beside_gate(value.value, value.min) for value in values]
    names = [f"{value.measure}{f' of {value.output}' if value.output else ''}" for value in values]
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _show_files(result: Result, console: Console) -> None:
    console.print(f"[bold]Files[/] in {escape(str(result.output))}", soft_wrap=True, highlight=False)
    for file in sorted(path for path in result.output.rglob("*") if path.is_file()):
        name = escape(file.relative_to(result.output).as_posix())
        console.print(f"  {name:28} {report.size_in_words(file.stat().st_size):>10}", highlight=False)
    for missing in result.manifest.application.missing if result.manifest.application is not None else ():
        console.print(f"  without its {escape(missing)}", soft_wrap=True, highlight=False)
    if result.baseline is not None:
        console.print(f"[bold]Baseline[/] in {escape(str(result.baseline))}", soft_wrap=True, highlight=False)


def as_json(result: Result) -> dict[str, Any]:
    """The result for machines."""
    return {
        "passed": result.passed,
        "exit_code": 0 if result.failure is None else result.failure.exit_code,
        "error": None if result.failure is None else str(result.failure),
        "tune": outcome.as_json(result.tuned),
        "output": str(result.output),
        "baseline": None if result.baseline is None else str(result.baseline),
        "files": {name: str(path) for name, path in result.files.items()},
        "transformed_nodes": result.transformed_nodes,
        "removed_nodes": result.removed_nodes,
        "near_misses": {t.rule: [miss.model_dump() for miss in t.near_misses] for t in result.manifest.transformations},
        "parity": result.manifest.parity.model_dump(mode="json"),
        "bench": None if result.bench is None else report.as_json(result.bench),
        "mlflow_run_id": result.run_id,
        "registered": None if result.registered is None else asdict(result.registered),
        "tracking_failure": None if result.tracking_failure is None else str(result.tracking_failure),
    }
