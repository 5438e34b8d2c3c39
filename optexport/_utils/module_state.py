"""The memory of a model, which it may write to as it runs: outputs are kept out of it, and buffers put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def apart(model: nn.Module, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a model gave, in other memory where it lies in that of the model, which the next call may write to."""
    held = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [tensor.clone() if _memory(tensor) in held else tensor for tensor in outputs]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Puts back, at its end, what a model that changes its own buffers has written there.

    The function that it gives tells, within it, which of them hold other numbers than at its begin.
    """
    kept = [
        (module, f"{path}.{name}".removeprefix("."), name, buffer, buffer.clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    def changed() -> list[str]:
        return [path for module, path, name, _, value in kept if not _equal(module._buffers[name], value)]

    try:
        yield changed
    finally:
        for module, _, name, buffer, value in kept:
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
            if not _equal(buffer, value):
                buffer.copy_(value)


@contextmanager
def tensors_kept(model: nn.Module) -> Iterator[None]:
    """Has a model hold the same tensors at its end, where it may have put others in their place, or beside them."""

    def held(module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}

    kept = [(module, dict(module._buffers), held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, buffers, attributes in kept:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in held(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:  # of which torch compares none
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a stand-in for a weight has memory of its own
        return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
