"""Raises a graph of ATen calls to the modules and operators that people write transformations for.

``torch.export`` gives ``aten.linear.default(x, weight, bias)``. Here that becomes a ``call_module`` node on a real
``nn.Linear`` under its own qualified name (sharing the parameters, no copy), and ``aten.add.Tensor`` becomes
``operator.add``. What is raised computes the same operator on the same tensors, so the graph agrees to the bit.
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
    """One ATen call with its arguments by name, defaults filled in from the operator's schema."""

    node: fx.Node
    arguments: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        return cls(node, aten_ops.arguments(node))


# What a builder makes lies nowhere and has yet to be given its tensors, whatever their dtype.
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
    # The graph reads no counter; a buffer that nothing reads would only appear in the state_dict.
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
    """How calls of one ATen operator become calls of one module class."""

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
    """A program as a module that takes every tensor by name, whichever way it was exported with."""
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:  # a module that is called as a keyword: torch exports it, and writes it bare
        raise TraceError(
            "one of its modules has a name that the code of a graph cannot hold",
            location=(error.text or "").strip() or None,
            hint="Name modules and parameters by no keyword, and export it again.",
        ) from error
    assert isinstance(module, fx.GraphModule)
    # A new GraphModule leaves behind the hook that insists on the way that inputs were given.
    graph_module = fx.GraphModule(module, module.graph).eval()
    take_tensors(graph_module, program)
    return graph_module


def reconstruct_modules(program: ExportedProgram) -> fx.GraphModule:
    """Raises a program to a GraphModule over the same parameters; calls that cannot be raised stay ATen calls."""
    graph_module = unlift(program)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, copies)
    graph.output(output)
    graph.set_codegen(graph_module.graph._codegen)
    inline_switches(graph, graph_module)
    for node in graph.nodes:  # the copy shares meta dictionaries with its source
        node.meta = dict(node.meta)

    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    attributes = {n.target: _attribute(graph_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    root: dict[str, Any] = dict(attributes)
    candidates = _candidates(graph.nodes)
    for path, (kind, calls) in candidates.items():
        own = {f"{path}.{name}" for name in kind.tensors}
        inside = [other for other in (*attributes, *candidates) if other.startswith(f"{path}.") and other not in own]
        module = None if inside else _build(kind, calls, attributes)
        if module is None:  # a subclass with more in it than its layer has no room there, among others
            continue
        root[path] = module
        for call in calls:
            call.node.op, call.node.target = "call_module", path
            call.node.args, call.node.kwargs = (call.arguments[kind.input],), {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _OPERATORS and len(node.args) == 2 and not node.kwargs:
            node.target = _OPERATORS[node.target]
    if torch.get_default_dtype() is not torch.float32:
        _write_dtypes(graph)
    for node in [n for n in graph.nodes if n.target is aten._assert_tensor_metadata.default]:
        graph.erase_node(node)  # says which dtypes were traced; TorchScript cannot hold it
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    read = {n.target for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return _assemble({name: value for name, value in root.items() if name in read}, graph, program)


def _write_dtypes(graph: fx.Graph) -> None:
    """Has what makes a tensor out of none name its dtype: the model's code set another default than files run by."""
    for node in graph.nodes:
        is_made = not any(isinstance(given.meta.get("val"), torch.Tensor) for given in node.all_input_nodes)
        if is_made and isinstance(node.target, torch._ops.OpOverload):
            named = aten_ops.arguments(node)
            if "dtype" in named and named["dtype"] is None:
                node.update_kwarg("dtype", node.meta["val"].dtype)


def _attribute(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _candidates(nodes: Iterable[fx.Node]) -> dict[str, tuple[_Kind, list[_Call]]]:
    """The calls that may be raised, by the path of the module that made them."""
    found: dict[str, list[_Call]] = defaultdict(list)
    for node in nodes:
        kind = _KINDS.get(node.target) if node.op == "call_function" else None
        path = _owner(node, kind.module) if kind else None
        if path:
            found[path].append(_Call.of(node))
    return {
        path: (_KINDS[calls[0].node.target], calls)
        for path, calls in found.items()
        if len({call.node.target for call in calls}) == 1
    }


def _owner(node: fx.Node, module_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
    """The path of the innermost module that made the call, if it is of the type that such calls come from.

    The weight's own name would not do: a tied weight bears the name of only one of its owners.
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
    # A module called more than once appears as "path@1", "path@2", ... and, in saved programs, with its attribute path.
    path = re.sub(r"@\d+", "", path).removeprefix("L['self'].")
    return path or None


def _build(kind: _Kind, calls: list[_Call], attributes: dict[str, Any]) -> nn.Module | None:
    """One module that stands for all the calls, or None where they differ or read computed weights."""
    first = calls[0].arguments
    constants = {k: v for k, v in first.items() if k != kind.input and k not in kind.tensors}
    if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(constants)):
        return None  # a size that is only known when it runs
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
            return None  # a buffer used as a weight: nn.Linear and its kin hold parameters
        else:
            module._parameters[name] = tensor
    return module.eval()


def _assemble(root: dict[str, Any], graph: fx.Graph, program: ExportedProgram) -> fx.GraphModule:
    """A GraphModule whose state_dict keeps what the original model's would hold, and its order."""
    rank: dict[str, int] = {}
    for position, key in enumerate(program.state_dict):
        while key:  # a module comes where the first of its tensors does
            rank.setdefault(key, position)
            key = key.rpartition(".")[0]
    # Filled in place, since a GraphModule made of another module takes neither its order nor what is not persistent.
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
