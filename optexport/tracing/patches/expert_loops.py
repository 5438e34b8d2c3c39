"""Traces a loop over the experts that some token chose, whose number only running it tells.

Most mixtures of experts of transformers are computed in other ways too, of which its exporter takes one. Those that are
not go through the experts that were chosen, ``for expert in (tokens > 0).nonzero()``, and add what each gives to the
rows of its tokens. An expert without tokens adds nothing to no row: going through all of them gives the same.
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


def over_all_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` that takes a loop over the experts that were chosen as one over all."""

    @functools.wraps(forward)
    def patched(*args: Any, **kw: Any) -> Any:
        with _AllAreChosen():
            return forward(*args, **kw)

    return patched


class _AllAreChosen(TorchFunctionMode):
    """Within it, the indices of what is not zero in a vector are, one after the other, all indices of the vector."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _UNBIND:
            for indices, count in self._chosen:
                if args[0] is indices:
                    return tuple(torch.tensor([index]) for index in range(count))
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])  # as of a tensor that is not traced
        result = func(*args, **(kwargs or {}))
        if func in _NONZERO and isinstance(result, torch.Tensor) and args[0].dim() == 1:
            count = args[0].shape[0]
            if isinstance(count, int) and isinstance(result.shape[0], torch.SymInt):
                self._chosen.append((result, count))
        if self._chosen and func in _NUMEL and isinstance(result, torch.SymInt) and free_unbacked_symbols(result):
            return torch.sym_max(result, 1)  # whether an expert has tokens is not asked: without any it adds nothing
        return result
