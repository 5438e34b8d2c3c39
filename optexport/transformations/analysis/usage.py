"""Index of a graph: which nodes call a module or read a tensor, and under which names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, modules

_T = TypeVar("_T")


def forget(graph_module: GraphModule, node: Node) -> None:
    """Removes an unused read of a constant, and the constant if nothing else reads it."""
    if node.users:
        return
    graph_module.graph.erase_node(node)
    if any(read.target == node.target for read in graph_module.graph.find_nodes(op="get_attr")):
        return
    if any(str(node.target).startswith(f"{n.target}.") for n in graph_module.graph.find_nodes(op="call_module")):
        return
    parent, name = modules.parent_of(graph_module, str(node.target))
    for tensors in ("_parameters", "_buffers"):
        setattr(parent, tensors, {key: value for key, value in getattr(parent, tensors).items() if key != name})


class Uses:
    """Index of a graph, built once per pass.

    A pass only removes calls or adds unshared modules. So an index from its start stays on the safe
    side until its end.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.calls: dict[str, list[Node]] = defaultdict(list)
        self.switches: list[Node] = []
        self._mutations: list[Node] = []
        self._reads: set[str] = set()
        self._module_names: dict[nn.Module, list[str]] = defaultdict(list)
        self._parameter_names: dict[torch.Tensor, list[str]] = defaultdict(list)
        self.results: dict[Callable[[GraphModule], Any], Any] = {}
        for node in graph_module.graph.nodes:
            if node.op == "call_module":
                self.calls[node.target].append(node)
            elif node.op == "get_attr":
                self._reads.add(node.target)
            if effects.mutated_inputs(graph_module, node) or effects.mutated_state(graph_module, node):
                self._mutations.append(node)
            if effects.switches(graph_module, node):
                self.switches.append(node)
        for name, module in graph_module.named_modules(remove_duplicate=False):
            self._module_names[module].append(name)
        for name, parameter in graph_module.named_parameters(remove_duplicate=False):
            self._parameter_names[parameter].append(name)

    @property
    def mutations(self) -> list[Node]:
        """The nodes that change something in place."""
        return [node for node in self._mutations if not node._erased]

    def calls_of(self, target: str) -> list[Node]:
        """Returns the nodes that still call a module, in graph order."""
        return [n for n in self.calls.get(target, []) if not n._erased and n.op == "call_module" and n.target == target]

    def has_other_readers(self, node: Node, tensor: torch.Tensor) -> bool:
        """Returns True if a parameter or buffer that a node reads is tied, or if a called module contains it."""
        prefix = str(node.target)
        while prefix := prefix.rpartition(".")[0]:
            if prefix in self.calls:
                return True
        return len(self._parameter_names.get(tensor, [])) > 1

    def find_sharing_problem(self, target: str, module: nn.Module) -> str | None:
        """Returns why a module or its tensors are used elsewhere, or None."""
        names = self._module_names.get(module, [])
        if len(names) > 1:
            return f"the same module has the names {' and '.join(sorted(names))}"
        prefix = target
        while prefix := prefix.rpartition(".")[0]:
            if prefix in self.calls:
                return f"the module is part of {prefix}, which the graph calls as a whole"
        for name, parameter in module.named_parameters(recurse=False):
            if len(owners := self._parameter_names.get(parameter, [])) > 1:
                return f"the {name} is tied to {next(o for o in sorted(owners) if o != f'{target}.{name}')}"
        for name in (*module._parameters, *module._buffers):
            if f"{target}.{name}" in self._reads:
                return f"the graph also reads the {name} directly"
        return None


_uses: WeakKeyDictionary[GraphModule, Uses] = WeakKeyDictionary()


@contextmanager
def indexed(graph_module: GraphModule) -> Iterator[None]:
    """Builds the index of a graph once for all calls of `uses` in the body."""
    _uses[graph_module] = Uses(graph_module)
    try:
        yield
    finally:
        del _uses[graph_module]


def uses(graph_module: GraphModule) -> Uses:
    """Returns the index of a graph."""
    return _uses.get(graph_module) or Uses(graph_module)


def cached(graph_module: GraphModule, analyse: Callable[[GraphModule], _T]) -> _T:
    """Returns the result of an analysis, which runs once per pass."""
    results = uses(graph_module).results
    if analyse not in results:
        results[analyse] = analyse(graph_module)
    result: _T = results[analyse]
    return result
