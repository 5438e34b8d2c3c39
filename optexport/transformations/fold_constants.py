"""FoldConstants: computes once what depends only on weights and numbers."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport._utils import aten_ops
from optexport.transformations.analysis import constants, folding, memory, module_builders, modules, usage
from optexport.transformations.base import marks
from optexport.transformations.rule import Match, Rule, Skip

# All results together may enlarge the model by this part, or by this number of bytes if that is more.
_MAX_GROWTH, _MIN_BUDGET = 0.05, 1 << 20


@dataclass(frozen=True)
class Fold(Match):
    """A constant result, which the last of the nodes computes.

    Attributes:
        growth: Number of bytes that the result needs more than the weights that only it is computed from.
    """

    growth: int


@dataclass(frozen=True)
class FoldConstants(Rule):
    """Computes once what depends only on parameters, buffers and numbers, and stores the result.

    f(weight)  ->  weight'

    For example standardized weights, ``weight_norm``, ``spectral_norm``, tables of relative positions, ``exp`` of a
    temperature, and grids of fixed sizes. f consists of ATen operators, arithmetic operators and layers; views alone
    stay. A result of real or complex numbers that depends on a parameter becomes a parameter, trainable if any of its
    sources is. Others become buffers that are not part of the state_dict.

    Skips:   results that would enlarge the model, all together by more than 5 % and more than 1 MiB; outputs, and
             results that share memory with outputs. Random numbers, uninitialized memory, values that are changed in
             place, calls under autocast, and inner graphs are not constant.
    Exact:   bit-exact.
    Inverse: none, because the nodes are removed, with their names and positions.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        return usage.cached(graph_module, self._plan).get(node)

    def _plan(self, graph_module: GraphModule) -> dict[Node, Fold | Skip]:
        """Returns what to fold: the last constant results or, if these stay, what they are computed from."""
        computed, results = constants.find_constants(graph_module), dict[Node, Fold | Skip]()
        budget = self._budget(graph_module)
        needed: set[Node] = set()  # constants that are computed in every call
        for node in reversed(list(computed)):
            if all(user in computed and user not in needed for user in node.users):
                continue
            needed.add(node)
            if not computed[node] or not _is_storable(node):
                continue
            replaced = _exclusive_sources(node)
            growth = max(0, node.meta["val"].nbytes - self._freed(graph_module, replaced))
            if memory.reaches_output(graph_module, node):
                results[node] = Skip(f"{node.name} is an output, or shares memory with one")
            elif growth > budget:
                results[node] = Skip(f"{node.name} would enlarge the model by {growth} bytes")
            else:
                budget -= growth
                needed.remove(node)
                calls = [n for n in replaced if n.op != "get_attr"]
                results[node] = Fold((*calls, node), growth)
        return results

    def _budget(self, graph_module: GraphModule) -> int:
        """Returns the number of bytes by which further results may enlarge a model."""
        tensors = {*graph_module.parameters(), *graph_module.buffers()}
        spent: int = sum(
            record for n in self.get_transformed_nodes(graph_module) for _, record in marks(n)[self.signature]
        )
        return max(int(_MAX_GROWTH * (sum(t.nbytes for t in tensors) - spent)), _MIN_BUDGET) - spent

    def _freed(self, graph_module: GraphModule, nodes: list[Node]) -> int:
        """Returns the bytes of the weights that only these nodes use, without earlier results of this rule."""
        freed = 0
        for node in nodes:
            if node.op == "get_attr" and not self.transformed(node):
                freed += _own_bytes(graph_module, node)
            elif node.op == "call_module" and _is_only_call(graph_module, node):
                freed += sum(p.nbytes for p in graph_module.get_submodule(str(node.target)).parameters())
        return freed

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        node = match.nodes[-1]
        value = _as_weight(*constants.evaluate(graph_module, node))
        with graph_module.graph.inserting_before(node):
            stored = graph_module.graph.create_node("get_attr", f"folded_{node.name}")
        stored.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "val") if key in node.meta}
        node.replace_all_uses_with(stored)
        _erase_unused(graph_module, node)
        stored.target = _register(graph_module, stored, value)
        reader = next(iter(stored.users))  # a layer has to be its only reader
        return [(reader if _call_layer(graph_module, reader) else stored, match.growth)]


