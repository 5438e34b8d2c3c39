"""Reconstructs the modules and Python operators of a model from a graph of ATen calls.

``torch.export`` writes ``aten.linear.default(x, weight, bias)``. Here it becomes a ``call_module`` node on an
``nn.Linear`` with the qualified name of the original module, which shares its parameters. ``aten.add.Tensor`` becomes
``operator.add``. The same operators run on the same tensors, so results are bit-exact.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport._utils import aten_ops
from optexport.errors import TraceError
from optexport.signature.exported_program import take_tensors
from optexport.tracing.patches.gradient_switches import inline_switches

aten = torch.ops.aten

_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
}


@dataclass(frozen=True)
class _Call:
    """An ATen call with its arguments by name, including the schema's defaults."""

    node: fx.Node
    arguments: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        return cls(node, aten_ops.arguments(node))


# Builds a module on the meta device, without its tensors, from the arguments of a call.
_Builder = Callable[[dict[str, Any], dict[str, torch.Tensor | None]], nn.Module | None]


def _linear(_: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
    weight, bias = tensors["weight"], tensors["bias"]
    assert weight is not None
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")


def _conv(cls: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]) -> _Builder:
    def build(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
        weight, bias = tensors["weight"], tensors["bias"]
        assert weight is not None
        rank = weight.dim() - 2
        groups = values["groups"]

        def per_axis(value: Any) -> Any:
            if isinstance(value, str):
                return value
            return tuple(value) * rank if len(value) == 1 else tuple(value)

        return cls(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),  # type: ignore[arg-type]
            stride=per_axis(values["stride"]),
            padding=per_axis(values["padding"]),
            dilation=per_axis(values["dilation"]),
            groups=groups,
            bias=bias is not None,
            device="meta",
        )

    return build


