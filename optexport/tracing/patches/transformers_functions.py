"""Replaces functions of torch and transformers while a transformers model is traced.

Each takes the function that it replaces, like the patches in ``transformers.exporters``. All compute the same as the
model does when it is not traced. ``tests/zoo/rescues.py`` counts the models that need each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from transformers.integrations import sdpa_attention


def skip_needless_moves(to: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Replaces ``Module.to``: modules that need no change are not touched in a trace.

    Needed by the router of Switch Transformers, which calls ``self.classifier.to(self.dtype)``.
    """

    def patched(module: torch.nn.Module, *args: Any, **kw: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kw)
        tensors = itertools.chain(module.parameters(), module.buffers())
        is_unchanged = all(
            (dtype is None or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype == dtype)
            and (device is None or tensor.device == device)
            for tensor in tensors
        )
        return module if is_unchanged else to(module, *args, **kw)

    return patched


# The attribute of a causal mask with the padding mask that it contains, or None.
_PADDING = "padding"


def remember_padding(masks: dict[str, Any]) -> dict[str, Any]:
    """Replaces the functions that make masks: causal masks remember their padding mask.

    Without a trace, a model makes no causal mask if nothing is padded, and attention that is not causal in itself then
    computes something else. The padding mask must also have as many rows as the batch.
    """
    make = masks["sdpa"]

    def patched(
        *args: Any, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kw: Any
    ) -> Any:
        if attention_mask is not None and "batch_size" in kw:
            torch._check(attention_mask.shape[0] == kw["batch_size"])
        mask = make(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **kw)
        first = kw.get("q_offset", 0)
        is_whole = isinstance(first, int) and first == 0 and kw.get("local_size") is None
        if mask is not None and is_whole and allow_is_causal_skip:
            vars(mask)[_PADDING] = attention_mask
        return mask

    return {**masks, "sdpa": patched}


def allow_unknown_length(functions: dict[str, Any]) -> dict[str, Any]:
    """Replaces attention by one that takes an unknown number of queries and ignores masks without padding.

    The function of transformers checks whether there is more than one query. That matters only for causal attention.
    Outside a trace, transformers makes no mask for attention that is not causal if nothing is padded.
    """
    attend = functions["sdpa"]

    def patched(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kw: Any) -> tuple[Any, None]:
        is_causal = kw.get("is_causal")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal and attention_mask is not None and _PADDING in vars(attention_mask):
            padding = vars(attention_mask)[_PADDING]
            attention_mask = None if padding is None else attention_mask | padding.all()
        length = query.shape[2]
        is_known = not isinstance(length, torch.SymInt) or not free_unbacked_symbols(length)
        if is_known or (causal and attention_mask is None) or kw.get("position_bias") is not None:
            return attend(module, query, key, value, attention_mask, **kw)  # type: ignore[no-any-return]
        groups = getattr(module, "num_key_value_groups", 1)
        result = torch.nn.functional.scaled_dot_product_attention(
            query,
            sdpa_attention.repeat_kv(key, groups),
            sdpa_attention.repeat_kv(value, groups),
            attn_mask=attention_mask,
            dropout_p=kw.get("dropout", 0.0),
            scale=kw.get("scaling"),
        )
        return result.transpose(1, 2).contiguous(), None

    return {**functions, "sdpa": patched}


def omit_empty_mask(is_ignored: Callable[..., bool]) -> Callable[..., bool]:
    """Replaces the test whether a mask can be omitted, which is always False in an export.

    Without a padding mask and a window, no mask is needed at any size, and some models accept none.
    Needed by Informer (tests/zoo/rescues.py).
    """

    def patched(padding_mask: Any, kv_length: Any, local_attention_size: int | None = None) -> bool:
        if padding_mask is None and local_attention_size is None:
            return True
        return is_ignored(padding_mask, kv_length, local_attention_size)

    return patched


def apply_head_norms(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the exporter's attention within segments, which lacks norms.

    The norms of queries and keys are missing if one layer computes queries, keys and values. Here that layer returns
    normed queries and keys. Needed by GLM-OCR's vision model (tests/tracing/test_dynamo_exporter.py).
    """

    def patched(module: Any, *args: Any, **kw: Any) -> Any:
        if not (hasattr(module, "qkv") and hasattr(module, "q_norm") and hasattr(module, "k_norm")):
            return attend(module, *args, **kw)
        layer = module.qkv

        def normed_qkv(x: torch.Tensor) -> torch.Tensor:
            query, key, value = layer(x).unflatten(-1, (3, module.num_heads, -1)).unbind(-3)
            return torch.stack((module.q_norm(query), module.k_norm(key), value), dim=-3).flatten(-3)

        vars(module)["qkv"] = normed_qkv  # attributes take precedence over modules of the same name
        try:
            return attend(module, *args, **kw)
        finally:
            del vars(module)["qkv"]

    return patched
