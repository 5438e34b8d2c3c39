"""Bisection over rules and their changes, to find the one that a parity check fails on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from optexport.diagnosis.divergence import Comparison, compare, lost, told
from optexport.diagnosis.intermediates import Observed, observe_graph
from optexport.diagnosis.node_matching import name_alike
from optexport.diagnosis.reproduction import Finding, Reproduction, failing_case, incomparable, outputs_at
from optexport.diagnosis.subgraph import cut
from optexport.exporters import exported_program, pt2, torchscript
from optexport.parity.checker import GRAPH, ParityChecker, TargetParity
from optexport.parity.reference import Call
from optexport.signature.signature import Batch
from optexport.tracing.trace import Traced
from optexport.tracing.transformers_exporter import quiet
from optexport.transformations import DeepCopy, Match, Rule, Skip
from optexport.transformations.apply import Applied, NamedRule, is_built_in, transform
from optexport.transformations.rule import Change

_SHOWN_NODES = 5


class _First(Rule):
    """Rule that applies only the first changes of another rule."""

    def __init__(self, rule: Rule, most: int) -> None:
        self.rule, self.left = rule, most

    @property
    def signature(self) -> str:
        return self.rule.signature

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | Skip | None:
        found = self.rule.match(graph_module, node)
        return None if isinstance(found, Match) and not self.left else found

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> list[tuple[fx.Node, Any]]:
        self.left -= 1
        return self.rule.rewrite(graph_module, match)


class _Rules:
    """Applies the first rules of a run to a fresh trace and repeats the failed check."""

    def __init__(
        self, retrace: Callable[[], tuple[Traced, Call]], rules: Sequence[NamedRule], proof: ParityChecker
    ) -> None:
        self.retrace, self.rules, self.proof = retrace, rules, proof
        self.target = proof.targets[-1].target
        self.case = failing_case(proof, proof.targets[-1])
        self.batch = proof.reference.cases[self.case].batch

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
        gated = self.proof.targets[-1].outputs_passed
        reference = self.proof.reference if gated else self.proof.reference.select([self.case])
        proof = ParityChecker(reference, self.proof.tolerances, self.proof.gates if gated else ())
        return proof.check(GRAPH, lambda batch: self.call(graph_module, dict(batch)))

    def passes(self, count: int, changes: int | None = None) -> bool:
        graph_module, _ = self.graph(count, changes)
        return self.check(graph_module).passed


def blame_rules(
    retrace: Callable[[], tuple[Traced, Call]], rules: Sequence[NamedRule], proof: ParityChecker, model: nn.Module
) -> Finding:
    """Finds the first rule that fails, the change that causes it and the first divergence.

    Args:
        retrace: Traces the model again and returns its runner, because rules change a graph in place.
        rules: Rules of the run, in order.
        proof: Checker whose last target, the transformed graph, failed.
        model: The original model.

    Returns:
        The explanation, and scripts that reproduce the failure.
    """
    trial = _Rules(retrace, rules, proof)
    before, _ = trial.graph(0)
    if not trial.check(before).passed:
        shown = [_whole("The traced graph differs from the model", before, trial)]
        nested = any(isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor for m in model.modules())
        return Finding(trial.target, trial.case, _TRACE + _NESTED * nested, shown)
    if trial.passes(len(rules)):
        return Finding(trial.target, trial.case, _OTHER_EACH_TIME)
    count = _first_failing(len(rules), trial.passes)
    after, reports = trial.graph(count)
    rule, changes = rules[count - 1], reports[-1].report.changes
    which: int | None = None
    if isinstance(rule.transformation, Rule) and len(changes) > 1:
        which = _first_failing(len(changes), lambda most: trial.passes(count, most))
    lines = [_verdict(rule, changes, which)]
    case = proof.reference.cases[trial.case].name
    comparison, double = Comparison({}, None), False
    try:
        if which is None:
            before, _ = trial.graph(count - 1)
        else:
            before, _ = trial.graph(count, which - 1)
            after, _ = trial.graph(count, which)
        blamed = changes if which is None else [changes[which - 1]]
        name_alike(before, after, {name for change in blamed for name in (*change.nodes, *change.replaced)})
        comparison, double = _compare_graphs(before, after, trial.batch)
        lines.append(told(comparison.parting, case, incomparable(proof.targets[-1], case)))
    except Exception as error:  # a model's own operators may raise anything
        lines.append(lost(error))
    title = f"What {rule.name} made of the graph differs from what it was given"
    tried = []
    if comparison.parting is not None:
        tried += _piece(title, before, after, trial.batch, comparison, double=double)
    tried.append(_whole(title, after, trial))
    return Finding(trial.target, trial.case, "\n".join(lines), tried)


_TRACE = (
    "The trace itself already differs from the model: no transformation is to blame. Where only sizes that "
    "were not traced fail, the model bakes one in, or a trace cannot hold them: narrow the range in "
    "inputs.dynamic, or leave the dimension out of it."
)

_NESTED = (
    "\nIts torch.nn.TransformerEncoder gives 0 for what a padding mask leaves out, but not in a trace: build it with "
    "enable_nested_tensor=False, for which both give the same."
)

_OTHER_EACH_TIME = (
    "Applied once more to a fresh trace, the rules pass: one of them, or the model, gives other results each time."
)


def _first_failing(count: int, passes: Callable[[int], bool]) -> int:
    """Bisects for the smallest count that fails, if a count of zero passes."""
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return bad


def _verdict(rule: NamedRule, changes: Sequence[Change], which: int | None) -> str:
    blamed = changes if which is None else [changes[which - 1]]
    nodes = [node for change in blamed for node in change.nodes or change.replaced]
    shown = ", ".join(nodes[:_SHOWN_NODES])
    shown += f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    text = f"{rule.name} is to blame, which changed {shown or 'no node that it says of'}"
    text += f" (its change {which} of {len(changes)})" if which is not None else ""
    if rule.transformation.preserves_computation:
        return f"{text}. {rule.exclusion_hint[0].upper()}{rule.exclusion_hint[1:]}."
    return (
        f"{text}. It does not preserve the computation: set parity.atol and parity.rtol, and the gates "
        f"of parity.metrics, to what the task allows, or {rule.exclusion_hint}."
    )


def _compare_graphs(before: fx.GraphModule, after: fx.GraphModule, batch: Batch) -> tuple[Comparison, bool]:
    """Compares two graphs in float64, or in their own precision if float64 shows nothing."""
    exact: Observed | None = observe_graph(before, batch, double=True)
    assert exact is not None
    original = observe_graph(before, batch)
    if exact.raised is None:
        found = compare(exact, observe_graph(after, batch, double=True), None, by_name=True)
        if found.parting is not None and found.parting.inner is not None:  # an error may occur in float64 only
            return found, True
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
    """Cuts the diverging part out of both graphs, after the last values that agree."""
    parting = comparison.parting
    assert parting is not None
    name, graphs = parting.node, (before, after)
    if not all(any(node.name == name for node in graph.graph.nodes) for graph in graphs):
        return []
    shared = {mine for mine, theirs in comparison.matched.items() if mine == theirs} - {name}
    pieces, wanted = zip(*(cut(graph, name, shared) for graph in graphs), strict=True)
    reads = list(dict.fromkeys(need for needs in wanted for need in needs))
    whole = observe_graph(before, batch, double=double, keep={*reads, name}).whole
    if name not in whole:
        return []
    tensors = {f"inputs.{need}": whole[need] for need in reads}
    raises = parting.inner is None
    suffix = ".pt" if raises else ".pt2"

    def write(folder: Path) -> None:
        for role, piece in zip(("before", "after"), pieces, strict=True):
            given = {need: whole[need] for need in reads}
            module = _taking(DeepCopy()(piece).double() if double else piece, reads)
            _save(module, given, folder / f"{role}{suffix}")

    outputs = {name: (parting.limit, whole[name].dtype)}
    return [
        Reproduction(
            f"{title}, at {name}.", f"after{suffix}", f"before{suffix}", outputs, write, tensors, raises=raises
        )
    ]


def _taking(graph_module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Adds inputs that a piece lacks, so both pieces take the same ones."""
    first = next(iter(graph_module.graph.nodes))
    there = {str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")}
    with graph_module.graph.inserting_before(first):
        for name in names:
            if name not in there:
                graph_module.graph.placeholder(name)
    graph_module.recompile()
    return graph_module


def _whole(title: str, graph_module: fx.GraphModule, trial: _Rules) -> Reproduction:
    """Returns a reproduction with the whole graph on the failing case."""
    reference, flat = trial.proof.reference, exported_program.flatten(graph_module, trial.traced.signature)
    case = reference.cases[trial.case]
    raises = isinstance(trial.proof.result(trial.target, case.name), str)
    found = "after.pt" if raises else "after.pt2"
    outputs, expected = outputs_at(trial.proof, trial.proof.targets[-1], trial.case)

    def write(folder: Path) -> None:
        _save(flat, case.batch, folder / found)

    return Reproduction(f"{title}.", found, expected, outputs, write, raises=raises)


def _save(graph_module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a graph as .pt2, or as TorchScript for the suffix .pt, used if it raises."""
    with torch.no_grad(), quiet():
        if path.suffix == ".pt":
            torch.jit.script(torchscript.make_scriptable(graph_module)).save(str(path))
        else:
            given = {name: tensor.clone() for name, tensor in inputs.items()}
            pt2.save(torch.export.export(graph_module, (), given, strict=False), path)
