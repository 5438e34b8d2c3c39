"""What stands in for functions of torch and transformers while a model of transformers is traced.

Each takes the function that it replaces, as the exporters' patches do, and computes what the model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from transformers.integrations import sdpa_attention


def unless_it_is(to: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """``Module.to`` that leaves a module alone which is there already: none may change while it is traced."""

    def patched(module: torch.nn.Module, *args: Any, **kw: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kw)
        tensors = itertools.chain(module.parameters(), module.buffers())
        is_there = all(
            (dtype is None or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype == dtype)
            and (device is None or tensor.device == device)
            for tensor in tensors
        )
        return module if is_there else to(module, *args, **kw)

    return patched


# A causal mask bears under this name what padding it holds: a mask of tokens, or None.
_PADDING = "padding"


def that_know_their_padding(masks: dict[str, Any]) -> dict[str, Any]:
    """Makers of masks, of which causal ones tell attention what they hide for being padding.

    Where that is nothing the model makes none, when it is not traced. Attention that is not causal by itself computes
    something else then; and a mask of another number of rows, which would be none of the batch's, is not looked at.
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


def of_unknown_length(functions: dict[str, Any]) -> dict[str, Any]:
    """Attention whose queries' number only running it tells, as that of windows cut by values: it is not causal.

    That of transformers asks whether there is more than one query, though nothing hangs on it here. A causal mask
    that the model leaves out where nothing is padded is left out there, if attention is not causal by itself.
    """
    attend = functions["sdpa"]

    def patched(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kw: Any) -> tuple[Any, None]:
        given = kw.get("is_causal")
        causal = getattr(module, "is_causal", True) if given is None else given
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


def none_that_hides_nothing(is_ignored: Callable[..., bool]) -> Callable[..., bool]:
    """Whether a mask may be left out, which that of transformers denies of every mask while it exports.

    Where nothing is padded and no window is set none is needed at any size, and some models take none.
    """

    def patched(padding_mask: Any, kv_length: Any, local_attention_size: int | None = None) -> bool:
        if padding_mask is None and local_attention_size is None:
            return True
        return is_ignored(padding_mask, kv_length, local_attention_size)

    return patched


def with_norms_of_heads(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention within segments, which that of transformers computes without the norms of queries and keys.

    It leaves them out where one layer gives queries, keys and values: that layer gives them normed here.
    """

    def patched(module: Any, *args: Any, **kw: Any) -> Any:
        if not (hasattr(module, "qkv") and hasattr(module, "q_norm") and hasattr(module, "k_norm")):
            return attend(module, *args, **kw)
        layer = module.qkv

        def normed(x: torch.Tensor) -> torch.Tensor:
            query, key, value = layer(x).unflatten(-1, (3, module.num_heads, -1)).unbind(-3)
            return torch.stack((module.q_norm(query), module.k_norm(key), value), dim=-3).flatten(-3)

        vars(module)["qkv"] = normed  # before that of the same name among its modules
        try:
            return attend(module, *args, **kw)
        finally:
            del vars(module)["qkv"]

    return patched
