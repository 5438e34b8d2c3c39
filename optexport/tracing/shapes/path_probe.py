"""Ways that a model goes at sizes other than those that it was traced at, seen by running it there."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from optexport.errors import TraceError
from optexport.signature.exported_program import tensor_inputs
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Dim, Signature, as_argument, as_arguments, flatten_outputs
from optexport.tracing import transformers_exporter
from optexport.tracing.module_reconstruction import unlift
from optexport.tracing.shapes.size_conditions import candidates, is_broken, is_broken_at
from optexport.tracing.shapes.size_guards import (
    SuspectSize,
    assertions,
    drop_doubts,
    find_doubts,
    renaming,
    said_of_sizes,
)

# A model is run at other sizes only where its inputs hold at most this many times the numbers that they were traced
# with, or this many numbers. Where the proof alone runs it, it is traced with as many as the proof takes.
_MOST_TIMES = 4
_MOST_NUMBERS = 1 << 16
_MOST_TRACED = 1 << 24
# A model that goes more ways than this, as one with a loop over a size does, is not followed on all of them.
_MOST_WAYS = 8
# The largest size, as torch.export says that there is none.
_NO_END = 2**31
# Results of another way differ by more than rounding does; what they differ by in truth is for the proof to tell.
_TOLERANCE = 0.01
# Those of the same way run again by no more than this.
_REPEATED = 1e-6


@dataclass
class OtherWays:
    """What is known of the sizes at which a graph refuses to run, and the model does run.

    Attributes:
        held_to: Dimensions of which the model computes something else at other sizes, each with what is asserted.
        crossed: What the graph may go on without, since it computes the same there: what is cut, or padded, by nothing.
        sizes: One set of sizes of each other way, for the proof to check.
    """

    held_to: dict[str, str] = field(default_factory=dict)
    crossed: list[SuspectSize] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)


def _conditions(program: ExportedProgram, signature: Signature) -> list[Any]:
    """What a trace takes for so of sizes, in the names of dimensions; wherever it is, the model goes the same way.

    Args:
        signature: That of another trace, whose sizes may be fixed or tied in this one.
    """
    symbols, fixed = renaming(program, {}, signature.dims)
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    arguments = {argument: placeholders[name].meta["val"] for name, argument in tensor_inputs(program).items()}
    limits, equal = program.range_constraints, []
    renamed: dict[Any, Any] = {}
    for spec in signature.inputs:
        for wanted, found in zip(spec.shape, arguments[as_argument(spec.name)].shape, strict=True):
            if isinstance(wanted, str):
                size = sum(symbols[name] for name in wanted.split(" + "))
                expression = sympy.sympify(found.node.expr if isinstance(found, torch.SymInt) else found)
                if expression.is_Symbol and expression not in fixed:
                    renamed.setdefault(expression, size)
                equal.append((expression, size))
    conditions = [sympy.Eq(expression.xreplace(fixed | renamed), size) for expression, size in equal]
    for symbol, size in renamed.items():
        if symbol in limits:  # 2 is what torch.export takes for the least of every size
            conditions += [size >= limits[symbol].lower] if limits[symbol].lower > 2 else []
            conditions += [size <= limits[symbol].upper] if limits[symbol].upper < _NO_END else []
    asserted = (expression for expression, in_doubt in said_of_sizes(program) if in_doubt is is_broken)
    conditions += [expression.xreplace(fixed | renamed) for expression in asserted]
    known = set(symbols.values())
    return [condition for condition in conditions if condition.free_symbols and condition.free_symbols <= known]


def find_other_ways(
    model: nn.Module,
    example: Batch,
    program: ExportedProgram,
    signature: Signature,
    doubts: Sequence[SuspectSize],
    export: Callable[[Batch], ExportedProgram],
) -> OtherWays:
    """Runs a model at sizes at which its trace asserts what is not so, and the graph as if it were.

    It is traced there too, which tells at which sizes it goes the same way, until no sizes are found of which no trace
    tells. Where that cannot be, the graph goes on refusing.

    Args:
        export: Traces the model with a batch.
    """
    found, traced = OtherWays(), signature.sizes(example)
    numbers = sum(tensor.numel() for tensor in example.values())
    found.crossed = [doubt for doubt in doubts if doubt.is_asserted]
    if not found.crossed:
        return found
    graph, kept = _without_assertions(program), list[SuspectSize]()
    tried = _Tried(signature.dims, traced)
    tried.add([doubt.expression for doubt in found.crossed], traced)
    while (sizes := tried.beyond(found.crossed, kept)) is not None:
        beyond, way = _founded(found.crossed, sizes), None
        is_excluded = all(doubt.is_exclusion for doubt in beyond)
        times = _times(sizes, traced)
        is_small = times <= _most_times(numbers)
        if len(tried.ways) < _MOST_WAYS and (is_small or (is_excluded and times * numbers <= _MOST_TRACED)):
            batch = resize(example, signature, sizes)
            want = outcome(model, batch) if is_small else None
            # What the model computes where its trace says that it does not come the proof alone tells.
            if isinstance(want, list) and not is_excluded and not _agree(outcome(graph, batch), want):
                asserted = beyond[0].expression
                names = [name for name in sorted(map(str, asserted.free_symbols)) if sizes[name] != traced[name]]
                return OtherWays(held_to=dict.fromkeys(names, str(asserted)))
            # What the model itself does not take, or draws random numbers for, its graph may refuse.
            if want is None or (isinstance(want, list) and _is_repeatable(model, batch, want)):
                with contextlib.suppress(TraceError):
                    way = _conditions(export(batch), signature)
        if way is not None:
            tried.ways.append(way)
            tried.add(way, sizes)
            found.sizes.append(sizes)
        else:
            kept += beyond
            found.crossed = [doubt for doubt in found.crossed if doubt not in beyond]
    return found


def drop_unfounded(
    program: ExportedProgram, graph_module: fx.GraphModule, signature: Signature, example: Batch
) -> None:
    """Takes out, in place, what the export of a graph asserts, where the program computes what the graph does without.

    A graph of operators goes no other way at any size; its export takes a size that is computed for smaller than
    another, say, to tell the shapes. What the graph asserts itself it refuses to run without.
    """
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    arguments = {argument: placeholders[name].meta["val"] for name, argument in tensor_inputs(program).items()}
    names = {
        found.node.expr: size
        for spec in signature.inputs
        for size, found in zip(spec.shape, arguments[as_argument(spec.name)].shape, strict=True)
        if isinstance(size, str) and isinstance(found, torch.SymInt)
    }
    traced = signature.sizes(example)
    doubts = [doubt for doubt in find_doubts(program, names, signature.dims, traced) if doubt.is_asserted]
    if not doubts:
        return
    without, numbers = _without_assertions(program), sum(tensor.numel() for tensor in example.values())

    def is_same(sizes: dict[str, int]) -> bool:
        if _times(sizes, traced) > _most_times(numbers):
            return False
        batch = resize(example, signature, sizes)
        want = outcome(graph_module, batch)
        return isinstance(want, list) and _agree(outcome(without, batch), want, _REPEATED)

    drop_doubts(program, names, signature.dims, [d for d in doubts if all(is_same(sizes) for sizes in d.sizes)])


def outcome(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | Exception:
    """The tensors that a model gives, or what its own code raises."""
    try:
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}  # which a model in train mode changes
        with torch.no_grad(), torch.random.fork_rng(devices=[]), transformers_exporter.one_pass(model):
            outputs = torch.func.functional_call(model, buffers, (), copy.deepcopy(as_arguments(inputs)))
        return list(flatten_outputs(outputs).values())
    except Exception as error:  # a model's own code may raise anything
        return error


def _times(sizes: Mapping[str, int], traced: Mapping[str, int]) -> float:
    return math.prod(max(size / traced[name], 1) for name, size in sizes.items())


def _most_times(numbers: int) -> float:
    return max(_MOST_TIMES, _MOST_NUMBERS / max(1, numbers))


def _without_assertions(program: ExportedProgram) -> fx.GraphModule:
    graph_module = unlift(program)
    for node in assertions(graph_module.graph):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _is_repeatable(model: nn.Module, batch: Batch, first: list[torch.Tensor]) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        return _agree(outcome(model, batch), first, _REPEATED)


def _agree(got: list[torch.Tensor] | Exception, want: list[torch.Tensor], tolerance: float = _TOLERANCE) -> bool:
    def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
        kinds = [(tensor.dtype, tensor.layout, tensor.shape) for tensor in (one, other)]
        return kinds[0] == kinds[1] and torch.allclose(
            one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )

    return not isinstance(got, Exception) and len(got) == len(want) and all(map(is_close, got, want))


class _Tried:
    """Sizes that are looked at, and the ways that are known of, each by the conditions that hold on it."""

    def __init__(self, dims: Mapping[str, Dim], traced: Mapping[str, int]) -> None:
        self.ways: list[Sequence[Any]] = []
        self._dims = dims
        self._traced = traced
        self._looked_at: set[tuple[int, ...]] = set()
        self._conditions: set[Any] = set()
        self._open: list[dict[str, int]] = []

    def add(self, conditions: Sequence[Any], around: Mapping[str, int]) -> None:
        """Has sizes looked at that conditions may tell apart, about those of a trace."""
        for condition in dict.fromkeys(condition for condition in conditions if condition not in self._conditions):
            self._conditions.add(condition)
            free = sorted(symbol.name for symbol in condition.free_symbols)
            for sizes in candidates(condition, free, self._dims, around):
                every = {**around, **sizes}
                if (key := tuple(every.values())) not in self._looked_at:
                    self._looked_at.add(key)
                    self._open.append(every)

    def beyond(self, doubts: Sequence[SuspectSize], kept: Sequence[SuspectSize]) -> dict[str, int] | None:
        """Sizes at which a doubt is founded, and that lie on no way; None where none are found.

        Args:
            doubts: None that were not among them the last time.
            kept: Doubts at whose sizes nothing need be known.
        """
        self._open = [
            sizes
            for sizes in self._open
            if _founded(doubts, sizes)
            and not _founded(kept, sizes)
            and all(any(is_broken_at(condition, sizes) for condition in way) for way in self.ways)
        ]

        def rank(sizes: Mapping[str, int]) -> tuple[int, int, int]:
            # Of a single doubt, and a single size, it is known that it is to blame; next to the traced ones models run.
            steps = [abs(size - self._traced[name]) for name, size in sizes.items()]
            return len(_founded(doubts, sizes)), sum(map(bool, steps)), sum(steps)

        return min(self._open, key=rank, default=None)


def _founded(doubts: Sequence[SuspectSize], sizes: Mapping[str, int]) -> list[SuspectSize]:
    """The doubts in what is not so at some sizes."""
    return [doubt for doubt in doubts if is_broken_at(doubt.expression, sizes)]
