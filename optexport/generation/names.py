"""Names of the tensors of a key/value cache: the usual names, with underscores for Python."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_PAST, _PRESENT = "past_key_values_", "present_"


def past_name(layer: int, part: str) -> str:
    """Returns the input name of a layer's cache; ``part`` is ``key`` or ``encoder_key``, say."""
    return f"{_PAST}{layer}_{part}"


def present_name(layer: int, part: str) -> str:
    """Returns the output name of a layer's keys or values, see `past_name`."""
    return f"{_PRESENT}{layer}_{part}"


def next_past(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the outputs that are the cache, renamed to inputs of the next call."""
    return {f"{_PAST}{n.removeprefix(_PRESENT)}": t for n, t in outputs.items() if n.startswith(_PRESENT)}