def _is_storable(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and (not constants.is_view(node) or value.is_contiguous())


def _exclusive_sources(node: Node) -> list[Node]:
    """Returns the nodes that only serve to compute a node."""
    exclusive, ahead = {node}, set(node.all_input_nodes)
    while ahead:
        source = max(ahead)  # so that all its users were visited before
        ahead.remove(source)
        if exclusive.issuperset(source.users.keys() - _unread_parts(source)):
            exclusive.add(source)
            ahead.update(source.all_input_nodes)
    return sorted(exclusive - {node})


def _own_bytes(graph_module: GraphModule, node: Node) -> int:
    """Returns the size of a parameter or buffer that a node reads; 0 if it has other readers."""
    tensor = memory.find_constant(graph_module, node)
    assert tensor is not None
    return 0 if usage.uses(graph_module).has_other_readers(node, tensor) else tensor.nbytes


def _is_only_call(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if nothing else uses the module that a node calls."""
    target = str(node.target)
    calls = usage.uses(graph_module).calls_of(target)
    problem = folding.find_sharing_problem(graph_module, target, graph_module.get_submodule(target))
    return calls in ([], [node]) and problem is None


def _as_weight(value: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """Returns a parameter if a value depends on one and can be trained."""
    parameters = [source for source in sources if isinstance(source, nn.Parameter)]
    if not parameters or not (value.is_floating_point() or value.is_complex()):
        return value
    return nn.Parameter(value, requires_grad=any(parameter.requires_grad for parameter in parameters))


def _erase_unused(graph_module: GraphModule, node: Node) -> None:
    """Erases an unused node, and the calls, modules and weights that only it needed."""
    ahead = {node}
    while ahead:
        unused = max(ahead)  # so that all its users were visited before
        ahead.remove(unused)
        if len(unread := _unread_parts(unused)) < len(unused.users):
            continue
        for part in unread:
            graph_module.graph.erase_node(part)
        ahead.update(unused.all_input_nodes)
        if unused.op == "get_attr":
            usage.forget(graph_module, unused)
            continue
        graph_module.graph.erase_node(unused)
        if unused.op == "call_module" and _is_only_call(graph_module, unused):
            modules.remove_module(graph_module, str(unused.target))


def _unread_parts(node: Node) -> list[Node]:
    """Returns the parts of a result of several tensors that nothing reads."""
    return [user for user in node.users if user.target is operator.getitem and not user.users]


def _register(graph_module: GraphModule, node: Node, value: torch.Tensor) -> str:
    """Adds a tensor to the model, in the module whose weight it is or that computed it; returns its name."""
    reader, name = next(iter(node.users)), str(node.target)
    path, _ = module_builders.find_path(node)
    kind, (layer_path, _) = module_builders.KINDS.get(reader.target), module_builders.find_path(reader)
    if kind and _container(graph_module, layer_path):
        arguments = aten_ops.arguments(reader)
        path, name = layer_path, next((tensor for tensor in kind.tensors if arguments[tensor] is node), name)
    owner = _container(graph_module, path)
    if owner is None:
        path, owner = "", graph_module
    while hasattr(owner, name):
        name = f"folded_{name}"
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    else:
        owner.register_buffer(name, value, persistent=False)
    return f"{path}.{name}" if path else name


def _container(graph_module: GraphModule, path: str) -> nn.Module | None:
    """Returns the module of a path if it only contains others."""
    try:
        module = graph_module.get_submodule(path)
    except AttributeError:
        return None
    return module if type(module) is nn.Module else None


def _call_layer(graph_module: GraphModule, node: Node) -> bool:
    """Replaces a call of an operator by a call of a layer, if all of its weights are parameters in one module."""
    kind, (path, _) = module_builders.KINDS.get(node.target), module_builders.find_path(node)
    container = _container(graph_module, path)
    if kind is None or container is None or not path:
        return False
    arguments = aten_ops.arguments(node)
    reads = {name: arguments[name] for name in kind.tensors if arguments[name] is not None}
    parameters = {name: container._parameters.get(name) for name in kind.tensors}
    others = {name: value for name, value in arguments.items() if name not in (*kind.tensors, kind.input)}
    names = {name for name, _ in (*container.named_parameters(), *container.named_buffers())}
    is_alone = names == reads.keys() and all(type(module) is nn.Module for module in container.modules())
    if not is_alone or any(read.target != f"{path}.{name}" or len(read.users) > 1 for name, read in reads.items()):
        return False
    is_fixed = not any(isinstance(value, Node) for value in torch.utils._pytree.tree_leaves(others))
    layer = kind.build(arguments, dict(parameters)) if is_fixed else None
    if layer is None:
        return False
    layer._parameters.update(parameters)
    modules.replace_module(graph_module, path, layer.eval())
    node.op, node.target = "call_module", path
    node.args, node.kwargs = (arguments[kind.input],), {}
    for read in reads.values():
        graph_module.graph.erase_node(read)
    return True
