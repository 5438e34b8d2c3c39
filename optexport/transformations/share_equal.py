"""What is computed twice is computed once."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport._utils import aten_ops
from optexport._utils.tensors import bytes_of
from optexport.transformations.analysis import folding, memory, modes, modules
from optexport.transformations.rule import Match, Rule, Skip

_OPERATORS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.neg, operator.matmul, operator.getitem, operator.and_, operator.or_, operator.not_),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
}
_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LayerNorm, nn.Embedding),
)
_PLAIN = (
    *(type(None), bool, int, float, complex, str, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Twice(Match):
    """A node that computes what an earlier one did.

    Attributes:
        first: That one.
    """

    first: Node


@dataclass(frozen=True)
class Copies(Match):
    """Weights that are stored more than once.

    Attributes:
        names: The name of each copy, and of the one that stays.
    """

    names: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ShareEqual(Rule):
    """y = f(x); z = f(x)  ->  y = f(x); z = y

    For ATen operators, arithmetic operators, reads of parameters, and layers called twice. Masks and positions are what
    transformers compute again in every block.

    Skips:   results or inputs that are changed in place; two results, or weights, that outputs would then share; calls
             in another global state, as that of autocast; weights that a layer has too which is left alone. Nothing is
             said of operators that draw random numbers or leave memory unset, layers in train mode, and layers of a
             subclass or with hooks: no two calls of these are equal.
    Exact:   to the bit.
    Inverse: none, because nodes that are gone could only be made anew, under other names.

    Attributes:
        weights: Whether parameters and buffers of equal bits become one tensor too, under all of their names. They are
            tied then: rules that replace weights leave them alone, and training would change them together. Those that
            the graph changes, as a norm in train mode does, or that have hooks of their own, stay apart.
    """

    weights: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.op == "output":
            return _copies(graph_module) if self.weights else None
        if not node.users or not _is_pure(graph_module, node):
            return None
        first = next((other for other in _candidates(graph_module, node) if _equal(node, other)), None)
        if first is None:
            return None
        reason = _why_not(graph_module, first, node)
        return Skip(f"{first.name} and {node.name}: {reason}") if reason else Twice((node,), first)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        if isinstance(match, Copies):
            for name, kept in match.names:
                _replace(graph_module, name, _tensor(graph_module, kept))
            return [(node, None) for node in match.nodes]
        assert isinstance(match, Twice)
        match.nodes[0].replace_all_uses_with(match.first)
        graph_module.graph.erase_node(match.nodes[0])
        return []


def _is_pure(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node gives the same whenever it is called on the same."""
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        module = modules.called_module(graph_module, node)
        assert module is not None
        changing = module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
        rescaling = isinstance(module, nn.Embedding) and module.max_norm is not None
        plain = type(module) in _LAYERS and folding.why_not_plain(module, type(module)) is None
        return plain and not changing and not rescaling
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and node.target in _OPERATORS
    schema = node.target._schema
    given = aten_ops.arguments(node)
    return (
        schema.name.startswith("aten::")
        and "empty" not in schema.name
        and not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not any(given.get(name) for name in ("train", "training", "use_input_stats"))  # may change statistics
    )


def _candidates(graph_module: GraphModule, node: Node) -> list[Node]:
    """The earlier nodes that may be equal, first of all first."""
    inputs = node.all_input_nodes
    others = inputs[0].users if inputs else graph_module.graph.find_nodes(op=node.op, target=node.target)
    return sorted(other for other in others if other < node)


def _equal(node: Node, other: Node) -> bool:
    if (node.op, node.target) != (other.op, other.target):
        return False
    if node.op == "call_module":
        x = modules.sole_input(node)
        return x is not None and x is modules.sole_input(other)
    return bool(_written((node.args, node.kwargs)) == _written((other.args, other.kwargs)))


