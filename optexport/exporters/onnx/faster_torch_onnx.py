"""Saves time in ``torch.onnx.export``, without a change to what it writes.

Only this file patches the internals of ``torch.onnx``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _decomp, _fx_passes, _registration

aten = torch.ops.aten


@contextlib.contextmanager
def reusing_torchlib() -> Iterator[None]:
    """Reuses the torchlib table of an earlier export in this process.

    torch 2.13 parses the sources of 550 torchlib functions for every export, a quarter of the time of a small one.
    """
    registry = _registration.ONNXRegistry
    original = vars(registry)["from_torchlib"]
    registry.from_torchlib = staticmethod(_copy_of_torchlib)  # type: ignore[method-assign]
    try:
        yield
    finally:
        registry.from_torchlib = original  # type: ignore[method-assign]


def _copy_of_torchlib(*args: Any, **kwargs: Any) -> _registration.ONNXRegistry:
    """Returns a copy, because an export adds its own translations to the table."""
    table = _read_torchlib(*args, **kwargs)
    copied = copy.copy(table)
    copied.functions = {target: [*translations] for target, translations in table.functions.items()}
    return copied


# The original method, bound here before any patch; its argument is the opset.
_read_torchlib = functools.cache(_registration.ONNXRegistry.from_torchlib)


@contextlib.contextmanager
def skipping_needless_decomposition() -> Iterator[None]:
    """Skips the decomposition of a graph that ONNX can express as it is.

    ``torch.onnx`` traces every graph a second time to decompose it, which takes a third of the time of a small export.
    """
    original = _fx_passes.decompose_with_registry

    def decompose(exported_program: ExportedProgram, registry: _registration.ONNXRegistry) -> ExportedProgram:
        graph_module = exported_program.graph_module
        expressible = {*_decomp.get_onnx_implemented_overloads(registry), *_CONVERSIONS, *_SYNONYMS}
        if not all(_is_kept(node, expressible) for node in graph_module.graph.nodes):
            return original(exported_program, registry)
        for node in list(graph_module.graph.nodes):
            if node.target in _CONVERSIONS or (node.target in _RESHAPES and _keeps_shape(node)):
                _replace_conversion(node)
            node.target = _SYNONYMS.get(node.target, node.target)
        graph_module.recompile()
        return exported_program

    _fx_passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = original


def _is_kept(node: fx.Node, expressible: set[Any]) -> bool:
    """Returns True if a node needs no decomposition.

    Args:
        expressible: Operators with a translation, or with a replacement here.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if "val" not in node.meta:  # torch.export has inserted it, to detach a constant
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")  # of sizes
    return target in expressible and not target._schema.is_mutable


# Operators that return their input, or a copy with another dtype.
_CONVERSIONS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.contiguous.default}
_RESHAPES = {aten.reshape.default, aten.view.default}
# Python's operators, and their translated synonyms.
_SYNONYMS: dict[Any, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
}


def _keeps_shape(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    # As text, because comparing symbolic sizes may add a guard.
    return str(source.meta["val"].shape) == str(node.meta["val"].shape)


def _replace_conversion(node: fx.Node) -> None:
    """Replaces a conversion by a copy with another dtype, or removes it."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dtype = node.meta["val"].dtype
    if source.meta["val"].dtype != dtype:
        node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
    elif any(user.op == "output" for user in node.users):  # an output must not be an input
        node.target, node.args, node.kwargs = aten.clone.default, (source,), {}
    else:
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
