"""The bytes of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, row after row; uint8, [bytes]. They share its memory where that lies so."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element contiguous memory may have any stride, which view() refuses
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Within it numbers are computed, and nothing is traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