def _written(value: Any) -> Any:
    """An argument so that it is equal to no other: 1 is not 1.0, and 0.0 not -0.0."""
    if isinstance(value, Node):
        return ("node", value.name)
    if isinstance(value, (list, tuple)):  # x[0, 1] is not x[[0, 1]]
        return ("tuple" if isinstance(value, tuple) else "list", [_written(item) for item in value])
    if isinstance(value, dict):
        return ("dict", sorted((key, _written(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", [_written(item) for item in (value.start, value.stop, value.step)])
    return (type(value), repr(value) if isinstance(value, _PLAIN) else id(value))


def _why_not(graph_module: GraphModule, first: Node, node: Node) -> str | None:
    if any(memory.changed_in_place(graph_module, result) for result in (first, node)):
        return "their results are changed in place"
    for x in node.all_input_nodes:
        if change := memory.changed_between(graph_module, x, first, node):
            return f"{x.name} is changed in place by {change.name} between them"
    module = modules.called_module(graph_module, node)
    if module is not None and memory.changes_constant(graph_module, [*module.parameters(), *module.buffers()]):
        return "their weights are changed in place"
    # The later one first: of a mask that every layer makes again, the first has the users of all others by then.
    if all(memory.reaches_output(graph_module, result) for result in (node, first)):
        return "they are outputs, or outputs lie in their memory"
    return modes.why_apart(graph_module, (first, node))


def _copies(graph_module: GraphModule) -> Copies | Skip | None:
    """Equal weights, by the names under which the graph reads them."""
    kept: dict[Any, tuple[str, torch.Tensor]] = {}
    weights, known_as = list(_weights(graph_module)), _names(graph_module)
    replaceable = {name for _, name, _ in weights}
    names: list[tuple[str, str]] = []
    readers: dict[Node, None] = {}
    # Whoever changes an output that is a weight changes that, and must change no other.
    reads = graph_module.graph.find_nodes(op="get_attr")
    returned = {id(memory.constant(graph_module, n)) for n in reads if memory.reaches_output(graph_module, n)}
    apart: dict[Any, dict[int, str]] = defaultdict(dict)
    for node, name, tensor in weights:
        identity = _identity(tensor)
        if id(tensor) in returned or not replaceable.issuperset(known_as[id(tensor)]):
            apart[identity].setdefault(id(tensor), name)
            continue
        known, original = kept.setdefault(identity, (name, tensor))
        if original is not tensor:
            names.append((name, known))
            readers[node] = None
    if names:
        return Copies(tuple(readers), tuple(names))
    equal = ([*own.values(), *kept.get(identity, ())[:1]] for identity, own in apart.items())
    why = "but outputs lie in their memory, or others have them too"
    reasons = [f"{' and '.join(some)} are equal, {why}" for some in equal if len(some) > 1]
    return Skip("; ".join(reasons)) if reasons else None


def _names(graph_module: GraphModule) -> dict[int, list[str]]:
    """All names of each parameter and buffer, by its id."""
    names: dict[int, list[str]] = defaultdict(list)
    for kind in (graph_module.named_parameters, graph_module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names[id(tensor)].append(name)
    return names


def _weights(graph_module: GraphModule) -> Iterator[tuple[Node, str, torch.Tensor]]:
    """The weights that the graph reads and that may be replaced, by name and with a reader, in the graph's order."""
    seen = set()
    for node in graph_module.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            found = {target: memory.constant(graph_module, node)}
        elif node.op == "call_module" and _is_pure(graph_module, node):
            module = graph_module.get_submodule(target)
            if folding.why_shared(graph_module, target, module) is not None:
                continue
            own = (*module._parameters.items(), *module._buffers.items())
            found = {f"{target}.{name}": tensor for name, tensor in own}
        else:
            continue
        for name, tensor in found.items():
            if type(tensor) not in (torch.Tensor, nn.Parameter) or name in seen:
                continue
            assert isinstance(tensor, torch.Tensor)
            plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and tensor.numel()
            hooked = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
            if plain and not hooked and not memory.changes_constant(graph_module, [tensor]):
                seen.add(name)
                yield node, name, tensor


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    digest = hashlib.sha256(bytes_of(tensor.cpu()).numpy().data).digest()
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad, digest)


def _tensor(graph_module: GraphModule, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    tensor = getattr(graph_module.get_submodule(path), last)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _replace(graph_module: GraphModule, name: str, tensor: torch.Tensor) -> None:
    owner, last = modules.parent_of(graph_module, name)
    kind = "_parameters" if last in owner._parameters else "_buffers"
    setattr(owner, kind, {**getattr(owner, kind), last: tensor})
