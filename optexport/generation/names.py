"""What the tensors of a key/value cache are called: as the field does, but with underscores, as Python needs them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_PAST, _PRESENT = "past_key_values_", "present_"


def past_name(layer: int, part: str) -> str:
    """What an input is called that holds a layer's keys or values, of a part ``key`` or ``encoder_key``."""
    return f"{_PAST}{layer}_{part}"


def present_name(layer: int, part: str) -> str:
    """What the output is called that is the next call's `past_name`."""
    return f"{_PRESENT}{layer}_{part}"


def next_past(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs that hold the cache, named as the inputs of the next call."""
    return {f"{_PAST}{n.removeprefix(_PRESENT)}": t for n, t in outputs.items() if n.startswith(_PRESENT)}
