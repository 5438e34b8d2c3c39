"""Protects outputs and buffers from a model that writes to its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


def copy_shared_outputs(model: nn.Module, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies outputs that share memory with the model, because the next call may change them."""
    memories = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [tensor.clone() if _memory(tensor) in memories else tensor for tensor in outputs]


@dataclass(frozen=True)
class _SavedBuffer:
    """A buffer of a model, and its value at the beginning."""

    path: str
    module: nn.Module
    name: str
    buffer: torch.Tensor
    value: torch.Tensor
    version: int | None

    @property
    def is_written(self) -> bool:
        """True if the model wrote to the buffer, also if the value is still the same."""
        if self.module._buffers[self.name] is not self.buffer:
            return True
        return _version(self.buffer) != self.version or not _equal(self.buffer, self.value)

    def restore(self) -> None:
        if self.module._buffers[self.name] is not self.buffer:
            self.module._buffers[self.name] = self.buffer
        if not _equal(self.buffer, self.value):
            self.buffer.copy_(self.value)


@contextmanager
def restoring_buffers(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Restores at the end the buffers that a model changes.

    Yields a function that returns the names of the buffers that the model has written to so far.
    """
    saved = [
        _SavedBuffer(f"{path}.{name}".removeprefix("."), module, name, buffer, buffer.clone(), _version(buffer))
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield lambda: [item.path for item in saved if item.is_written]
    finally:
        for item in saved:
            item.restore()


def _version(tensor: torch.Tensor) -> int | None:
    """Returns the number of writes to a tensor; None for a tensor of inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def restoring_tensors(model: nn.Module) -> Iterator[None]:
    """Restores the tensor attributes of a model at the end, if it replaces or adds any."""

    def tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}

    saved = [(module, dict(module._buffers), tensor_attributes(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, buffers, attributes in saved:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in tensor_attributes(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:  # torch.equal supports only strided tensors
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a subclass that represents a weight has separate memory
        return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
