"""Ways that a model goes at sizes other than those that it was traced at, seen by running it there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from optexport import transformers_exporters
from optexport.errors import TraceError
from optexport.program_shapes import read_signature
from optexport.raising import unlift
from optexport.resizing import resize
from optexport.signature import Batch, Dynamic, Signature, as_arguments, flatten_outputs
from optexport.size_guards import Doubt, find_doubts

# A model is run at other sizes only where its inputs hold at most this many times the numbers that they were traced
# with, or this many numbers.
_MOST_TIMES = 4
_MOST_NUMBERS = 1 << 16
# Results of another way differ by more than rounding does; what they differ by in truth is for the proof to tell.
_TOLERANCE = 0.01


@dataclass
class OtherWays:
    """What is known of the sizes at which a graph refuses to run, and the model does run.

    Attributes:
        held_to: Dimensions of which the model computes something else at other sizes, each with what is asserted.
        crossed: What the graph may go on without, since it computes the same there: what is cut, or padded, by nothing.
        further: Doubts that only a trace at those sizes knows.
    """

    held_to: dict[str, str] = field(default_factory=dict)
    crossed: list[Doubt] = field(default_factory=list)
    further: list[Doubt] = field(default_factory=list)


def find_other_ways(
    model: nn.Module,
    example: Batch,
    program: ExportedProgram,
    signature: Signature,
    doubts: Sequence[Doubt],
    dynamic: Dynamic | None,
    export: Callable[[Batch], ExportedProgram],
) -> OtherWays:
    """Runs a model at sizes at which its trace asserts what is not so, and the graph as if it were.

    Args:
        export: Traces the model with a batch.
    """
    found, traced = OtherWays(), signature.sizes(example)
    most = max(_MOST_TIMES, _MOST_NUMBERS / max(1, sum(tensor.numel() for tensor in example.values())))
    graph = _without_assertions(program)
    for doubt in doubts:
        sizes = doubt.sizes[0]
        if doubt.is_exclusion:
            found.crossed.append(doubt)
            continue
        if not doubt.is_asserted or math.prod(max(size / traced[name], 1) for name, size in sizes.items()) > most:
            continue
        batch = resize(example, signature, sizes)
        want = outcome(model, batch)
        if isinstance(want, Exception):
            continue  # what the model itself does not take, its graph may refuse
        if not _agree(outcome(graph, batch), want):
            found.held_to |= {name: str(doubt.expression) for name, size in sizes.items() if size != traced[name]}
            continue
        try:
            other = export(batch)
        except TraceError:
            continue  # what it does there is not known, and the graph goes on refusing it
        names, _, symbols = read_signature(other, dynamic, example)
        if names.dims.keys() <= signature.dims.keys():
            found.further += find_doubts(other, symbols, signature.dims, sizes)
            found.crossed.append(doubt)
    return found


def outcome(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | Exception:
    """The tensors that a model gives, or what its own code raises, which may be anything."""
    try:
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}  # which a model in train mode changes
        with torch.no_grad(), torch.random.fork_rng(devices=[]), transformers_exporters.one_pass(model):
            outputs = torch.func.functional_call(model, buffers, (), copy.deepcopy(as_arguments(inputs)))
        return list(flatten_outputs(outputs).values())
    except Exception as error:
        return error


def _without_assertions(program: ExportedProgram) -> fx.GraphModule:
    graph_module = unlift(program)
    for node in list(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _agree(got: list[torch.Tensor] | Exception, want: list[torch.Tensor]) -> bool:
    return not isinstance(got, Exception) and len(got) == len(want) and all(map(_is_close, got, want))


def _is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(
        got.double(), want.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )
