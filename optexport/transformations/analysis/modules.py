"""Reads and replaces the modules of a graph without changing shared ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_M = TypeVar("_M", bound=nn.Module)


def called_module(graph_module: GraphModule, node: object) -> nn.Module | None:
    """Returns the module that a ``call_module`` node calls, or None for other values."""
    if not isinstance(node, Node) or node.op != "call_module":
        return None
    return graph_module.get_submodule(str(node.target))


def sole_input(node: Node) -> Node | None:
    """Returns the only argument of a module call, by position or as ``input=``.

    None for any other call.
    """
    arguments = [*node.args, *node.kwargs.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], Node) or set(node.kwargs) - {"input"}:
        return None
    return arguments[0]


def call_on(node: Node, x: Node, *, keyword: bool) -> None:
    """Sets the only argument of a module call, by position or as ``input=``."""
    if keyword:
        node.args, node.kwargs = (), {"input": x}
    else:
        node.args, node.kwargs = (x,), {}


def dims(node: Node) -> int | None:
    """Returns the number of dimensions of a node's result, or None if unknown."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None


def is_fixed(size: int | torch.SymInt) -> bool:
    """Returns True if a size is one number.

    A size that the model specializes on is still a symbol.
    """
    if not isinstance(size, torch.SymInt):
        return True
    return bool(size.node.has_hint()) and statically_known_true(size == size.node.hint)


def copy_meta(source: Node, node: Node, value: Node, width: Any) -> None:
    """Sets the meta of a new node.

    Args:
        source: Node that its module stack and stack trace come from.
        node: The new node.
        value: Node with a result of the same dtype and shape, except for the last axis.
        width: Size of the last axis.
    """
    node.meta = {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}
    if isinstance(like := value.meta.get("val"), torch.Tensor):
        node.meta["val"] = like.new_empty((*like.shape[:-1], width))


def parent_of(graph_module: GraphModule, target: str) -> tuple[nn.Module, str]:
    """Returns the module that contains a target, safe to change, and the target's name in it.

    A GraphModule shares its leaf modules with the model that it was traced from. A container on the path may be such a
    leaf, or lie in one. So a shallow copy replaces each container on the path, except a bare ``nn.Module`` that
    ``torch.fx`` created and that lies in no leaf.
    """
    *path, name = target.split(".")
    parent, shared = cast(nn.Module, graph_module), False
    for part in path:
        child = parent.get_submodule(part)
        if type(child) is not nn.Module or shared:
            shared = True
            child = copy.copy(child)
            child._modules = dict(child._modules)
            parent._modules[part] = child
        parent = child
    return parent, name


def replace_module(graph_module: GraphModule, target: str, module: nn.Module) -> None:
    """Replaces a module and keeps the order of its parent's modules."""
    parent, name = parent_of(graph_module, target)
    parent._modules[name] = module


def remove_module(graph_module: GraphModule, target: str) -> None:
    """Removes a module that no node calls any more."""
    parent, name = parent_of(graph_module, target)
    del parent._modules[name]


def children_order(graph_module: GraphModule, target: str) -> list[str]:
    """Returns the module names in a target's parent, in order, for `reorder_children`."""
    return list(parent_of(graph_module, target)[0]._modules)


def reorder_children(graph_module: GraphModule, target: str, order: list[str]) -> None:
    """Restores the order of the modules in a target's parent. Other modules follow."""
    parent, _ = parent_of(graph_module, target)
    rank = {name: position for position, name in enumerate(order)}
    parent._modules = dict(sorted(parent._modules.items(), key=lambda item: rank.get(item[0], len(rank))))


def like(module: nn.Module, cls: type[nn.Module], *arguments: Any, bias: bool) -> Any:
    """Creates a module on the meta device, in the mode of another, without random numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns if there is nothing to initialize
        new = cls(*arguments, bias=bias, device="meta")
    return new.train(module.training)


def with_parameters(module: _M, **parameters: torch.Tensor | None) -> _M:
    """Copies a module with other parameters. Everything else is shared with the original.

    Hooks or buffers that are added to the copy are not added to the original.
    """
    new = copy.copy(module)
    for name in vars(nn.Module()):
        vars(new)[name] = copy.copy(vars(new)[name])
    assert parameters.keys() <= new._parameters.keys()
    new._parameters.update(cast(dict[str, Any], parameters))
    return new


def operator_name(node: Node) -> str:
    """Returns the name of a method, function or ATen operator, for example ``view``.

    For functions that are neither PyTorch's nor Python's own, the name includes the module or namespace:
    ``mylib::mul``. For modules and attributes it starts with the opcode.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    if isinstance(node.target, str):
        return node.target if node.op == "call_method" else f"{node.op} {node.target}"
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", None)
    return name if _is_builtin(node.target) else f"{module}.{name}"


def _is_builtin(function: Any) -> bool:
    """Returns True if a function is PyTorch's or Python's own."""
    module = getattr(function, "__module__", None) or "torch"
    is_custom_operator = module.startswith("torch._ops.") and module != "torch._ops.aten"
    return module.partition(".")[0] in ("torch", "_operator", "builtins", "math") and not is_custom_operator


def has_hooks(module: nn.Module) -> bool:
    """Returns True if calling a module runs hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def is_foreign(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node calls code that is neither PyTorch's nor Python's own.

    Custom operators are not foreign, because their schema describes them. A method that tensors do not have belongs to
    another object that the caller passes, for example ``list.append``, so it is foreign.
    """
    if node.op == "call_module":
        return _runs_foreign_code(graph_module.get_submodule(str(node.target)))
    if node.op == "call_method":
        return not hasattr(torch.Tensor, str(node.target)) and not hasattr(torch.Size, str(node.target))
    has_schema = isinstance(node.target, torch._ops.OpOverload)
    return node.op == "call_function" and not has_schema and not _is_builtin(node.target)


def _runs_foreign_code(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or has_hooks(module) or "forward" in vars(module):
        return True
    if isinstance(module, GraphModule):
        return any(is_foreign(module, node) for node in module.graph.nodes)
    is_torch = type(module).forward.__module__.partition(".")[0] == "torch"
    return not is_torch or any(map(_runs_foreign_code, module.children()))


def graphs_within(graph_module: GraphModule, node: Node) -> list[GraphModule]:
    """Returns the graphs in a called module, or in the arguments of a higher-order operator."""
    if node.op == "call_module":
        candidates = list(graph_module.get_submodule(str(node.target)).modules())
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
        by_name = dict(graph_module.named_modules(remove_duplicate=False))
        candidates = [by_name[name] for name in names if name in by_name]
    else:
        candidates = []
    return [module for module in candidates if isinstance(module, GraphModule)]


# Methods, functions, operators and attributes that describe a tensor without reading its numbers.
_MEASURES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("__len__", "len", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset"),
)
_ATTRIBUTES = ("shape", "ndim", "dtype", "device")


def measures(node: Node) -> bool:
    """Returns True if a node returns a size or another property without reading numbers."""
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    return node.op in ("call_method", "call_function") and operator_name(node) in _MEASURES
