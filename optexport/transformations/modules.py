"""Looking at, and replacing, the modules that a graph calls, without touching any that others hold too."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd


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


def forget(graph_module: GraphModule, node: Node) -> None:
    """Takes a constant out of the graph that no node reads any more, and out of the module tree if no call does."""
    if node.users:
        return
    graph_module.graph.erase_node(node)
    if any(other.target == node.target for other in graph_module.graph.find_nodes(op="get_attr")):
        return
    if any(str(node.target).startswith(f"{n.target}.") for n in graph_module.graph.find_nodes(op="call_module")):
        return
    parent, name = parent_of(graph_module, str(node.target))
    for tensors in ("_parameters", "_buffers"):
        setattr(parent, tensors, {key: value for key, value in getattr(parent, tensors).items() if key != name})


class Uses:
    """Who uses what in a graph, read once per pass.

    A pass only ever takes calls away, or adds modules that nobody shares yet, so what is read at its start errs on
    the safe side until its end.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self.calls: dict[str, list[Node]] = defaultdict(list)
        self._mutations: list[Node] = []
        self._reads: set[str] = set()
        self._module_names: dict[nn.Module, list[str]] = defaultdict(list)
        self._parameter_names: dict[torch.Tensor, list[str]] = defaultdict(list)
        for node in graph_module.graph.nodes:
            if node.op == "call_module":
                self.calls[node.target].append(node)
            elif node.op == "get_attr":
                self._reads.add(node.target)
            if mutated(graph_module, node) or own_changes(graph_module, node):
                self._mutations.append(node)
        for name, module in graph_module.named_modules(remove_duplicate=False):
            self._module_names[module].append(name)
        for name, parameter in graph_module.named_parameters(remove_duplicate=False):
            self._parameter_names[parameter].append(name)

    @property
    def mutations(self) -> list[Node]:
        """The nodes that change something in place."""
        return [node for node in self._mutations if not node._erased]

    def calls_of(self, target: str) -> list[Node]:
        """The nodes that call a module still, in the graph's order."""
        return [n for n in self.calls.get(target, []) if not n._erased and n.op == "call_module" and n.target == target]

    def why_shared(self, target: str, module: nn.Module) -> str | None:
        """Why a module cannot be replaced without changing something else; None where it can."""
        from optexport.transformations import memory  # which is made of what stands here

        names = self._module_names.get(module, [])
        if len(names) > 1:
            return f"the same module is known as {' and '.join(sorted(names))}"
        prefix = target
        while prefix := prefix.rpartition(".")[0]:
            if prefix in self.calls:
                return f"it is part of {prefix}, which is called as a whole"
        for name, parameter in module.named_parameters(recurse=False):
            if len(owners := self._parameter_names.get(parameter, [])) > 1:
                return f"its {name} is tied to {next(o for o in sorted(owners) if o != f'{target}.{name}')}"
        for name in (*module._parameters, *module._buffers):
            if f"{target}.{name}" in self._reads:
                return f"the graph reads its {name} elsewhere"
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            changes = [] if tensor is None else memory.changes_constant(self._graph_module, [tensor])
            if change := next((change for change in changes if change.target != target), None):
                return f"its {name} is changed in place by {change.name}"
        return None


_uses: WeakKeyDictionary[GraphModule, Uses] = WeakKeyDictionary()


@contextmanager
def indexed(graph_module: GraphModule) -> Iterator[None]:
    """Within it, `uses` reads the graph once instead of at every call."""
    _uses[graph_module] = Uses(graph_module)
    try:
        yield
    finally:
        del _uses[graph_module]


def uses(graph_module: GraphModule) -> Uses:
    """Who uses what in a graph."""
    return _uses.get(graph_module) or Uses(graph_module)


