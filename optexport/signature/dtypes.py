"""Dtypes that inputs may have, because torch and all files of a bundle support them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optexport.errors import ConfigError

_SUPPORTED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)


def check(batch: Mapping[str, torch.Tensor], location: str) -> None:
    """Checks the dtypes of inputs.

    Raises:
        ConfigError: A dtype is not supported.
    """
    for name, tensor in batch.items():
        if tensor.dtype in _SUPPORTED:
            continue
        hint = "Convert it to a dtype that can represent its numbers, such as int64 or float32."
        if tensor.dtype.is_complex:
            hint = "Convert it to complex64, or make the real and the imaginary part two inputs."
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"the dtype of {name}, {dtype}, is not supported by the files of a bundle", location=location, hint=hint
        )
