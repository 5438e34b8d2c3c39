"""Traces models that assign to ``weight.data``, or write into it, in their forward.

torch.export traces neither: the graph would read the old weight, or contain a tensor without values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from optexport._utils.weight_data import gets_data, sets_data
from optexport._utils.writes import overwritten


class WeightData(TorchFunctionMode):
    """Passes each tensor whose data a model changes as its new value to all later functions, within the block."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()
        self._parameters: Any = WeakIdKeyDictionary()  # of the tensors that the model got from .data

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if sets_data(func):
            self._values[args[0]] = self._value(args[1]).detach()
            return None
        if gets_data(func):
            data = self._value(args[0]).detach()
            if isinstance(args[0], nn.Parameter) and args[0] not in self._values:
                self._parameters[data] = args[0]
            return data
        for target in overwritten(func, args, kwargs) if self._parameters else ():
            if (parameter := self._parameters.pop(target, None)) is not None:
                self._values[parameter] = self._values[target] = target.clone()
        if self._values:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._values.get(tensor, tensor)  # type: ignore[no-any-return]
