"""TorchScript's compiler without its memory, so that a file tells nothing of the process that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile_afresh(compile_: Callable[[], torch.jit.ScriptModule]) -> torch.jit.ScriptModule:
    """Scripts or traces a module as if nothing had been compiled in this process before.

    torch numbers a class whose name an earlier one has taken, and an attempt that fails leaves a half-made class: both
    would be seen in the file, and in the next error. What the process compiled before works on, and knows nothing of
    what is compiled here. For one thread at a time, since torch keeps one compilation unit for all.
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
    """Takes from every node where in Python it came from: paths, and numbers that fx counts in a process.

    An error in the file still shows the line of the file's own code.
    """
    graph: Any = torch._C.Graph()  # a node lives no longer than its graph
    nowhere = graph.create("prim::Constant")
    returns = block.return_node() if isinstance(block, torch._C.Graph) else block.returnNode()
    for node in (*block.nodes(), returns):
        node.copyMetadata(nowhere)
        for inner in node.blocks():
            _forget_sources(inner)
