"""Finds branches that a model takes at other sizes, by running and tracing it there.

A graph asserts what the trace assumed about sizes, such as ``height // 16 != 4``. Many assertions are stricter than
necessary: both branches compute the same. Such assertions are dropped here, after a comparison with the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from optexport.errors import TraceError
from optexport.signature.program_arguments import tensor_inputs
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Dim, Signature, as_argument
from optexport.tracing.model_run import run_or_error
from optexport.tracing.module_reconstruction import unlift
from optexport.tracing.shapes.size_conditions import candidates, is_broken_at
from optexport.tracing.shapes.size_guards import (
    SuspectSize,
    assertions,
    drop_assertions,
    find_suspect_sizes,
    iter_assertions,
    renaming,
)

# A batch of another size has at most this many times the traced number of elements, or this many elements.
_MAX_GROWTH = 4
_MAX_ELEMENTS = 1 << 16
# The limit for batches that are only traced; the parity check runs the model at these sizes later.
MAX_TRACED_ELEMENTS = 1 << 24
# A model with more branches, such as one with a loop over a size, is not traced on all of them.
_MAX_BRANCHES = 8
# torch.export writes an upper limit that does not exist as this size or more.
_UNBOUNDED = 2**31
# Results of another branch differ by more than this; the parity check measures smaller differences.
_TOLERANCE = 0.01
# Repeated runs of the same branch differ by less than this.
_REPEAT_TOLERANCE = 1e-6


@dataclass
class ProbeResult:
    """Sizes at which the graph's assertions fail but the model runs.

    Attributes:
        fixed_dims: Dimensions to fix because the model computes something else at other sizes, each with the assertion
            that excludes these sizes.
        removable: Assertions that the graph does not need: it computes the same as the model where they fail.
        sizes: One set of sizes for each other branch, for the parity check.
    """

    fixed_dims: dict[str, str] = field(default_factory=dict)
    removable: list[SuspectSize] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)


def _conditions(program: ExportedProgram, signature: Signature) -> list[Any]:
    """Returns the conditions on sizes under which a model takes the same branch as in a trace.

    Args:
        signature: The signature of the first trace. Its dimensions name the sizes here, also those that this trace
            fixed or made equal.
    """
    symbols, fixed = renaming(program, {}, signature.dims)
    limits, equal = program.range_constraints, []
    renamed: dict[Any, Any] = {}
    for dims, traced_size in _dynamic_sizes(program, signature):
        size = sum(symbols[name] for name in dims.split(" + "))
        is_symbolic = isinstance(traced_size, torch.SymInt)
        expression = sympy.sympify(traced_size.node.expr if is_symbolic else traced_size)
        if expression.is_Symbol and expression not in fixed:
            renamed.setdefault(expression, size)
        equal.append((expression, size))
    conditions = [sympy.Eq(expression.xreplace(fixed | renamed), size) for expression, size in equal]
    for symbol, size in renamed.items():
        if symbol in limits:  # torch.export assumes at least 2 for every dynamic size
            conditions += [size >= limits[symbol].lower] if limits[symbol].lower > 2 else []
            conditions += [size <= limits[symbol].upper] if limits[symbol].upper < _UNBOUNDED else []
    conditions += [expression.xreplace(fixed | renamed) for expression in iter_assertions(program)]
    allowed = set(symbols.values())
    return [condition for condition in conditions if condition.free_symbols and condition.free_symbols <= allowed]


def _dynamic_sizes(program: ExportedProgram, signature: Signature) -> Iterator[tuple[str, Any]]:
    """Yields the name of each dynamic size of the inputs, with the size in a trace."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    arguments = {argument: placeholders[name].meta["val"] for name, argument in tensor_inputs(program).items()}
    for spec in signature.inputs:
        for size, traced_size in zip(spec.shape, arguments[as_argument(spec.name)].shape, strict=True):
            if isinstance(size, str):
                yield size, traced_size


