"""Notes at which sizes of 1 a model goes another way: ``torch.export`` takes each for 2 or more, and asserts none.

``if new == 1 and past >= 16`` is traced as if no token ever came alone: what is asked of ``past`` behind that is not
asked at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.overrides import TorchFunctionMode

from optexport.tracing import value_checks
from optexport.tracing.model_lines import is_of_model

_SQUEEZING = ("squeeze", "squeeze_")
_KEY = "optexport_sizes_of_one"
_FUNCTIONS = str(Path(torch.nn.__file__).parent)
# What stands between the line that asks and the answer.
_BETWEEN = {torch.__file__, sym_node.__file__, value_checks.__file__, __file__}


class OnesNoted(TorchFunctionMode):
    """Within it, what a model asks of its sizes is looked at as if one of them were 1."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[sympy.Symbol, Any] = {}

    def __enter__(self) -> OnesNoted:
        self._answer = SymNode.guard_bool

        def noted(node: SymNode, *args: Any) -> bool:
            expression, answer = node.expr, self._answer(node, *args)
            if _is_asked_by_model(sys._getframe(1)):
                self._look_at(expression, answer, node.shape_env)
            return answer

        SymNode.guard_bool = noted  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        SymNode.guard_bool = self._answer  # type: ignore[method-assign]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", None) in _SQUEEZING:  # a model may ask how many axes are left
            for size in (args[0] if args else (kwargs or {})["input"]).shape:
                if isinstance(size, torch.SymInt):
                    self._look_at(sympy.Ne(size.node.expr, 1), True, size.node.shape_env)
        return func(*args, **(kwargs or {}))

    def _look_at(self, expression: Any, answer: bool, shape_env: Any) -> None:
        for symbol in expression.free_symbols:
            at_one = expression.xreplace({**shape_env.backed_var_to_val, symbol: sympy.Integer(1)})
            if at_one == (sympy.false if answer else sympy.true):
                self._asked[symbol] = shape_env

    def note(self, program: ExportedProgram) -> None:
        """Leaves in a program what was asked as it was traced."""
        sizes = (shape_env.replace(symbol) for symbol, shape_env in self._asked.items())
        program.graph_module.meta[_KEY] = list(dict.fromkeys(sizes))  # some of which are found to be the same


def asked_at_one(program: ExportedProgram) -> list[Any]:
    """Conditions, in the symbols of torch, that are not so where a model goes another way at a size of 1."""
    return [sympy.Ne(size, 1) for size in program.graph_module.meta.get(_KEY, ()) if size.free_symbols]


def _is_asked_by_model(frame: FrameType | None) -> bool:
    """Whether it is a model that asks, or a function of torch.nn for it, and not what computes shapes and strides."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is not None and (
        is_of_model(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_FUNCTIONS)
    )