def _conv_transpose(cls: type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d]) -> _Builder:
    def build(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
        weight, bias = tensors["weight"], tensors["bias"]
        assert weight is not None
        rank = weight.dim() - 2
        sizes = {
            name: tuple(values[name]) * (rank if len(values[name]) == 1 else 1)
            for name in ("stride", "padding", "output_padding", "dilation")
        }
        return cls(
            weight.shape[0],
            weight.shape[1] * values["groups"],
            tuple(weight.shape[2:]),  # type: ignore[arg-type]
            groups=values["groups"],
            bias=bias is not None,
            device="meta",
            **sizes,  # type: ignore[arg-type]
        )

    return build


def _batch_norm(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    mean, weight, bias = tensors["running_mean"], tensors["weight"], tensors["bias"]
    value = values["input"].meta.get("val")
    if mean is None or values["training"] or value is None or (weight is None) != (bias is None):
        return None
    classes = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    if value.dim() not in classes:
        return None
    norm = classes[value.dim()](
        mean.shape[0], values["eps"], values["momentum"], affine=weight is not None, device="meta"
    )
    # The graph does not read the counter, which would only add an unused buffer to the state_dict.
    norm.num_batches_tracked = None
    return norm


def _layer_norm(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    weight, bias = tensors["weight"], tensors["bias"]
    if weight is None and bias is not None:
        return None
    return nn.LayerNorm(
        list(values["normalized_shape"]),
        values["eps"],
        elementwise_affine=weight is not None,
        bias=bias is not None,
        device="meta",
    )


def _embedding(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    weight = tensors["weight"]
    if weight is None or values["scale_grad_by_freq"] or values["sparse"]:
        return None
    padding = values["padding_idx"]
    return nn.Embedding(
        weight.shape[0],
        weight.shape[1],
        padding_idx=None if padding < 0 else padding,
        device="meta",
    )


@dataclass(frozen=True)
class _Kind:
    """Describes the module class that replaces calls of one ATen operator.

    Attributes:
        module: The class, or classes, of modules that make such calls.
        build: Builds the module.
        tensors: The operator's arguments that become parameters and buffers.
        input: The operator's argument that becomes the module's input.
    """

    module: type[nn.Module] | tuple[type[nn.Module], ...]
    build: _Builder
    tensors: tuple[str, ...] = ("weight", "bias")
    input: str = "input"


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KINDS: dict[Any, _Kind] = {
    aten.linear.default: _Kind(nn.Linear, _linear),
    aten.conv1d.default: _Kind(nn.Conv1d, _conv(nn.Conv1d)),
    aten.conv1d.padding: _Kind(nn.Conv1d, _conv(nn.Conv1d)),
    aten.conv2d.default: _Kind(nn.Conv2d, _conv(nn.Conv2d)),
    aten.conv2d.padding: _Kind(nn.Conv2d, _conv(nn.Conv2d)),
    aten.conv3d.default: _Kind(nn.Conv3d, _conv(nn.Conv3d)),
    aten.conv3d.padding: _Kind(nn.Conv3d, _conv(nn.Conv3d)),
    aten.conv_transpose1d.default: _Kind(nn.ConvTranspose1d, _conv_transpose(nn.ConvTranspose1d)),
    aten.conv_transpose2d.input: _Kind(nn.ConvTranspose2d, _conv_transpose(nn.ConvTranspose2d)),
    aten.conv_transpose3d.input: _Kind(nn.ConvTranspose3d, _conv_transpose(nn.ConvTranspose3d)),
    aten.batch_norm.default: _Kind(_BATCH_NORMS, _batch_norm, ("weight", "bias", "running_mean", "running_var")),
    aten.layer_norm.default: _Kind(nn.LayerNorm, _layer_norm),
    aten.embedding.default: _Kind(nn.Embedding, _embedding, ("weight",), input="indices"),
}


def unlift(program: ExportedProgram) -> fx.GraphModule:
    """Returns a program as a GraphModule that takes every tensor by name.

    Raises:
        TraceError: A module's name is a Python keyword.
    """
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:  # torch.export accepts a module named like a keyword and writes it unquoted
        raise TraceError(
            "the name of one of its modules cannot stand in the code of a graph",
            location=(error.text or "").strip() or None,
            hint="Rename modules and parameters that are named like Python keywords, and export again.",
        ) from error
    assert isinstance(module, fx.GraphModule)
    # A new GraphModule does not have the hook that checks how inputs are passed.
    graph_module = fx.GraphModule(module, module.graph).eval()
    take_tensors(graph_module, program)
    return graph_module


def reconstruct_modules(program: ExportedProgram) -> fx.GraphModule:
    """Reconstructs the modules of a program, which share its parameters."""
    graph_module = unlift(program)
    graph = _copy_graph(graph_module)
    _erase_unused_attributes(graph)
    attributes = {n.target: _attribute(graph_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    root: dict[str, Any] = {**attributes, **_call_modules(graph, attributes)}
    _call_operators(graph)
    if torch.get_default_dtype() is not torch.float32:
        _write_dtypes(graph)
    for node in [n for n in graph.nodes if n.target is aten._assert_tensor_metadata.default]:
        graph.erase_node(node)  # asserts the traced dtypes; TorchScript does not have this operator
    _erase_unused_attributes(graph)
    targets = {n.target for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return _assemble({name: value for name, value in root.items() if name in targets}, graph, program)


def _copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(output)
    graph.set_codegen(graph_module.graph._codegen)
    inline_switches(graph, graph_module)
    for node in graph.nodes:  # graph_copy shares the meta dictionaries
        node.meta = dict(node.meta)
    return graph


def _erase_unused_attributes(graph: fx.Graph) -> None:
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)


def _call_modules(graph: fx.Graph, attributes: dict[str, Any]) -> dict[str, nn.Module]:
    """Replaces, in place, ATen calls by calls of modules; returns the modules by path."""
    modules: dict[str, nn.Module] = {}
    candidates = _candidates(graph.nodes)
    for path, (kind, calls) in candidates.items():
        own = {f"{path}.{name}" for name in kind.tensors}
        if any(name.startswith(f"{path}.") and name not in own for name in (*attributes, *candidates)):
            continue  # the module, a subclass, has other tensors or modules, which nn.Linear has no place for
        module = _build(kind, calls, attributes)
        if module is None:
            continue
        modules[path] = module
        for call in calls:
            call.node.op, call.node.target = "call_module", path
            call.node.args, call.node.kwargs = (call.arguments[kind.input],), {}
    return modules


def _call_operators(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _OPERATORS and len(node.args) == 2 and not node.kwargs:
            node.target = _OPERATORS[node.target]


def _write_dtypes(graph: fx.Graph) -> None:
    """Writes the dtype into calls that create tensors, as the default dtype is not float32."""
    for node in graph.nodes:
        has_input = any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
        if not has_input and isinstance(node.target, torch._ops.OpOverload):
            arguments = aten_ops.arguments(node)
            if "dtype" in arguments and arguments["dtype"] is None:
                node.update_kwarg("dtype", node.meta["val"].dtype)


def _attribute(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _candidates(nodes: Iterable[fx.Node]) -> dict[str, tuple[_Kind, list[_Call]]]:
    """Returns the calls that may become module calls, by the path of their module."""
    calls_by_path: dict[str, list[_Call]] = defaultdict(list)
    for node in nodes:
        kind = _KINDS.get(node.target) if node.op == "call_function" else None
        path = _owner(node, kind.module) if kind else None
        if path:
            calls_by_path[path].append(_Call.of(node))
    return {
        path: (_KINDS[calls[0].node.target], calls)
        for path, calls in calls_by_path.items()
        if len({call.node.target for call in calls}) == 1
    }


def _owner(node: fx.Node, module_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
    """Returns the path of the innermost module of a call, if it has the expected type.

    The weight's name does not identify the module: a tied weight has the name of only one of its owners.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return None
    path, type_name = stack[-1]
    if not isinstance(type_name, str):
        cls = type_name
    else:
        module_name, _, class_name = type_name.rpartition(".")
        cls = getattr(sys.modules.get(module_name), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, module_type)):
        return None
    # Repeated calls of a module are named "path@1", "path@2", ...; saved programs have "L['self']." before the path.
    path = re.sub(r"@\d+", "", path).removeprefix("L['self'].")
    return path or None


def _build(kind: _Kind, calls: list[_Call], attributes: dict[str, Any]) -> nn.Module | None:
    """Builds the module for the calls of a path; None if calls differ or compute weights."""
    first = calls[0].arguments
    constants = {k: v for k, v in first.items() if k != kind.input and k not in kind.tensors}
    if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(constants)):
        return None  # an argument is computed at run time
    for call in calls:
        if any(call.arguments[name] != value for name, value in constants.items()):
            return None
    tensors: dict[str, torch.Tensor | None] = {}
    for name in kind.tensors:
        sources = {call.arguments[name].target if isinstance(call.arguments[name], fx.Node) else None for call in calls}
        reads = [call.arguments[name] for call in calls if call.arguments[name] is not None]
        if len(sources) != 1 or any(not isinstance(node, fx.Node) or node.op != "get_attr" for node in reads):
            return None
        tensors[name] = attributes[reads[0].target] if reads else None
    module = kind.build({**first, **constants}, tensors)
    if module is None:
        return None
    for name, tensor in tensors.items():
        if name in module._buffers:
            module._buffers[name] = tensor
        elif tensor is not None and not isinstance(tensor, nn.Parameter):
            return None  # the weight is a buffer, but nn.Linear and similar modules need parameters
        else:
            module._parameters[name] = tensor
    return module.eval()


def _assemble(root: dict[str, Any], graph: fx.Graph, program: ExportedProgram) -> fx.GraphModule:
    """Returns a GraphModule whose state_dict has the original model's keys and order."""
    rank: dict[str, int] = {}
    for position, key in enumerate(program.state_dict):
        while key:  # a module has the position of its first tensor
            rank.setdefault(key, position)
            key = key.rpartition(".")[0]
    # Filled here: GraphModule(module, graph) would lose the order of modules and which buffers are persistent.
    graph_module = fx.GraphModule({}, fx.Graph())
    for target, value in sorted(root.items(), key=lambda item: rank.get(item[0], len(rank))):
        path, _, name = target.rpartition(".")
        parent: nn.Module = graph_module
        for part in path.split(".") if path else []:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            parent.register_buffer(name, value, persistent=target in program.state_dict)
        else:
            setattr(parent, name, value)
    graph_module.graph = graph
    return graph_module.eval()