def probe_paths(
    model: nn.Module,
    example: Batch,
    program: ExportedProgram,
    signature: Signature,
    suspects: Sequence[SuspectSize],
    export: Callable[[Batch], ExportedProgram],
) -> ProbeResult:
    """Runs the model, and the graph without assertions, at sizes at which an assertion fails.

    If both agree, the model is also traced there. That trace says for which sizes the model takes the same branch, so
    that these sizes need no further run. The search ends when every size at which an assertion fails is explained, or
    belongs to an assertion that stays. An assertion that only operators asked for needs a single comparison: operators
    choose by it how to compute, not what.

    Args:
        export: Traces the model with a batch.
    """
    result, traced = ProbeResult(), signature.sizes(example)
    result.removable = [suspect for suspect in suspects if suspect.is_asserted]
    if not result.removable:
        return result
    probe = _Probe(model, example, _without_assertions(program), signature, export)
    search = _Search(signature.dims, traced)
    search.add([suspect.expression for suspect in result.removable], traced)
    remaining, needless = list[SuspectSize](), list[SuspectSize]()
    while (sizes := search.next_sizes(result.removable, remaining)) is not None:
        broken = _broken_at(result.removable, sizes)
        if all(suspect.is_of_operator for suspect in broken) and probe.agrees(sizes):
            needless += broken
            result.removable = [suspect for suspect in result.removable if suspect not in broken]
            result.sizes.append(sizes)
            continue
        is_exclusion = all(suspect.is_exclusion for suspect in broken)
        conditions = None
        if len(search.variants) < _MAX_BRANCHES:
            probed = probe.run(sizes, is_exclusion=is_exclusion)
            if probed.differs:
                asserted = broken[0].expression
                names = [name for name in sorted(map(str, asserted.free_symbols)) if sizes[name] != traced[name]]
                return ProbeResult(fixed_dims=dict.fromkeys(names, str(asserted)))
            conditions = probed.conditions
        if conditions is not None:
            search.variants.append(conditions)
            search.add(conditions, sizes)
            result.sizes.append(sizes)
        else:
            remaining += broken
            result.removable = [suspect for suspect in result.removable if suspect not in broken]
    result.removable += needless
    return result


@dataclass(frozen=True)
class _ProbeOutcome:
    """The result of a run at other sizes.

    Attributes:
        differs: True if the graph without assertions gives other results than the model.
        conditions: The sizes of the branch that the model takes there; None if it could not be run or traced.
    """

    differs: bool = False
    conditions: Sequence[Any] | None = None


@dataclass(frozen=True)
class _Probe:
    """Runs and traces a model at other sizes."""

    model: nn.Module
    example: Batch
    graph: fx.GraphModule
    signature: Signature
    export: Callable[[Batch], ExportedProgram]

    def agrees(self, sizes: Mapping[str, int]) -> bool:
        """Returns True if the graph gives the results of the model at these sizes, and they are small."""
        if not is_affordable(self.example, sizes, self.signature.sizes(self.example)):
            return False
        batch = resize(self.example, self.signature, sizes)
        expected = run_or_error(self.model, batch)
        return isinstance(expected, list) and agree(run_or_error(self.graph, batch), expected)

    def run(self, sizes: Mapping[str, int], *, is_exclusion: bool) -> _ProbeOutcome:
        """Compares the graph with the model at some sizes, and traces the model there.

        Args:
            is_exclusion: Whether the failing assertions exclude single sizes. The graph is then not compared, because
                the parity check does that.
        """
        traced = self.signature.sizes(self.example)
        is_small = is_affordable(self.example, sizes, traced)
        elements = _growth(sizes, traced) * _count_elements(self.example)
        if not (is_small or (is_exclusion and elements <= MAX_TRACED_ELEMENTS)):
            return _ProbeOutcome()
        batch = resize(self.example, self.signature, sizes)
        expected = run_or_error(self.model, batch) if is_small else None
        if isinstance(expected, list) and not is_exclusion and not agree(run_or_error(self.graph, batch), expected):
            return _ProbeOutcome(differs=True)
        # Assertions stay if the model itself fails there, or if its results are random.
        if expected is None or (isinstance(expected, list) and _is_repeatable(self.model, batch, expected)):
            with contextlib.suppress(TraceError):
                return _ProbeOutcome(conditions=_conditions(self.export(batch), self.signature))
        return _ProbeOutcome()


def drop_needless_assertions(
    program: ExportedProgram, graph_module: fx.GraphModule, signature: Signature, example: Batch
) -> None:
    """Removes assertions of a graph's second export that do not change the results.

    A graph of operators has no branches. Its export still assumes, for example, that one computed size is smaller than
    another, to decide on shapes. Assertions that the graph itself contains stay: the graph fails at such sizes.
    """
    names = {
        traced_size.node.expr: size
        for size, traced_size in _dynamic_sizes(program, signature)
        if isinstance(traced_size, torch.SymInt)
    }
    traced = signature.sizes(example)
    suspects = [
        suspect for suspect in find_suspect_sizes(program, names, signature.dims, traced) if suspect.is_asserted
    ]
    if not suspects:
        return
    unasserted = _without_assertions(program)

    def is_same(sizes: dict[str, int]) -> bool:
        if not is_affordable(example, sizes, traced):
            return False
        batch = resize(example, signature, sizes)
        expected = run_or_error(graph_module, batch)
        return isinstance(expected, list) and agree(run_or_error(unasserted, batch), expected, _REPEAT_TOLERANCE)

    drop_assertions(program, names, signature.dims, [d for d in suspects if all(is_same(sizes) for sizes in d.sizes)])


