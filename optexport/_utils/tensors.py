"""The bytes of a tensor."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, row after row; uint8, [bytes]. They share its memory where that lies so."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element contiguous memory may have any stride, which view() refuses
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
