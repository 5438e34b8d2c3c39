"""Rewrites an ATen graph into a form that TorchScript compiles, and that computes the same there."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph_module import _forward_from_src

from optexport.signature.signature import Signature, as_argument

aten = torch.ops.aten

# Assertions of an exported graph about its inputs. TorchScript has no schema for them; results do not depend on them.
_ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)

# Operators that read a tensor's single value. TorchScript needs the type of the number.
SCALARS = (aten.item.default, aten._local_scalar_dense.default)
_NUMBER_TYPES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

# Computations with sizes, and TorchScript's functions for them.
_SIZES: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: aten.size,
    operator.abs: builtins.abs,
    math.trunc: int,
    torch._sym_sqrt: math.sqrt,  # type: ignore[attr-defined]  # its stubs lack it
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_sum: sum,
}

# Operators of masks that take a tensor in place of a number.
_MASK_OPERATORS = (
    *("add", "mul", "where"),
    *(f"{prefix}{name}" for prefix in ("", "i", "bitwise_") for name in ("and", "or", "xor")),
)


def make_scriptable(graph_module: fx.GraphModule, signature: Signature | None = None) -> fx.GraphModule:
    """Returns the graph in a form that TorchScript compiles.

    It has no overload names and no assertions, and returns a flat tuple.

    Args:
        signature: Names the inputs; by default they keep their names.
    """
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(tuple(torch.utils._pytree.tree_leaves(output)))
    if signature is not None:
        for placeholder, spec in zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
            placeholder.target = as_argument(spec.name)
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)
    graph.eliminate_dead_code()  # before the overloads go, because only they mark in-place changes
    scriptable = fx.GraphModule(graph_module, graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        _call_branches(scriptable, node)
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            _write_promotion(graph, node)
        _replace_overload(graph, node)
    scriptable.delete_all_unused_submodules()
    scriptable.recompile()
    return scriptable


def _replace_overload(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces an overload by its packet, and a function of sizes by the function of TorchScript."""
    value = node.meta.get("val")
    if node.target in _SIZES:
        node.target = _SIZES[node.target]
    elif node.target is torch.sym_not:
        node.target, node.args = operator.eq, (node.args[0], False)
    elif node.target is round and node.args[1:] == (None,):  # returns a float in TorchScript
        with graph.inserting_before(node):
            node.args = (graph.call_function(round, node.args[:1]),)
        node.target = int
    elif node.target in SCALARS and type(value) in _NUMBER_TYPES:
        node.target = _NUMBER_TYPES[type(value)]
    elif isinstance(node.target, torch._ops.OpOverload):
        node.target = node.target.overloadpacket


def _write_promotion(graph: fx.Graph, node: fx.Node) -> None:
    """Writes type promotions of bools explicitly.

    TorchScript of torch 2.13 passes ``True`` to an operator as the number 1, and turns ``mask * 1`` and
    ``mask + 0`` into ``mask``. A mask would become whole numbers, or whole numbers a mask.
    """
    result, target = node.meta.get("val"), node.target
    assert isinstance(target, torch._ops.OpOverload)
    if not isinstance(result, torch.Tensor):
        return
    if target is aten.full.default:
        node.update_kwarg("dtype", result.dtype)
    masks = [n for n in node.all_input_nodes if _is_mask(n.meta.get("val"))]
    for index, argument in enumerate(node.args):
        is_symbol = isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.SymBool)
        if not isinstance(argument, bool) and not is_symbol:
            continue
        if result.dtype is torch.bool and target.overloadpacket.__name__.strip("_") in _MASK_OPERATORS:
            with graph.inserting_before(node):
                scalar = graph.call_function(aten.scalar_tensor, (argument,), {"dtype": torch.bool})
            node.update_arg(index, scalar)
        elif str(target._schema.arguments[index].type) in ("Tensor", "number") and not is_symbol:
            node.update_arg(index, int(bool(argument)))
    if target.overloadpacket in (aten.add, aten.mul) and result.dtype is not torch.bool:
        with graph.inserting_before(node):
            for mask in masks:
                node.replace_input_with(mask, graph.call_function(aten.to, (mask, result.dtype)))


def _is_mask(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _call_branches(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Replaces ``torch.cond`` by a module with an if statement."""
    condition, *branches, operands = node.args
    assert isinstance(operands, list | tuple)
    types = [_NUMBER_TYPES.get(type(n.meta.get("val")), torch.Tensor) for n in (condition, *operands)]
    names = [f"x{index}" for index in range(len(operands))]
    parameters = [f"{name}: {_annotation(kind)}" for name, kind in zip(("condition", *names), types, strict=True)]
    call = f"({', '.join(names)})"
    source = (
        f"def forward(self, {', '.join(parameters)}):\n"
        f"    if bool(condition):\n        result = self.true{call}\n"
        f"    else:\n        result = self.false{call}\n"
        "    return result\n"
    )
    module = type("Branch", (nn.Module,), {"forward": _forward_from_src(source, {"torch": torch})})()
    calls = [branch for branch in branches if isinstance(branch, fx.Node)]
    for name, branch in zip(("true", "false"), calls, strict=True):
        region = graph_module.get_submodule(str(branch.target))
        assert isinstance(region, fx.GraphModule)
        inner = make_scriptable(region)
        for placeholder, kind in zip(inner.graph.find_nodes(op="placeholder"), types[1:], strict=True):
            placeholder.type = kind
        inner.recompile()
        module.add_module(name, inner)
    target = f"branch_{node.name}"
    graph_module.add_submodule(target, module)
    node.op, node.target, node.args = "call_module", target, (condition, *operands)
    for branch in calls:
        if not branch.users:
            graph_module.graph.erase_node(branch)


def _annotation(kind: type) -> str:
    return "torch.Tensor" if kind is torch.Tensor else kind.__name__
