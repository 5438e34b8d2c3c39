"""Inlines the regions of a graph that run in another grad mode or under autocast.

``torch.export`` stores such a region as an inner graph. Rules do not look into inner graphs, and TorchScript does not
support them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default)


def inline_regions(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """Inlines, in place, every inner graph with another grad mode or autocast.

    The casts of autocast become nodes.

    Args:
        owner: The module whose submodules are the inner graphs.
    """
    autocasts: dict[fx.Node, Any] = {}  # the dtype of each node under autocast
    while regions := [node for node in graph.nodes if node.target in (_GRAD_MODE, _AUTOCAST)]:  # they may be nested
        for region in regions:
            dtype = autocasts.get(region)
            if region.target is _AUTOCAST and region.args[0] == "cpu":  # graphs are traced on the CPU
                _, dtype, enabled, *_ = region.args
                dtype = dtype if enabled else None
            autocasts.update(dict.fromkeys(_inline(graph, region, owner), dtype))
    for node, dtype in autocasts.items():
        if dtype is not None and isinstance(node.target, torch._ops.OpOverload):
            _write_casts(graph, node, partial(torch.autocast, "cpu", dtype, cache_enabled=False))


def _inline(graph: fx.Graph, region: fx.Node, owner: fx.GraphModule) -> list[fx.Node]:
    """Replaces a region by copies of its nodes, and returns the copies."""
    body_index = next(index for index, argument in enumerate(region.args) if isinstance(argument, fx.Node))
    subgraph, *arguments = region.args[body_index:]
    assert isinstance(subgraph, fx.Node)
    body: Any = owner.get_submodule(str(subgraph.target))
    placeholders = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
    with graph.inserting_before(region):
        results: Any = graph.graph_copy(body.graph, copies)
    for node in body.graph.find_nodes(op="get_attr"):
        copies[node].target = f"{subgraph.target}.{node.target}"
    for user in [*region.users]:
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(region)
    return [copied for node, copied in copies.items() if node not in placeholders]


class _CastRecorder(TorchDispatchMode):
    """Records the dtype that each tensor is cast to within a call.

    Attributes:
        dtypes: The dtype by the tensor's id.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: dict[int, torch.dtype] = {}
        self._tensors: list[torch.Tensor] = []  # keeps ids unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            self.dtypes[id(args[0])] = kwargs["dtype"]
            self._tensors.append(args[0])
        return func(*args, **(kwargs or {}))


def _write_casts(graph: fx.Graph, node: fx.Node, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Writes the casts of autocast before a call.

    A call that casts values in its middle, such as einsum, is replaced by the calls that it consists of.
    """
    target: Any = node.target
    tensors = {n: n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    if not tensors or target._schema.is_mutable or target in _CASTS:  # autocast has no policy for them
        return
    with torch.no_grad(), autocast(), _CastRecorder() as recorder:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        target(*args, **kwargs)
    casts = {n: recorder.dtypes.pop(id(value)) for n, value in tensors.items() if id(value) in recorder.dtypes}
    if recorder.dtypes:
        _decompose(graph, node, autocast)
        return
    with graph.inserting_before(node):
        for source, dtype in casts.items():
            cast = graph.call_function(aten.to.dtype, (source, dtype))
            cast.meta = {**_origin(node), "val": tensors[source].to(dtype)}
            node.replace_input_with(source, cast)


def _decompose(graph: fx.Graph, node: fx.Node, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Replaces a call by the operators and casts that it runs under autocast."""
    target: Any = node.target
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        by_source = dict(zip(sources, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), by_source.__getitem__)
        with autocast():
            return target(*args, **kwargs)

    with torch.no_grad():
        traced = make_fx(call)(*(source.meta["val"] for source in sources))
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(traced.graph, copies)
    for copied in set(copies.values()).difference(sources):
        copied.meta = {**copied.meta, **_origin(node)}
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
