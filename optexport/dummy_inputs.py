"""Inputs for a model of transformers of which nothing is known but its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from optexport.errors import TraceError

_BATCH = 2
_SEQUENCE = 9
_DECODER_SEQUENCE = 5


def _length(config: Any, longest: int = _SEQUENCE) -> int:
    return min(longest, int(getattr(config.get_text_config(), "max_position_embeddings", None) or longest))


def _token_ids(config: Any) -> torch.Tensor:
    # Unlike each other, the same every time, and clear of the special tokens at the vocabulary's start.
    size = int(getattr(config.get_text_config(), "vocab_size", 100))
    length = _length(config)
    return (torch.arange(_BATCH * length) * 7 % max(size - 5, 1) + min(4, size - 1)).reshape(_BATCH, length)


def _pixel_values(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return _wave(_BATCH, int(getattr(vision, "num_channels", 3)), int(height), int(width))


def _wave(*shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(count, dtype=torch.float32) * 0.37).reshape(shape)


_MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _token_ids,
    "decoder_input_ids": lambda config: _token_ids(config)[:, :_DECODER_SEQUENCE].clone(),
    "attention_mask": lambda config: torch.ones(_BATCH, _length(config), dtype=torch.int64),
    "decoder_attention_mask": lambda config: torch.ones(_BATCH, _length(config, _DECODER_SEQUENCE), dtype=torch.int64),
    "token_type_ids": lambda config: torch.zeros(_BATCH, _length(config), dtype=torch.int64),
    "position_ids": lambda config: torch.arange(_length(config)).expand(_BATCH, -1).clone(),
    "bbox": lambda config: torch.arange(4).expand(_BATCH, _length(config), 4).clone(),
    "pixel_values": _pixel_values,
    "input_values": lambda _: _wave(_BATCH, 16000),
    "input_features": lambda config: _wave(
        _BATCH, int(getattr(config, "num_mel_bins", 80)), 2 * int(getattr(config, "max_source_positions", 1500))
    ),
}


def dummy_inputs(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Makes inputs from the model's config.

    Args:
        model: A model of transformers.
        names: The inputs to make; by default the model's main input and what that calls for.

    Raises:
        TraceError: One of them cannot be made from a config alone.
    """
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    if names is None:
        names = _default_names(model, config, accepted)
    for name in names:
        if name not in accepted:
            raise TraceError(f"{type(model).__name__} takes no such input", place=f"input {name}")
        if name not in _MAKERS:
            raise TraceError(
                "it cannot be made from the config alone", place=f"input {name}", mend="Give example_inputs."
            )
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    made = {name: _MAKERS[name](config) for name in names}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def _default_names(model: nn.Module, config: Any, accepted: Any) -> list[str]:
    names = [str(getattr(model, "main_input_name", "input_ids"))]
    names += [name for name in ("input_ids", "pixel_values") if name in accepted and hasattr(config, "vision_config")]
    if "input_ids" in names and "attention_mask" in accepted:
        names.append("attention_mask")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        names.append("decoder_input_ids")
    return list(dict.fromkeys(names))
