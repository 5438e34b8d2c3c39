"""Notices access to ``weight.data``, which neither autograd nor torch.export sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Each access creates another wrapper, so functions are compared with ==.
_GET, _SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


def gets_data(func: Callable[..., Any]) -> bool:
    """Returns True for the function that reads ``tensor.data``."""
    return bool(func == _GET)


def sets_data(func: Callable[..., Any]) -> bool:
    """Returns True for the function that assigns to ``tensor.data``."""
    return bool(func == _SET)


class DataAccess(TorchFunctionMode):
    """Collects the parameters whose data is read or assigned within the block.

    A write into ``weight.data`` does not change the version of the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (gets_data(func) or sets_data(func)) and isinstance(args[0], nn.Parameter):
            self.parameters[id(args[0])] = args[0]
        return func(*args, **(kwargs or {}))
