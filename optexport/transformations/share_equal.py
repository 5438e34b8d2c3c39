"""ShareEqual: computes equal results once, and optionally stores equal weights once."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport._utils.tensors import bytes_of
from optexport.transformations.analysis import constants, folding, memory, modes, modules
from optexport.transformations.rule import Match, Rule, Skip

_PLAIN_TYPES = (
    *(type(None), bool, int, float, complex, str, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Duplicate(Match):
    """A node that computes the same as an earlier one.

    Attributes:
        first: The earlier node.
    """

    first: Node


@dataclass(frozen=True)
class EqualWeights(Match):
    """Weights that are stored more than once.

    Attributes:
        names: For each copy, its name and the name of the weight that stays.
    """

    names: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ShareEqual(Rule):
    """Computes equal results once.

    y = f(x); z = f(x)  ->  y = f(x); z = y

    For ATen operators, arithmetic operators, reads of parameters, and layers that are called twice. For example, each
    block of a transformer computes the same masks and positions. Operators that draw random numbers or return
    uninitialized memory, layers in train mode, and layers of a subclass or with hooks do not match.

    Skips:   results or inputs that are changed in place; results or weights that two outputs would share; calls in
             different global state, such as autocast; weights that also belong to a layer that cannot change.
    Exact:   bit-exact.
    Inverse: none, because the nodes are removed, with their names and positions.

    Attributes:
        weights: Store bit-equal parameters and buffers once, under all of their names. They are then tied: rules that
            replace weights skip them, and training changes them together. Weights that the graph changes (a norm in
            train mode does), or that have hooks, stay separate.
    """

    weights: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.op == "output":
            return _match_weights(graph_module) if self.weights else None
        if not node.users or not constants.is_pure(graph_module, node):
            return None
        first = next((earlier for earlier in _candidates(graph_module, node) if _is_equal(node, earlier)), None)
        if first is None:
            return None
        reason = _find_problem(graph_module, first, node)
        return Skip(f"{first.name} and {node.name}: {reason}") if reason else Duplicate((node,), first)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        if isinstance(match, EqualWeights):
            for name, shared_name in match.names:
                _replace(graph_module, name, _tensor(graph_module, shared_name))
            return [(node, None) for node in match.nodes]
        assert isinstance(match, Duplicate)
        match.nodes[0].replace_all_uses_with(match.first)
        graph_module.graph.erase_node(match.nodes[0])
        return []


def _candidates(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns the earlier nodes that may be equal, in graph order."""
    inputs = node.all_input_nodes
    nodes = inputs[0].users if inputs else graph_module.graph.find_nodes(op=node.op, target=node.target)
    return sorted(n for n in nodes if n < node)


def _is_equal(a: Node, b: Node) -> bool:
    if (a.op, a.target) != (b.op, b.target):
        return False
    if a.op == "call_module":
        x = modules.sole_input(a)
        return x is not None and x is modules.sole_input(b)
    return bool(_comparable((a.args, a.kwargs)) == _comparable((b.args, b.kwargs)))


def _comparable(value: Any) -> Any:
    """Converts an argument so that 1 and 1.0, 0.0 and -0.0, lists and tuples are unequal."""
    if isinstance(value, Node):
        return ("node", value.name)
    if isinstance(value, (list, tuple)):  # x[0, 1] is not x[[0, 1]]
        return ("tuple" if isinstance(value, tuple) else "list", [_comparable(item) for item in value])
    if isinstance(value, dict):
        return ("dict", sorted((key, _comparable(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", [_comparable(item) for item in (value.start, value.stop, value.step)])
    return (type(value), repr(value) if isinstance(value, _PLAIN_TYPES) else id(value))


def _find_problem(graph_module: GraphModule, first: Node, node: Node) -> str | None:
    if any(memory.changed_in_place(graph_module, result) for result in (first, node)):
        return "the results are changed in place"
    for x in node.all_input_nodes:
        if change := memory.find_change_between(graph_module, x, first, node):
            return f"{x.name} is changed in place by {change.name} between the two"
    module = modules.called_module(graph_module, node)
    if module is not None and memory.find_constant_changes(graph_module, [*module.parameters(), *module.buffers()]):
        return "the weights are changed in place"
    # The later node first, because it has fewer users: if every layer computes a mask, the first has all users by then.
    if all(memory.reaches_output(graph_module, result) for result in (node, first)):
        return "both are outputs, or share memory with outputs"
    return modes.find_mode_problem(graph_module, (first, node))


def _match_weights(graph_module: GraphModule) -> EqualWeights | Skip | None:
    shared: dict[Any, tuple[str, torch.Tensor]] = {}
    weights, names_by_id = list(_weights(graph_module)), _names_by_id(graph_module)
    replaceable = {name for _, name, _ in weights}
    names: list[tuple[str, str]] = []
    readers: dict[Node, None] = {}
    # A caller who changes an output that is a weight changes that weight, and must not change others.
    reads = graph_module.graph.find_nodes(op="get_attr")
    returned = {id(memory.find_constant(graph_module, n)) for n in reads if memory.reaches_output(graph_module, n)}
    separate: dict[Any, dict[int, str]] = defaultdict(dict)
    for node, name, tensor in weights:
        identity = _identity(tensor)
        if id(tensor) in returned or not replaceable.issuperset(names_by_id[id(tensor)]):
            separate[identity].setdefault(id(tensor), name)
            continue
        shared_name, original = shared.setdefault(identity, (name, tensor))
        if original is not tensor:
            names.append((name, shared_name))
            readers[node] = None
    if names:
        return EqualWeights(tuple(readers), tuple(names))
    groups = ([*members.values(), *shared.get(identity, ())[:1]] for identity, members in separate.items())
    problem = "but share memory with outputs, or have readers that cannot change"
    reasons = [f"{' and '.join(group)} are equal, {problem}" for group in groups if len(group) > 1]
    return Skip("; ".join(reasons)) if reasons else None


def _names_by_id(graph_module: GraphModule) -> dict[int, list[str]]:
    """Returns all names of each parameter and buffer."""
    names: dict[int, list[str]] = defaultdict(list)
    for kind in (graph_module.named_parameters, graph_module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names[id(tensor)].append(name)
    return names


def _weights(graph_module: GraphModule) -> Iterator[tuple[Node, str, torch.Tensor]]:
    """Yields a reader, the name and the tensor of each replaceable weight, in graph order."""
    visited = set()
    for node in graph_module.graph.nodes:
        for name, tensor in _weights_of(graph_module, node).items():
            if type(tensor) not in (torch.Tensor, nn.Parameter) or name in visited:
                continue
            assert isinstance(tensor, torch.Tensor)
            plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and tensor.numel()
            hooked = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
            if plain and not hooked and not memory.find_constant_changes(graph_module, [tensor]):
                visited.add(name)
                yield node, name, tensor


def _weights_of(graph_module: GraphModule, node: Node) -> dict[str, torch.Tensor | None]:
    """Returns the weights that a node reads, by name."""
    target = str(node.target)
    if node.op == "get_attr":
        return {target: memory.find_constant(graph_module, node)}
    if node.op == "call_module" and constants.is_pure(graph_module, node):
        module = graph_module.get_submodule(target)
        if folding.find_sharing_problem(graph_module, target, module) is None:
            tensors = (*module._parameters.items(), *module._buffers.items())
            return {f"{target}.{name}": tensor for name, tensor in tensors}
    return {}


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
