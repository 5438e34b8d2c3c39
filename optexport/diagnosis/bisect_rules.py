"""Bisection over rules and their changes, to find the one that a parity check fails on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from optexport.diagnosis.divergence import (
    Comparison,
    compare,
    describe_agreeing_inputs,
    describe_divergence,
    describe_search_error,
)
from optexport.diagnosis.failure import find_unmeasured_output, find_unnamed_case
from optexport.diagnosis.intermediates import Observed, observe_graph
from optexport.diagnosis.node_matching import align_names
from optexport.diagnosis.reproduction import Finding, Reproduction, failing_case, outputs_at
from optexport.diagnosis.subgraph import extract
from optexport.exporters import graph_export, pt2, scriptable
from optexport.parity.checker import GRAPH, ParityChecker, TargetParity
from optexport.parity.reference import Call
from optexport.signature.signature import Batch
from optexport.tracing.dynamo_exporter import quiet
from optexport.tracing.trace import Traced
from optexport.transformations import DeepCopy, Match, Rule, Skip
from optexport.transformations.apply import Applied, NamedRule, is_built_in, transform
from optexport.transformations.rule import Change

_SHOWN_NODES = 5


class _First(Rule):
    """Rule that applies only the first changes of another rule."""

    def __init__(self, rule: Rule, count: int) -> None:
        self.rule, self.remaining = rule, count

    @property
    def signature(self) -> str:
        return self.rule.signature

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | Skip | None:
        match = self.rule.match(graph_module, node)
        return None if isinstance(match, Match) and not self.remaining else match

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> list[tuple[fx.Node, Any]]:
        self.remaining -= 1
        return self.rule.rewrite(graph_module, match)


class _Rerun:
    """Applies the first rules of a run to a fresh trace and repeats the failed check."""

    def __init__(
        self, retrace: Callable[[], tuple[Traced, Call]], rules: Sequence[NamedRule], checker: ParityChecker
    ) -> None:
        self.retrace, self.rules, self.checker = retrace, rules, checker
        self.target = checker.targets[-1].target
        self.failed_outputs = {output.output for output in checker.targets[-1].outputs if not output.passed}
        self.case = failing_case(checker, checker.targets[-1])
        self.batch = checker.reference.cases[self.case].batch

    def graph(self, count: int, changes: int | None = None) -> tuple[fx.GraphModule, Sequence[Applied]]:
        """Returns the graph after the first rules, optionally with only some changes of the last."""
        self.traced, self.call = self.retrace()
        graph_module = self.traced.graph_module
        rules = [replace(rule, min_matches=0) for rule in self.rules[:count]]
        if changes is not None:
            last = rules[-1].transformation
            assert isinstance(last, Rule)
            if not is_built_in(last):  # a plugin may write to tensors of the caller's model
                graph_module = DeepCopy()(graph_module)
            rules[-1] = replace(rules[-1], transformation=_First(last, changes))
        transformed = transform(graph_module, rules)
        return transformed.graph_module, transformed.applied

    def check(self, graph_module: fx.GraphModule) -> TargetParity:
        # A gate counts all cases together, so all of them run.
        only_gates_fail = self.checker.targets[-1].outputs_passed
        reference = self.checker.reference if only_gates_fail else self.checker.reference.select([self.case])
        checker = ParityChecker(reference, self.checker.tolerances, self.checker.gates if only_gates_fail else ())
        return checker.check(GRAPH, lambda batch: self.call(graph_module, dict(batch)))

    def graph_passes(self, graph_module: fx.GraphModule) -> bool:
        """Returns True if the outputs that failed before now pass.

        Others are ignored, because they may be all NaN in this case.
        """
        parity = self.check(graph_module)
        if not self.failed_outputs:
            return parity.passed
        return all(output.passed for output in parity.outputs if output.output in self.failed_outputs)

    def passes(self, count: int, changes: int | None = None) -> bool:
        graph_module, _ = self.graph(count, changes)
        return self.graph_passes(graph_module)


def diagnose_rules(
    retrace: Callable[[], tuple[Traced, Call]], rules: Sequence[NamedRule], checker: ParityChecker, model: nn.Module
) -> Finding:
    """Finds the first rule that fails, the change that causes it and the first divergence.

    Args:
        retrace: Traces the model again and returns its runner, because rules change a graph in place.
        rules: Rules of the run, in order.
        checker: Checker whose last target, the transformed graph, failed.
        model: The original model.

    Returns:
        The explanation, and scripts that reproduce the failure.
    """
    rerun = _Rerun(retrace, rules, checker)
    before, _ = rerun.graph(0)
    if not rerun.graph_passes(before):
        reproduction = _complete_reproduction("The traced graph differs from the model", before, rerun)
        if any(isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor for m in model.modules()):
            return Finding(rerun.target, rerun.case, f"{_TRACE}\n{_NESTED}", [reproduction], _NESTED_HINT)
        return Finding(rerun.target, rerun.case, _TRACE, [reproduction], _TRACE_HINT)
    if rerun.passes(len(rules)):
        return Finding(rerun.target, rerun.case, _NOT_REPEATABLE)
    count = _first_failing(len(rules), rerun.passes)
    after, reports = rerun.graph(count)
    rule, changes = rules[count - 1], reports[-1].report.changes
    position: int | None = None
    if isinstance(rule.transformation, Rule) and len(changes) > 1:
        position = _first_failing(len(changes), lambda changes_count: rerun.passes(count, changes_count))
    lines = [_describe_rule(rule, changes, position)]
    case = checker.reference.cases[rerun.case].name
    comparison, double = Comparison({}, None), False
    try:
        if position is None:
            before, _ = rerun.graph(count - 1)
        else:
            before, _ = rerun.graph(count, position - 1)
            after, _ = rerun.graph(count, position)
        failing = changes if position is None else [changes[position - 1]]
        align_names(before, after, {name for change in failing for name in (*change.nodes, *change.replaced)})
        comparison, double = _compare_graphs(before, after, rerun.batch)
        target = checker.targets[-1]
        unnamed, problem = find_unnamed_case(target, case), find_unmeasured_output(target, case)
        lines.append(describe_divergence(comparison.divergence, unnamed, problem))
        if (agreeing := describe_agreeing_inputs(comparison.divergence)) is not None:
            lines.append(agreeing)
    except Exception as error:  # a model's own operators may raise anything
        lines.append(describe_search_error(error))
    title = f"The graph after {rule.name} differs from the graph before it"
    reproductions = []
    if comparison.divergence is not None:
        reproductions += _piece(title, before, after, rerun.batch, comparison, double=double)
    reproductions.append(_complete_reproduction(title, after, rerun))
    return Finding(rerun.target, rerun.case, "\n".join(lines), reproductions, _hint(rule))


_TRACE = "The traced graph already differs from the model, so no transformation caused the difference."
_TRACE_HINT = (
    "If only sizes that were not traced fail, the model depends on a fixed size. Narrow the range of the dimension "
    "in inputs.dynamic, or remove the dimension."
)

_NESTED = "torch.nn.TransformerEncoder returns 0 at padded positions, and its trace returns other values."
_NESTED_HINT = "Build the torch.nn.TransformerEncoder with enable_nested_tensor=False."

_NOT_REPEATABLE = (
    "The rules pass on a second trace, so a rule or the model returns different results each time it is run."
)


def _first_failing(count: int, passes: Callable[[int], bool]) -> int:
    """Bisects for the smallest count that fails, if a count of zero passes."""
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return bad


def _describe_rule(rule: NamedRule, changes: Sequence[Change], position: int | None) -> str:
    failing = changes if position is None else [changes[position - 1]]
    nodes = [node for change in failing for node in change.nodes or change.replaced]
    names = ", ".join(nodes[:_SHOWN_NODES])
    names += f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    text = f"The rule {rule.name} caused the difference. "
    text += f"It changed {names}" if names else "It did not mark the nodes that it changed"
    text += f" (change {position} of {len(changes)})" if position is not None else ""
    if not rule.transformation.preserves_computation:
        text += ". This rule does not preserve the computation"
    return f"{text}."


def _hint(rule: NamedRule) -> str:
    if rule.transformation.preserves_computation:
        return f"{rule.exclusion_hint[0].upper()}{rule.exclusion_hint[1:]}."
    return (
        "Set parity.atol and parity.rtol, and the gates in parity.metrics, to values that the task allows, or "
        f"{rule.exclusion_hint}."
    )


def _compare_graphs(before: fx.GraphModule, after: fx.GraphModule, batch: Batch) -> tuple[Comparison, bool]:
    """Compares two graphs in float64, or in their own precision if float64 shows nothing."""
    exact: Observed | None = observe_graph(before, batch, double=True)
    assert exact is not None
    original = observe_graph(before, batch)
    if exact.raised is None:
        comparison = compare(exact, observe_graph(after, batch, double=True), None, by_name=True)
        # An error may occur in float64 only.
        if comparison.divergence is not None and comparison.divergence.in_target is not None:
            return comparison, True
    else:
        exact = None
    return compare(original, observe_graph(after, batch), exact or original, by_name=True), False


def _piece(
    title: str,
    before: fx.GraphModule,
    after: fx.GraphModule,
    batch: Batch,
    comparison: Comparison,
    *,
    double: bool,
) -> list[Reproduction]:
    """Extracts the diverging part from both graphs, after the last values that agree."""
    divergence = comparison.divergence
    assert divergence is not None
    name, graphs = divergence.node, (before, after)
    if not all(any(node.name == name for node in graph.graph.nodes) for graph in graphs):
        return []
    agreeing = {node for node, match in comparison.matched.items() if node == match} - {name}
    pieces, inputs = zip(*(extract(graph, name, agreeing) for graph in graphs), strict=True)
    reads = list(dict.fromkeys(need for needs in inputs for need in needs))
    values = observe_graph(before, batch, double=double, keep={*reads, name}).complete
    if name not in values:
        return []
    tensors = {f"inputs.{need}": values[need] for need in reads}
    raises = divergence.in_target is None
    suffix = ".pt" if raises else ".pt2"

    def write(folder: Path) -> None:
        for role, piece in zip(("before", "after"), pieces, strict=True):
            module = _add_inputs(DeepCopy()(piece).double() if double else piece, reads)
            _save(module, {need: values[need] for need in reads}, folder / f"{role}{suffix}")

    outputs = {name: (divergence.limit, values[name].dtype)}
    return [
        Reproduction(
            f"{title}, at {name}.", f"after{suffix}", f"before{suffix}", outputs, write, tensors, raises=raises
        )
    ]


def _add_inputs(graph_module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Adds inputs that a piece lacks, so both pieces take the same ones."""
    first = next(iter(graph_module.graph.nodes))
    existing = {str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")}
    with graph_module.graph.inserting_before(first):
        for name in names:
            if name not in existing:
                graph_module.graph.placeholder(name)
    graph_module.recompile()
    return graph_module


def _complete_reproduction(title: str, graph_module: fx.GraphModule, rerun: _Rerun) -> Reproduction:
    """Returns a reproduction with the complete graph on the failing case."""
    checker, flat = rerun.checker, graph_export.flatten(graph_module, rerun.traced.signature)
    case = checker.reference.cases[rerun.case]
    raises = isinstance(checker.result(rerun.target, case.name), str)
    file = "after.pt" if raises else "after.pt2"
    outputs, expected = outputs_at(checker, checker.targets[-1], rerun.case)

    def write(folder: Path) -> None:
        _save(flat, case.batch, folder / file)

    return Reproduction(f"{title}.", file, expected, outputs, write, raises=raises)


def _save(graph_module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a graph as .pt2, or as TorchScript for the suffix .pt, used if it raises."""
    with torch.no_grad(), quiet():
        if path.suffix == ".pt":
            torch.jit.script(scriptable.make_scriptable(graph_module)).save(str(path))
        else:
            arguments = {name: tensor.clone() for name, tensor in inputs.items()}
            pt2.save(torch.export.export(graph_module, (), arguments, strict=False), path)
