"""Looking at, and replacing, the modules that a graph calls, without touching any that others hold too."""

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
    """The module that a ``call_module`` node calls; None for any other node or value."""
    if not isinstance(node, Node) or node.op != "call_module":
        return None
    return graph_module.get_submodule(str(node.target))


def sole_input(node: Node) -> Node | None:
    """The one tensor that a module is called on, given by position or as ``input=``; None for any other call."""
    arguments = [*node.args, *node.kwargs.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], Node) or set(node.kwargs) - {"input"}:
        return None
    return arguments[0]


def call_on(node: Node, x: Node, *, keyword: bool) -> None:
    """Calls a module on one tensor, by position or as ``input=``."""
    if keyword:
        node.args, node.kwargs = (), {"input": x}
    else:
        node.args, node.kwargs = (x,), {}


def dims(node: Node) -> int | None:
    """The number of dimensions of a node's result, where the trace knows it."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None


def is_fixed(size: int | torch.SymInt) -> bool:
    """Whether a size is one number for sure; one that the model turned out to fix is a symbol still."""
    if not isinstance(size, torch.SymInt):
        return True
    return bool(size.node.has_hint()) and statically_known_true(size == size.node.hint)


def copy_meta(source: Node, node: Node, value: Node, width: Any) -> None:
    """Says of a new node where it comes from, as another one does, and that it gives what a third does, but for the
    size of the last axis."""
    node.meta = {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}
    if isinstance(like := value.meta.get("val"), torch.Tensor):
        node.meta["val"] = like.new_empty((*like.shape[:-1], width))


def parent_of(graph_module: GraphModule, target: str) -> tuple[nn.Module, str]:
    """The module that holds a target, safe to change, and the target's name in it.

    A GraphModule shares its leaves with the model that it was traced from. A container on the way that is more than
    the bare ``nn.Module`` that ``torch.fx`` makes may be such a leaf, with all that is in it, and is replaced by a
    shallow copy first.
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
    """Puts another module in a target's place, keeping the order of its parent's modules."""
    parent, name = parent_of(graph_module, target)
    parent._modules[name] = module


def remove_module(graph_module: GraphModule, target: str) -> None:
    """Takes a module out that no node calls any more."""
    parent, name = parent_of(graph_module, target)
    del parent._modules[name]


def children_order(graph_module: GraphModule, target: str) -> list[str]:
    """The names in a target's parent, in order, to be given to `reorder_children` later."""
    return list(parent_of(graph_module, target)[0]._modules)


def reorder_children(graph_module: GraphModule, target: str, order: list[str]) -> None:
    """Puts the modules of a target's parent in an order that they had before; others follow."""
    parent, _ = parent_of(graph_module, target)
    rank = {name: position for position, name in enumerate(order)}
    parent._modules = dict(sorted(parent._modules.items(), key=lambda item: rank.get(item[0], len(rank))))


def like(module: nn.Module, cls: type[nn.Module], *arguments: Any, bias: bool) -> Any:
    """A new module in the mode of another, its parameters yet to be set, of any dtype; no random number is drawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns where there is nothing to initialise
        new = cls(*arguments, bias=bias, device="meta")
    return new.train(module.training)


def with_parameters(module: _M, **parameters: torch.Tensor | None) -> _M:
    """A copy of a module with other parameters, in the order of its own; all else of it is the same, or shared.

    What is added to the copy later, a hook or a buffer, is not added to the module.
    """
    new = copy.copy(module)
    for name in vars(nn.Module()):
        vars(new)[name] = copy.copy(vars(new)[name])
    assert parameters.keys() <= new._parameters.keys()
    new._parameters.update(cast(dict[str, Any], parameters))
    return new


def operator_name(node: Node) -> str:
    """What a node does, in one word, whether it is a method, a function or an ATen operator: ``view``, ``floor``.

    Of what is not PyTorch's or Python's own, the word says whose it is: ``mylib::mul`` may do anything.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    if isinstance(node.target, str):  # of a module, or an attribute, the name says nothing of what it does
        return node.target if node.op == "call_method" else f"{node.op} {node.target}"
    name, home = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", None)
    return name if _is_own(node.target) else f"{home}.{name}"


def _is_own(function: Any) -> bool:
    """Whether a function is PyTorch's or Python's own."""
    home = getattr(function, "__module__", None) or "torch"
    registered = home.startswith("torch._ops.") and home != "torch._ops.aten"  # by others, as operators of theirs
    return home.partition(".")[0] in ("torch", "_operator", "builtins", "math") and not registered


def has_hooks(module: nn.Module) -> bool:
    """Whether more happens when a module is called than its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def is_foreign(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node calls code that is neither PyTorch's nor Python's own, and so may do anything to what it is given.

    Of an operator that others registered, its schema tells what it does. A method that no tensor has is one of an input
    that is an object of the caller's, as a list that is appended to.
    """
    if node.op == "call_module":
        return _runs_foreign(graph_module.get_submodule(str(node.target)))
    if node.op == "call_method":
        return not hasattr(torch.Tensor, str(node.target)) and not hasattr(torch.Size, str(node.target))
    described = isinstance(node.target, torch._ops.OpOverload)
    return node.op == "call_function" and not described and not _is_own(node.target)


def _runs_foreign(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or has_hooks(module) or "forward" in vars(module):
        return True
    if isinstance(module, GraphModule):
        return any(is_foreign(module, node) for node in module.graph.nodes)
    inherited = type(module).forward.__module__.partition(".")[0] == "torch"
    return not inherited or any(map(_runs_foreign, module.children()))


def graphs_within(graph_module: GraphModule, node: Node) -> list[GraphModule]:
    """The graphs that a node runs: those in the module that it calls, or that a higher-order operator is given."""
    if node.op == "call_module":
        ran = list(graph_module.get_submodule(str(node.target)).modules())
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        named = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
        known = dict(graph_module.named_modules(remove_duplicate=False))
        ran = [known[name] for name in named if name in known]
    else:
        ran = []
    return [module for module in ran if isinstance(module, GraphModule)]


# What tells of a tensor as a whole, and of none of its numbers: methods, functions and operators, and attributes.
_MEASURES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("__len__", "len", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset"),
)
_ATTRIBUTES = ("shape", "ndim", "dtype", "device")


def measures(node: Node) -> bool:
    """Whether a node is a size, a shape, or something else that is known of a tensor without its numbers."""
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    return node.op in ("call_method", "call_function") and operator_name(node) in _MEASURES
