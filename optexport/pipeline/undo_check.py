"""Undo as evidence: what the last reversible rules did is taken back on a copy, which must be the graph before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from optexport._utils.module_state import apart, buffers_kept
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
    """Undoes rules on a copy of a graph, and compares it with the graph before them.

    Code, names, ``state_dict`` and, on the example, outputs have to be equal, to the bit.

    Args:
        rules: Those that changed the graph last, in their order; all reversible.
        earlier: The graph as it was before them.

    Raises:
        TransformationError: It is another graph, or a rule cannot be undone.
    """
    if not rules:
        return
    undo = compose(*(rule.transformation for rule in rules))
    assert isinstance(undo, ReversibleTransformation)
    undone = undo(sharing_copy(graph_module), reverse=True)
    if difference := _difference(undone, earlier, example):
        raise TransformationError(
            f"undoing what was applied last does not give back the graph before: {difference}",
            location=", ".join(rule.name for rule in rules),
            hint="Mend its restore, or derive it from Rule or Transformation, as one that cannot be undone.",
        )


def _difference(undone: fx.GraphModule, earlier: fx.GraphModule, example: Mapping[str, torch.Tensor]) -> str | None:
    """What differs between two graphs; None where nothing does."""
    if undone.code != earlier.code:
        lines = zip(undone.code.splitlines(), earlier.code.splitlines(), strict=False)
        line = next((f'"{one.strip()}" for "{other.strip()}"' for one, other in lines if one != other), "its length")
        return f"its code has {line}"
    states = undone.state_dict(), earlier.state_dict()
    if list(states[0]) != list(states[1]):
        return "the names in its state_dict, or their order"
    for name, tensor in states[1].items():
        if not _equal(states[0][name], tensor):
            return f"the values of {name}"
    results = _run(undone, example), _run(earlier, example)
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        if not _equal(one, other):
            return f"output {index} on the traced inputs"
    return None


def _run(graph_module: fx.GraphModule, example: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What a graph gives that may share its buffers with another."""
    with torch.no_grad(), buffers_kept(graph_module):
        outputs = flatten_outputs(graph_module(**copy.deepcopy(as_arguments(example))))
        return apart(graph_module, outputs.values())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN and the sign of zero included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(bytes_of(one), bytes_of(other))
