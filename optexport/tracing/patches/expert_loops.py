"""Traces a loop over the experts that have tokens, whose number is unknown in a trace.

Most mixtures of experts in transformers have a second implementation, which its exporter uses. The others loop over the
experts with tokens, ``for expert in (tokens > 0).nonzero()``, and add each expert's result to the rows of its tokens.
An expert without tokens adds nothing, so a loop over all experts gives the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

_NONZERO = (torch.nonzero, torch.Tensor.nonzero)
_UNBIND = (torch.unbind, torch.Tensor.unbind)
_NUMEL = (torch.numel, torch.Tensor.numel)


def loop_over_all_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a ``forward``: loops over the experts with tokens become loops over all experts."""

    @functools.wraps(forward)
    def patched(*args: Any, **kw: Any) -> Any:
        with _AllIndices():
            return forward(*args, **kw)

    return patched


class _AllIndices(TorchFunctionMode):
    """Turns a loop over the nonzero indices of a vector into a loop over all its indices."""

    def __init__(self) -> None:
        super().__init__()
        self._nonzero: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else (kwargs or {}).get("input")
        if func in _UNBIND:
            for indices, count in self._nonzero:
                if first is indices:
                    return tuple(torch.tensor([index]) for index in range(count))
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])  # as for a real tensor
        result = func(*args, **(kwargs or {}))
        if (
            func in _NONZERO
            and isinstance(result, torch.Tensor)
            and isinstance(first, torch.Tensor)
            and first.dim() == 1
        ):
            count = first.shape[0]
            if isinstance(count, int) and isinstance(result.shape[0], torch.SymInt):
                self._nonzero.append((result, count))
        if self._nonzero and func in _NUMEL and isinstance(result, torch.SymInt) and free_unbacked_symbols(result):
            return torch.sym_max(result, 1)  # an expert without tokens must not be skipped: it adds nothing
        return result
