"""Converts a transformers key/value cache to plain tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from optexport.errors import TraceError
from optexport.generation.names import past_name, present_name

Tensors = dict[str, torch.Tensor]

NO_CACHE_HINT = "Remove [generation] to export one forward pass without a cache."


class _FullLayer(DynamicLayer):
    """A layer with keys and values of any length, also 0; masks replace sliding windows."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' class
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[-2]  # no test for an empty cache, because a trace would fix its result


def to_cache(inputs: Mapping[str, torch.Tensor], layers: Iterable[int], prefix: str = "") -> DynamicCache:
    """Returns a cache with keys and values.

    Args:
        inputs: Tensors by `past_name`, each [batch, heads, length, size of a head].
        prefix: A prefix of ``key`` and ``value``, such as ``encoder_``.
    """
    cache = DynamicCache()
    cache.layers = [
        _FullLayer(inputs[past_name(layer, f"{prefix}key")], inputs[past_name(layer, f"{prefix}value")])
        for layer in layers
    ]
    return cache


def to_tensors(cache: Any, prefix: str = "") -> Tensors:
    """Returns the keys and values of a cache by `present_name`."""
    named = {}
    for index, layer in enumerate(cache.layers):
        named[present_name(index, f"{prefix}key")] = layer.keys
        named[present_name(index, f"{prefix}value")] = layer.values
    return named


def empty_past(cache: Any, batch: int, prefix: str = "") -> Tensors:
    """Returns an empty cache with the heads of another, by `past_name`."""
    return {
        past_name(index, f"{prefix}{part}"): tensor.new_zeros(batch, tensor.shape[1], 0, tensor.shape[3])
        for index, layer in enumerate(cache.layers)
        for part, tensor in (("key", layer.keys), ("value", layer.values))
    }


def check_cache(cache: Any, model: str) -> Sequence[DynamicCache]:
    """Returns the caches of a model: one, or two for self-attention and cross-attention.

    Raises:
        TraceError: The model has no cache, or one that is not made of keys and values that grow.
    """
    if cache is None:
        raise TraceError(
            "the model does not use a key/value cache in generate()",
            location=f"generation: {model}",
            hint=f"If the model supports a cache, set use_cache in its generation config. {NO_CACHE_HINT}",
        )
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if type(cache) is EncoderDecoderCache else [cache]
    for part in parts:
        if type(part) is not DynamicCache:
            raise TraceError(
                f"unsupported cache (expected DynamicCache, found {type(part).__name__})",
                location=f"generation: {model}",
                hint=f"If the generation config sets cache_implementation, remove it. {NO_CACHE_HINT}",
            )
        layers: list[Any] = part.layers
        for index, layer in enumerate(layers):
            is_supported = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            if not is_supported or not layer.is_initialized:
                kind = f"{'an empty ' if is_supported else ''}{type(layer).__name__}"
                raise TraceError(
                    f"unsupported layer {index} of the cache (expected keys and values, found {kind})",
                    location=f"generation: {model}",
                    hint=NO_CACHE_HINT,
                )
    return parts
