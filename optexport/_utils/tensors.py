"""Raw values of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a dense tensor in row-major order: uint8 [bytes].

    The result shares memory with a contiguous tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a contiguous tensor of one element may have any stride, which view() rejects
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Computes numbers in a context without tracing them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