def _growth(sizes: Mapping[str, int], traced: Mapping[str, int]) -> float:
    return math.prod(max(size / traced[name], 1) for name, size in sizes.items())


def is_affordable(example: Batch, sizes: Mapping[str, int], traced: Mapping[str, int]) -> bool:
    """Returns True if a batch of these sizes is small enough to run the model on it only to find out how it behaves."""
    return _growth(sizes, traced) <= max(_MAX_GROWTH, _MAX_ELEMENTS / max(1, _count_elements(example)))


def _count_elements(example: Batch) -> int:
    return sum(tensor.numel() for tensor in example.values())


def _without_assertions(program: ExportedProgram) -> fx.GraphModule:
    graph_module = unlift(program)
    for node in assertions(graph_module.graph):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _is_repeatable(model: nn.Module, batch: Batch, first: list[torch.Tensor]) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        return agree(run_or_error(model, batch), first, _REPEAT_TOLERANCE)


def agree(actual: list[torch.Tensor] | Exception, expected: list[torch.Tensor], tolerance: float = _TOLERANCE) -> bool:
    """Returns True if a run gave the expected outputs up to the rounding of deep networks."""

    def is_close(one: torch.Tensor, two: torch.Tensor) -> bool:
        kinds = [(tensor.dtype, tensor.layout, tensor.shape) for tensor in (one, two)]
        return kinds[0] == kinds[1] and torch.allclose(
            one.double(), two.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )

    return not isinstance(actual, Exception) and len(actual) == len(expected) and all(map(is_close, actual, expected))


class _Search:
    """Sizes that are still to be tried, and the conditions of the branches that were traced."""

    def __init__(self, dims: Mapping[str, Dim], traced: Mapping[str, int]) -> None:
        self.variants: list[Sequence[Any]] = []
        self._dims = dims
        self._traced = traced
        self._seen: set[tuple[int, ...]] = set()
        self._conditions: set[Any] = set()
        self._open: list[dict[str, int]] = []

    def add(self, conditions: Sequence[Any], around: Mapping[str, int]) -> None:
        """Adds sizes near the traced sizes at which conditions may change."""
        for condition in dict.fromkeys(condition for condition in conditions if condition not in self._conditions):
            self._conditions.add(condition)
            names = sorted(symbol.name for symbol in condition.free_symbols)
            for sizes in candidates(condition, names, self._dims, around):
                all_sizes = {**around, **sizes}
                if (key := tuple(all_sizes.values())) not in self._seen:
                    self._seen.add(key)
                    self._open.append(all_sizes)

    def next_sizes(self, suspects: Sequence[SuspectSize], remaining: Sequence[SuspectSize]) -> dict[str, int] | None:
        """Returns sizes that break an assertion on no traced branch; None if there are none left.

        Args:
            suspects: The assertions to check; at each call a subset of those at the call before.
            remaining: Assertions that stay in the graph. Sizes at which these fail are skipped.
        """
        self._open = [
            sizes
            for sizes in self._open
            if _broken_at(suspects, sizes)
            and not _broken_at(remaining, sizes)
            and all(any(is_broken_at(condition, sizes) for condition in branch) for branch in self.variants)
        ]

        def rank(sizes: Mapping[str, int]) -> tuple[int, int, int]:
            # Prefer sizes that break a single assertion by a single dimension, since the cause is clear then, and
            # sizes near the traced ones, since models run there.
            steps = [abs(size - self._traced[name]) for name, size in sizes.items()]
            return len(_broken_at(suspects, sizes)), sum(map(bool, steps)), sum(steps)

        return min(self._open, key=rank, default=None)


def _broken_at(suspects: Sequence[SuspectSize], sizes: Mapping[str, int]) -> list[SuspectSize]:
    """Returns the assertions that fail at some sizes."""
    return [suspect for suspect in suspects if is_broken_at(suspect.expression, sizes)]
