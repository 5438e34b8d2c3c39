"""Cases that take both ways of a model's branches on values, such as ``if torch.isnan(x).any()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from optexport.parity.cases.case import Case
from optexport.signature.signature import Batch, Signature
from optexport.tracing.fallbacks.branch_merging import BRANCH

# Values for the first number of an input, and factors for all its numbers.
_VALUES = (float("nan"), float("inf"))
_FACTORS = (0.0, -1.0, 1e-3, 100.0, -100.0, 1e6)
# Values for all whole numbers of an input.
_INTEGERS = (0, 1, -1, 1000)

# How many of the numbers that the conditions compare with are tried.
_MAX_CONSTANTS = 8
# Operators with a number that a condition compares with; those of numbers that are read from tensors become tensors.
_COMPARING = (
    torch.ops.aten.scalar_tensor.default,
    *(getattr(torch.ops.aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)

# The line of a branch, the position among the conditions of the graph, and the way.
_Way = tuple[str, int, bool]


def branch_cases(
    graph_module: fx.GraphModule, signature: Signature, cases: Sequence[Case]
) -> tuple[list[Case], list[str]]:
    """Returns a case for each way that no other case takes, and a note for each way that no tried values take.

    Args:
        graph_module: The traced graph, which contains both ways of every branch.
        cases: The cases so far; the first one is the traced batch.
    """
    conditions = _conditions(graph_module)
    if not conditions:
        return [], []
    lines = [str(node.meta["custom"][BRANCH]) for node in conditions]
    probe = _returning(graph_module, [node.args[0] for node in conditions])  # type: ignore[misc]

    def ways(batch: Batch) -> set[_Way]:
        try:
            with torch.no_grad():
                answers = probe(*(batch[spec.name].clone() for spec in signature.inputs))
        except Exception:  # the model rejects a batch that the graph rejects
            return set()
        return {(line, index, bool(answers[index])) for index, line in enumerate(lines)}

    missing = {(line, index, way) for index, line in enumerate(lines) for way in (True, False)}
    for case in cases:
        missing -= ways(case.batch)
    added: list[Case] = []
    for name, batch in _variations(cases[0].batch, _find_constants(conditions)):
        if not missing:
            break
        if taken := missing & ways(batch):
            missing -= taken
            added.append(Case(name, batch, extreme=True, optional=True))
    notes = dict.fromkeys(
        f"the branch at {line}: no tried values make its condition {way}" for line, _, way in sorted(missing)
    )
    return added, list(notes)


def _conditions(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Returns one node for each condition that a graph chooses by."""
    chosen = [node for node in graph_module.graph.nodes if BRANCH in node.meta.get("custom", {})]
    return list({node.args[0]: node for node in chosen}.values())


def _find_constants(conditions: Sequence[fx.Node]) -> list[float]:
    """Returns the numbers that the graph compares with, nearest to the conditions first."""
    queue = [node.args[0] for node in conditions if isinstance(node.args[0], fx.Node)]
    constants: dict[float, None] = {}
    for node in queue:
        if node.target in _COMPARING:
            constants.update((float(value), None) for value in node.args if isinstance(value, int | float))
        queue += [source for source in node.all_input_nodes if source not in queue]
    return list(constants)[:_MAX_CONSTANTS]


def _returning(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
    """Returns a graph that computes only some nodes."""
    graph = fx.Graph(owning_module=graph_module)
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(graph_module.graph, copies)
    graph.output(tuple(copies[node] for node in nodes))
    graph.eliminate_dead_code()
    return fx.GraphModule(graph_module, graph)


def _variations(example: Batch, constants: Sequence[float]) -> Iterator[tuple[str, Batch]]:
    """Yields other values for each input alone, with a name.

    Args:
        constants: Further values for all numbers of an input, and for the first whole number.
    """
    for name, tensor in example.items():
        if not tensor.numel():
            continue
        if tensor.dtype is torch.bool:
            for flag in (True, False):
                yield f"{name} all {flag}", {**example, name: torch.full_like(tensor, flag)}
        elif tensor.is_floating_point():
            for value in _VALUES:
                changed = tensor.clone()
                changed.view(-1)[0] = value
                yield f"{name} with {value}", {**example, name: changed}
            for factor in _FACTORS:
                yield f"{name} times {factor:g}", {**example, name: tensor * factor}
            for value in (1.0, -1.0, *constants):
                yield f"{name} all {value:g}", {**example, name: torch.full_like(tensor, value)}
        elif not tensor.is_complex():
            limits, largest = torch.iinfo(tensor.dtype), int(tensor.max())
            whole = [int(n) for n in constants if n.is_integer()]
            for integer in (n for n in dict.fromkeys((*_INTEGERS, *whole)) if limits.min <= n <= limits.max):
                yield f"{name} all {integer}", {**example, name: torch.full_like(tensor, integer)}
            for number in (n for n in (largest + 1, largest * 2, *whole) if limits.min <= n <= limits.max):
                changed = tensor.clone()
                changed.view(-1)[0] = number
                yield f"{name} with {number}", {**example, name: changed}