def has_hooks(module: nn.Module) -> bool:
    """Whether more happens when a module is called than its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def why_not_plain(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Why a module is more, or something else, than its class and sizes say: a subclass, hooks, weights computed on the
    fly or of another shape; None if it is plain."""
    if type(module) is not cls:
        return f"it is a {type(module).__name__}, a subclass of {cls.__name__}"
    if has_hooks(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced"
    if module._modules:
        return "its weight is computed by a parametrization"
    held = vars(module)
    if any(name in held or name in module._buffers for name in ("weight", "bias")) or "running_var" in held:
        return "its weight or bias is no parameter of it"
    weight, bias = _shapes(module)
    shapes = {"weight": weight, "bias": bias, "running_mean": bias, "running_var": bias}
    for name, shape in shapes.items():
        tensor = getattr(module, name, None)
        if shape is not None and tensor is not None and tensor.shape != shape:
            return f"its {name} has another shape than its sizes say"
    return None


def _shapes(module: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The shapes of weight and bias that the sizes of a layer or norm ask for; None where it has none."""
    match module:
        case nn.Linear():
            return (module.out_features, module.in_features), (module.out_features,)
        case _ConvNd():
            ends = [module.out_channels, module.in_channels][:: -1 if module.transposed else 1]
            return (ends[0], ends[1] // module.groups, *module.kernel_size), (module.out_channels,)
        case _BatchNorm():
            return (module.num_features,), (module.num_features,)
        case nn.LayerNorm():
            return tuple(module.normalized_shape), tuple(module.normalized_shape)
        case nn.Embedding():
            return (module.num_embeddings, module.embedding_dim), None
    return None, None


def why_not_replaceable(graph_module: GraphModule, call: Node) -> str | None:
    """Why the module of a call cannot be replaced by one that does something else, and what it does be told from its
    parameters alone; None if it can."""
    target = str(call.target)
    module, found = graph_module.get_submodule(target), uses(graph_module)
    torch_class = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))
    reason = why_not_plain(module, torch_class) or found.why_shared(target, module)
    if reason is None and len(found.calls_of(target)) > 1:
        reason = "it is called more than once"
    if reason is None and sole_input(call) is None:
        reason = "it is not called on a single tensor"
    if reason is None and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        reason = "its weights hold no numbers"
    if reason is None and not all(parameter.is_floating_point() for parameter in module.parameters()):
        reason = "its weights hold no real numbers"
    return f"{target}: {reason}" if reason else None


def why_not_held(target: object, layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why a layer cannot have another weight and bias, given in float64, in its own dtype; None if it can.

    They have to be finite there. And of all weights of one feature, an input or an output, rounding may lose no more
    than it does of normal numbers: a few that become subnormal among larger ones do not matter.
    """
    value, dtype = weight.detach().double(), layer.weight.dtype
    groups = getattr(layer, "groups", 1)
    by_feature = (groups, len(value) // groups, value.shape[1], math.prod(value.shape[2:]))
    size = value.abs().reshape(by_feature) * torch.finfo(dtype).eps
    lost = (value.to(dtype).double() - value).abs().reshape(by_feature)
    kept = all(bool((lost.sum(axes) <= size.sum(axes)).all()) for axes in ((1, 3), (2, 3)))
    if not kept or (bias is not None and not bool(bias.detach().to(dtype).isfinite().all())):
        return f"{target}: its weights would overflow or become subnormal"
    return None


def with_weights(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """A copy of a layer with another weight and bias, rounded to its dtype; each asks for gradients as before.

    A bias that the layer had not asks for them as the weight does.
    """
    new = copy.copy(layer)
    new._parameters = dict(layer._parameters)
    for name, value, own in (("weight", weight, layer.weight), ("bias", bias, layer.bias)):
        flags = layer.weight if own is None else own
        rounded = None if value is None else value.detach().to(layer.weight.dtype)
        new._parameters[name] = None if rounded is None else nn.Parameter(rounded, requires_grad=flags.requires_grad)
    return new


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


def operator_name(node: Node) -> str:
    """What a node does, in one word, whether it is a method, a function or an ATen operator: ``view``, ``floor``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


# What tells of a tensor as a whole, and of none of its numbers.
_MEASURES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"),
    *("get_device", len, torch.numel, torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default),
}


def measures(node: Node) -> bool:
    """Whether a node is a size, a shape, or something else that is known of a tensor without its numbers."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op in ("call_method", "call_function") and node.target in _MEASURES


# Operators of Python, as functions; as methods they have underscores around them.
_MUTATING = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
# Functions for layers that change running statistics, or rescale rows of a weight.
_LEARNING = ("batch_norm", "instance_norm", "embedding", "embedding_bag")


def mutated(graph_module: GraphModule, node: Node) -> list[Node]:
    """The arguments that a call changes in place, as far as its name or schema tells."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    written = [node.kwargs.get("out")]
    if node.op == "call_module":
        module = called_module(graph_module, node)
        idle = type(module).__module__ == nn.modules.dropout.__name__ and module is not None and not module.training
        if getattr(module, "inplace", False) is True and not idle:
            return node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given = {**node.kwargs, **dict(zip((argument.name for argument in arguments), node.args, strict=False))}
        changed = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        written += [*map(given.get, changed), *_learned(given)]
    elif node.op in ("call_method", "call_function"):
        name = operator_name(node)
        if name in _LEARNING and (known := node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)):
            written += _learned(known.kwargs)
        home = getattr(node.target, "__module__", "")
        # Python has operators with an underscore for another reason: and_, or_, not_.
        in_place = name.endswith("_") and not name.endswith("__") and home != "_operator"
        # Of a function for layers, a flag by position may be the one for doing it in place.
        flagged = home == "torch.nn.functional" and True in node.args[1:]
        if in_place or name.strip("_") in _MUTATING or node.kwargs.get("inplace") is True or flagged:
            written.append(first)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _learned(given: Mapping[str, Any]) -> list[Any]:
    """What a function for a layer changes of what it is given, though it does not say so."""
    learns = any(given.get(flag) for flag in ("training", "train", "use_input_stats"))
    statistics = [given.get("running_mean"), given.get("running_var")] if learns else []
    return [*statistics, given.get("weight")] if given.get("max_norm") is not None else statistics


def own_changes(graph_module: GraphModule, node: Node) -> list[torch.Tensor]:
    """What the call of a module changes of its own: running statistics, or rows of a weight that are rescaled."""
    module, changed = called_module(graph_module, node), list[torch.Tensor]()
    for part in () if module is None else module.modules():
        if isinstance(part, _NormBase) and (part.training or not part.track_running_stats):
            changed += part.buffers(recurse=False)
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            changed.append(part.weight)
    return changed
