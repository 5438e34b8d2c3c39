"""Small modules for tests, and functions that trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

from optexport.api import symbolic_trace
from tests._helpers.models import randomise


class Program(nn.Module):
    """A module whose forward is a function of the module and one input.

    ``Program(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 4), k=nn.Linear(4, 4))``
    """

    def __init__(self, body: Callable[[Any, Any], Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._body = body
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):  # type: ignore[no-untyped-def]  # an annotation would appear in the graph's text
        return self._body(self, x)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kinds = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d)
        return isinstance(m, kinds) or super().is_leaf_module(m, module_qualified_name)


def by_fx(body: Callable[[Any, Any], Any], /, **children: nn.Module | nn.Parameter) -> GraphModule:
    """Traces a program with random weights by ``torch.fx``. Subclasses of layers are leaves."""
    return graph_of(randomise(Program(body, **children)))


def graph_of(program: nn.Module) -> GraphModule:
    """Traces a module by ``torch.fx``."""
    return GraphModule(program, _Tracer().trace(program))


class _Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def leaves(program: nn.Module) -> GraphModule:
    """Traces a module by ``torch.fx`` with all its modules as leaves."""
    return GraphModule(program, _Leaves().trace(program))


def by_export(x: torch.Tensor, body: Callable[[Any, Any], Any], /, **children: nn.Module | nn.Parameter) -> GraphModule:
    """Traces a program with random weights by ``torch.export``."""
    return symbolic_trace(randomise(Program(body, **children)), example_inputs={"x": x})


def calls(graph_module: GraphModule, cls: type[nn.Module]) -> list[Node]:
    """Returns the calls of modules of a class."""
    nodes = graph_module.graph.find_nodes(op="call_module")
    return [node for node in nodes if isinstance(graph_module.get_submodule(node.target), cls)]


class Inherited(nn.Linear):
    """A subclass of Linear, as adapters and quantizers create them."""
