"""Records conditions that a model checks and that differ at a size of 1.

``torch.export`` assumes that every dynamic size is at least 2, and writes no assertion for that. ``if new == 1 and past
>= 16`` is traced as if ``new == 1`` were false, so that the condition on ``past`` is never evaluated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.overrides import TorchFunctionMode

from optexport._utils.user_lines import is_user_code

_SQUEEZE_FUNCTIONS = ("squeeze", "squeeze_")
_META_KEY = "optexport_sizes_of_one"
_NN_FOLDER = str(Path(torch.nn.__file__).parent)
# Files whose frames lie between the model's line and the evaluation of its condition: other replacements of guard_bool.
_FILES_BETWEEN = (torch.__file__, sym_node.__file__, f"{Path(__file__).parents[1]}{os.sep}")


class SizeOneRecorder(TorchFunctionMode):
    """Evaluates every condition on sizes that a model checks, as if one of the sizes were 1."""

    def __init__(self) -> None:
        super().__init__()
        self._symbols: dict[sympy.Symbol, Any] = {}

    def __enter__(self) -> SizeOneRecorder:
        self._guard_bool = SymNode.guard_bool

        def recording_guard_bool(node: SymNode, *args: Any) -> bool:
            expression, answer = node.expr, self._guard_bool(node, *args)
            if _is_called_by_model(sys._getframe(1)):
                self._evaluate(expression, answer, node.shape_env)
            return answer

        SymNode.guard_bool = recording_guard_bool  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        SymNode.guard_bool = self._guard_bool  # type: ignore[method-assign]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", None) in _SQUEEZE_FUNCTIONS:  # the number of axes may decide a branch later
            for size in (args[0] if args else (kwargs or {})["input"]).shape:
                if isinstance(size, torch.SymInt):
                    self._evaluate(sympy.Ne(size.node.expr, 1), True, size.node.shape_env)
        return func(*args, **(kwargs or {}))

    def _evaluate(self, expression: Any, answer: bool, shape_env: Any) -> None:
        for symbol in expression.free_symbols:
            try:
                at_one = expression.xreplace({**shape_env.backed_var_to_val, symbol: sympy.Integer(1)})
            except ZeroDivisionError:
                at_one = None  # the model may fail at this size, which a run will show
            if at_one in (None, sympy.false if answer else sympy.true):
                self._symbols[symbol] = shape_env

    def store(self, program: ExportedProgram) -> None:
        """Stores the recorded sizes in a program's metadata."""
        sizes = (shape_env.replace(symbol) for symbol, shape_env in self._symbols.items())
        program.graph_module.meta[_META_KEY] = list(
            dict.fromkeys(sizes)
        )  # torch.export may have found some to be equal


def doubt_size_one(program: ExportedProgram) -> None:
    """Makes a size of 1 suspect for every dynamic size; `SizeOneRecorder` cannot see a model in a strict trace."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    sizes: Iterator[Any] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    expressions = (size.node.expr for size in sizes if isinstance(size, torch.SymInt))
    program.graph_module.meta[_META_KEY] = list(dict.fromkeys(expressions))


def find_size_one_conditions(program: ExportedProgram) -> list[Any]:
    """Returns conditions in torch's symbols that are false if a size of 1 changes the branch."""
    return [sympy.Ne(size, 1) for size in program.graph_module.meta.get(_META_KEY, ()) if size.free_symbols]


def _is_called_by_model(frame: FrameType | None) -> bool:
    """Returns True for a call from a model or torch.nn, not for torch's checks of strides."""
    while frame is not None and frame.f_code.co_filename.startswith(_FILES_BETWEEN):
        frame = frame.f_back
    return frame is not None and (
        is_user_code(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_NN_FOLDER)
    )
