"""Merges the ways through a model's branches on values, which were traced one after the other.

Both ways call the same operators before a branch and again after it. ``where(c, f(a), f(b))`` equals ``f(where(c, a,
b))`` to the bit, so that only the operators that differ remain twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.utils import _pytree as pytree

from optexport.tracing.fallbacks.branch_guards import guard_ways
from optexport.tracing.fallbacks.value_branches import COPY, SELECT, different_shapes_error, state_error
from optexport.tracing.value_checks import eliminate_dead_code
from optexport.transformations.analysis import effects

# The line of a branch, in the meta data "custom" of the node that chooses.
BRANCH = "optexport_branch"

aten = torch.ops.aten
_Pair = tuple[fx.Node, fx.Node]


def merge_ways(program: ExportedProgram) -> ExportedProgram:
    """Merges the ways of a program that `optexport.tracing.fallbacks.value_branches.calling_all_ways` traced.

    Raises:
        TraceError: The program writes to its buffers, or the ways give results of other shapes.
    """
    selects = program.graph.find_nodes(op="call_function", target=SELECT)
    copies = program.graph.find_nodes(op="call_function", target=COPY)
    if len(copies) > len({node.args[0] for node in copies}) and _has_writes(program):
        program = _write_functionally(program, str(selects[0].args[3]) if selects else "a check")
    merger = _Merger(program)
    for select in program.graph.find_nodes(op="call_function", target=SELECT):
        condition, if_true, if_false, line = select.args
        with program.graph.inserting_before(select):
            merged = merger.merge(condition, (if_true, if_false), line)
        if merged is None:
            raise different_shapes_error(line, [node.meta["val"].shape for node in (if_true, if_false)])
        select.replace_all_uses_with(merged)
        program.graph.erase_node(select)
    _remove_copies(program.graph)
    eliminate_dead_code(program)
    guard_ways(program.graph, {node for node in program.graph.nodes if BRANCH in node.meta.get("custom", {})})
    outputs = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec.arg.name = node.name
    program.graph_module.recompile()
    return program


def find_branches(graph: fx.Graph) -> tuple[str, ...]:
    """Returns the lines of the branches of which a graph contains both ways."""
    custom = (node.meta.get("custom", {}) for node in graph.nodes)
    return tuple(dict.fromkeys(str(values[BRANCH]) for values in custom if BRANCH in values))


def _write_functionally(program: ExportedProgram, line: str) -> ExportedProgram:
    """Replaces writes to tensors by new tensors, so that no way changes the tensors of another.

    Raises:
        TraceError: The program writes to its state.
    """
    try:
        program = program.run_decompositions({})
        written = list(program.graph_signature.buffers_to_mutate.values())
    except RuntimeError:  # a tensor that is no buffer
        written = ["an attribute"]
    if _has_writes(program):  # statistics of a layer in training mode
        written = written or ["running statistics"]
    if written:
        raise state_error(line, written)
    return program


def _has_writes(program: ExportedProgram) -> bool:
    return any(effects.mutated_inputs(program.graph_module, node) for node in program.graph.nodes)


def _remove_copies(graph: fx.Graph) -> None:
    """Removes the copies of inputs that each way began with; no node writes to them any more."""
    for node in graph.find_nodes(op="call_function", target=COPY):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


class _Merger:
    """Merges pairs of nodes: the node of one way, and that of the other way."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph = program.graph
        self._weights: set[str] = set()
        self._constants: dict[str, torch.Tensor] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.CONSTANT_TENSOR:
                self._constants[spec.arg.name] = program.constants[str(spec.target)]
            elif spec.kind is not InputKind.USER_INPUT:
                self._weights.add(spec.arg.name)
        self._merged: dict[_Pair, fx.Node | None] = {}
        self._condition: Any = None
        self._line = ""

    def merge(self, condition: Any, pair: _Pair, line: str) -> fx.Node | None:
        """Returns the node with the value of the first node if a condition is true, else of the second.

        Returns None if there is none: the shapes differ.
        """
        self._merged, self._condition, self._line = {}, condition, line
        stack = [pair]  # graphs are too deep for recursion
        while stack:
            a, b = stack[-1]
            arguments = self._align(a, b)
            missing = [inner for inner in arguments or () if inner not in self._merged]
            if missing:
                stack += missing
            else:
                self._merged[a, b] = self._merge(a, b, arguments)
                stack.pop()
        merged = self._merged[pair]
        return self._choose(*pair, may_be_weights=True) if merged is None else merged

    def _align(self, a: fx.Node, b: fx.Node) -> list[_Pair] | None:
        """Returns the pairs of arguments of two calls of the same operator with the same constants."""
        if a is b or a.op != "call_function" or a.target is not b.target or _is_random(a):
            return None
        a_leaves, a_spec = pytree.tree_flatten((a.args, a.kwargs))
        b_leaves, b_spec = pytree.tree_flatten((b.args, b.kwargs))
        if a_spec != b_spec or not all(map(_is_same_constant, a_leaves, b_leaves)):
            return None
        return [pair for pair in zip(a_leaves, b_leaves, strict=True) if isinstance(pair[0], fx.Node)]

    def _merge(self, a: fx.Node, b: fx.Node, arguments: Sequence[_Pair] | None) -> fx.Node | None:
        if a is b or self._is_same_value(a, b):
            return a
        merged = [self._merged[pair] for pair in arguments or ()]
        if arguments is None or None in merged:
            return self._choose(a, b)
        if all(new is old for new, (old, _) in zip(merged, arguments, strict=True)):
            return a
        new_nodes = iter(merged)
        args, kwargs = fx.map_arg((a.args, a.kwargs), lambda _: next(new_nodes))
        return self._call(a.target, args, kwargs, a)

    def _is_same_value(self, a: fx.Node, b: fx.Node) -> bool:
        if a.name in self._constants and b.name in self._constants:
            first, second = self._constants[a.name], self._constants[b.name]
            return first.dtype == second.dtype and torch.equal(first, second)
        values = a.meta.get("val"), b.meta.get("val")
        return all(isinstance(value, torch.SymInt) for value in values) and statically_known_true(sym_eq(*values))

    def _choose(self, a: fx.Node, b: fx.Node, *, may_be_weights: bool = False) -> fx.Node | None:
        """Returns a choice between two results; between two weights only if asked, as layers need theirs unchanged."""
        first, second = a.meta.get("val"), b.meta.get("val")
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return None
        if ({a.name, b.name} & self._weights and not may_be_weights) or first.dtype != second.dtype:
            return None
        if not statically_known_true(sym_eq(first.shape, second.shape)):
            return None
        node = self._call(aten.where.self, (self._condition, a, b), {}, a)
        node.meta["custom"] = {**node.meta.get("custom", {}), BRANCH: self._line}
        return node

    def _call(self, target: Any, args: Any, kwargs: Any, original: fx.Node) -> fx.Node:
        node: fx.Node = self._graph.call_function(target, args, kwargs)
        node.meta = dict(original.meta)
        return node


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return type(a) is type(b) and bool(a == b)
