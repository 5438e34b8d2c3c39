"""Error of every node of a run's graphs, as far as they go along: where rounding grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optexport._utils.module_state import restoring_state
from optexport.bundle.node_error_records import NodeErrorRecord, NodeErrorsRecord
from optexport.bundle.parity_records import ORIGINAL
from optexport.diagnosis.intermediates import find_module, iterate_values, sample_evenly
from optexport.diagnosis.node_matching import find_counterparts
from optexport.errors import describe_error
from optexport.parity import distances, float64_model
from optexport.parity.reference import Reference, measure_noise
from optexport.parity.reference_run import find_memory_problem, to_float64
from optexport.signature.signature import Batch
from optexport.transformations.apply import Applied

# More points would be unreadable in a plot. Further nodes are grouped, in the order of execution.
_MAX_POINTS = 200
# Elements of a node that are compared. Kernels of more elements start threads, which takes longer on a busy machine.
_SAMPLE = 1 << 14
# float64 computes something else if an output of the graph is this many times farther from it than the original is.
_MISMATCH_TIMES = 8


@dataclass(frozen=True)
class _NodeError:
    """Error of a node on each target; None for targets without a counterpart."""

    position: int
    node: fx.Node
    errors: list[float | None]


def measure_node_errors(
    traced: fx.GraphModule, targets: Mapping[str, tuple[fx.GraphModule, Sequence[Applied]]], reference: Reference
) -> NodeErrorsRecord:
    """Measures the error of every floating-point node against float64, on the traced batch.

    All graphs run node by node in lock step, so that only values that are still needed are in memory. Problems leave
    the errors out and never fail a run.

    Args:
        traced: The graph before all rules.
        targets: By name, a graph made from it and the rules applied to it.
    """
    names = [ORIGINAL, *targets]
    reason = reference.fallback or find_memory_problem(traced, copied=False)
    # Without `float64_throughout`, graphs round to float32 where the model's code does, as the reference does.
    for context in () if reason else (nullcontext, float64_model.float64_throughout):
        try:
            errors = _measure(traced, targets, reference, context)
            if _agrees(traced, errors, reference):
                return NodeErrorsRecord(targets=names, points=_group(errors))
            reason = "it takes another path than the original"
        except Exception as error:  # a model's own operators may raise anything
            reason = describe_error(error)
    return NodeErrorsRecord(targets=names, points=[], skipped=f"float64 is not available node by node: {reason}")


def _measure(
    traced: fx.GraphModule,
    targets: Mapping[str, tuple[fx.GraphModule, Sequence[Applied]]],
    reference: Reference,
    context: Any,
) -> list[_NodeError]:
    batch, positions = reference.cases[0].batch, {n: i for i, n in enumerate(traced.graph.nodes)}
    runs = [_Run(traced, batch, {node.name: node.name for node in positions})]
    for graph_module, applied in targets.values():
        changes = [change for rule in applied for change in rule.report.changes]
        changed = {name for change in changes for name in (*change.nodes, *change.replaced)}
        runs.append(_Run(graph_module, batch, find_counterparts(traced.graph, graph_module.graph, changed)))
    double, errors = float64_model.copy_upcasting_weights(traced), list[_NodeError]()
    assert isinstance(double, fx.GraphModule)
    nodes, by_node = {node.name: node for node in positions}, dict[fx.Node, list[float | None]]()
    with torch.no_grad(), ExitStack() as states:
        for run in runs:
            states.enter_context(restoring_state(run.graph_module))
        values = iterate_values(double, to_float64(batch), context)
        for double_node, exact in values:
            node = nodes[double_node.name]
            found = [run.find_value(node.name) for run in runs]
            if isinstance(exact, torch.Tensor) and node.op not in ("placeholder", "get_attr"):
                node_errors = [_relative_error(value, exact) for value in found]
                # Nodes that only move values, such as views, add nothing.
                if node_errors[0] is not None and node_errors not in [by_node.get(n) for n in node.all_input_nodes]:
                    errors.append(_NodeError(positions[node], node, node_errors))
                by_node[node] = node_errors
    return errors


class _Run:
    """Node-by-node run of a graph that follows the order of another graph.

    Args:
        counterparts: For each node name of this graph, the name in the other graph.
    """

    def __init__(self, graph_module: fx.GraphModule, batch: Batch, counterparts: Mapping[str, str]) -> None:
        self.graph_module = graph_module
        self._values = iterate_values(graph_module, batch)
        self._counterparts, self._missing = counterparts, {*counterparts.values()}
        self._ahead: dict[str, Any] = {}  # values of nodes that this graph computes earlier

    def find_value(self, name: str) -> Any:
        """Returns the value of the node with this name in the other graph, or None if there is none."""
        while name in self._missing:
            node, value = next(self._values)
            if (counterpart := self._counterparts.get(node.name)) in self._missing:
                self._missing.remove(counterpart)
                self._ahead[counterpart] = value
        return self._ahead.pop(name, None)


def _relative_error(value: Any, exact: torch.Tensor) -> float | None:
    """Returns the largest distance from float64 divided by the largest magnitude, mask values excluded."""
    if not isinstance(value, torch.Tensor) or value.shape != exact.shape or not value.is_floating_point():
        return None
    if not value.numel():
        return None
    value, exact = sample_evenly(value, _SAMPLE), sample_evenly(exact, _SAMPLE)
    (low, high), (below, above) = exact.aminmax(), (value - exact).aminmax()
    if max(-low, high) < distances.MIN_MASK_VALUE and torch.isfinite(below + above):
        return float(max(-below, above) / max(-low, high)) if low or high else None
    scale = distances.scale(value, exact)
    return measure_noise(value, exact) / scale if scale else None


def _agrees(traced: fx.GraphModule, errors: Sequence[_NodeError], reference: Reference) -> bool:
    """Returns True if the outputs are about as far from float64 as the original's outputs are."""
    (output,) = traced.graph.find_nodes(op="output")
    own = [error.errors[0] or 0.0 for error in errors if error.node in output.all_input_nodes]
    outputs, exact = reference.outputs[0], reference.exact[0]
    floats = [name for name, tensor in outputs.items() if tensor.is_floating_point()]
    expected = max((_relative_error(outputs[name], exact[name]) or 0.0 for name in floats), default=0.0)
    half_the_digits = max((torch.finfo(outputs[name].dtype).eps ** 0.5 for name in floats), default=0.0)
    return max(own, default=0.0) <= max(_MISMATCH_TIMES * expected, half_the_digits)


def _group(errors: Sequence[_NodeError]) -> list[NodeErrorRecord]:
    """Groups neighboring nodes if there are too many; each group has the largest errors of its nodes."""
    size = -(-len(errors) // _MAX_POINTS) or 1
    points = []
    for group in (errors[start : start + size] for start in range(0, len(errors), size)):
        worst = max(group, key=lambda error: max(value or 0.0 for value in error.errors))
        largest = [max((v for v in values if v is not None), default=None)
                   for values in zip(*(error.errors for error in group), strict=True)]  # fmt: skip
        points.append(
            NodeErrorRecord(
                position=worst.position,
                node=worst.node.name,
                module=find_module(worst.node),
                errors=[None if value is None else float(f"{value:.2g}") for value in largest],
            )
        )
    return points
