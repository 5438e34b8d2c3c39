"""Isolates TorchScript's compiler, so that files do not depend on the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile_afresh(compile_: Callable[[], torch.jit.ScriptModule]) -> torch.jit.ScriptModule:
    """Scripts or traces a module with an empty compilation unit.

    torch adds a number to a class name that is already taken, and a failed attempt leaves an incomplete class. Both
    would change the file and the next error. Earlier compiled code still works and cannot access the new code. This
    function is not thread-safe, because torch has one global compilation unit.
    """
    state: Any = torch.jit._state
    recursive: Any = torch.jit._recursive
    earlier = state._python_cu, recursive.concrete_type_store
    unit: Any = torch._C.CompilationUnit()
    state._python_cu, recursive.concrete_type_store = unit, recursive.ConcreteTypeStore()
    try:
        module = compile_()
    finally:
        state._python_cu, recursive.concrete_type_store = earlier
    for function in unit.get_functions():
        _forget_sources(function.graph)
    return module


def _forget_sources(block: Any) -> None:
    """Removes Python source locations from every node: paths, and fx's per-process counters.

    An error in the file still shows the line of the file's TorchScript code.
    """
    graph: Any = torch._C.Graph()  # must stay alive as long as its node
    nowhere = graph.create("prim::Constant")
    returns = block.return_node() if isinstance(block, torch._C.Graph) else block.returnNode()
    for node in (*block.nodes(), returns):
        node.copyMetadata(nowhere)
        for inner in node.blocks():
            _forget_sources(inner)
