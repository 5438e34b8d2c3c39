"""Undoes the last reversible rules on a copy, and compares it with the earlier graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from optexport._utils.module_state import copy_shared_outputs, restoring_state
from optexport._utils.tensors import bytes_of
from optexport.errors import TransformationError
from optexport.signature.signature import as_arguments, flatten_outputs
from optexport.transformations import ReversibleTransformation, compose
from optexport.transformations.apply import NamedRule, sharing_copy


def check_undo(
    graph_module: fx.GraphModule,
    rules: Sequence[NamedRule],
    earlier: fx.GraphModule,
    example: Mapping[str, torch.Tensor],
) -> None:
    """Checks that undoing rules on a copy of a graph restores the earlier graph, bit for bit.

    Compares code, names, ``state_dict``, and the outputs for the example.

    Args:
        graph_module: The graph after the rules; it does not change.
        rules: The rules that changed the graph last, in the order of application; all reversible.
        earlier: The graph before these rules.
        example: Inputs of the graph.

    Raises:
        TransformationError: The graphs differ, or a rule cannot be undone.
    """
    if not rules:
        return
    undo = compose(*(rule.transformation for rule in rules))
    assert isinstance(undo, ReversibleTransformation)
    undone = undo(sharing_copy(graph_module), reverse=True)
    if difference := _find_difference(undone, earlier, example):
        raise TransformationError(
            f"undo does not restore the earlier graph: {difference}",
            location=", ".join(rule.name for rule in rules),
            hint="Fix restore, or derive the rule from Rule or Transformation, which cannot be undone.",
        )


def _find_difference(
    undone: fx.GraphModule, earlier: fx.GraphModule, example: Mapping[str, torch.Tensor]
) -> str | None:
    if undone.code != earlier.code:
        lines = zip(undone.code.splitlines(), earlier.code.splitlines(), strict=False)
        pairs = (f'expected "{b.strip()}", found "{a.strip()}"' for a, b in lines if a != b)
        return f"the code differs ({next(pairs, 'in length')})"
    state, earlier_state = undone.state_dict(), earlier.state_dict()
    if list(state) != list(earlier_state):
        return "the names in the state_dict, or their order, differ"
    for name, tensor in earlier_state.items():
        if not _is_bit_equal(state[name], tensor):
            return f"the values of {name} differ"
    results = _run(undone, example), _run(earlier, example)
    for index, (result, expected) in enumerate(zip(*results, strict=True)):
        if not _is_bit_equal(result, expected):
            return f"output {index} differs for the traced inputs"
    return None


def _run(graph_module: fx.GraphModule, example: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Runs a graph without changing its buffers, which it may share with another graph."""
    with torch.no_grad(), restoring_state(graph_module):
        outputs = flatten_outputs(graph_module(**copy.deepcopy(as_arguments(example))))
        return copy_shared_outputs(graph_module, outputs.values())


def _is_bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, so that NaN equals NaN and 0.0 differs from -0.0."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of(a), bytes_of(b))
