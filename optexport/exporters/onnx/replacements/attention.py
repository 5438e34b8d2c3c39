"""Attention, with zeros for rows that mask every key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kw: Any,
) -> torch.Tensor:
    """Calls the operator with four axes, because ``torch.onnx`` supports no other number."""
    if query.dim() == 4:
        return aten.scaled_dot_product_attention.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, *args, **kw
        )

    def with_four_axes(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, *[1] * (3 - x.dim()), *x.shape[-3:])

    if attn_mask is not None and query.dim() > 4:
        attn_mask = with_four_axes(attn_mask.expand(*query.shape[:-1], key.shape[-2]))
    result = _attend(*map(with_four_axes, (query, key, value)), attn_mask, *args, **kw)
    return result.reshape(*query.shape[:-1], value.shape[-1])


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    attend: Callable[..., torch.Tensor] = _attend,
    **kw: Any,
) -> torch.Tensor:
    """Computes attention with zeros for rows that mask every key, as torch does.

    ONNX Runtime returns NaN for such rows. transformers' own patch also zeroes rows whose mask is the smallest number
    throughout, but in torch these rows attend to all keys equally.

    Args:
        query: Of shape [..., queries, features].
        key: Of shape [..., keys, features].
        value: Of shape [..., keys, features].
        attn_mask: Boolean or additive, broadcastable to [..., queries, keys].
        attend: Operator that computes attention with an additive mask.
    """
    if attn_mask is None:
        return attend(query, key, value, None, *args, **kw)
    # Half of the smallest number, so that adding a score stays finite. The operator of opset 23 skips rows that
    # contain only the smallest number.
    low = torch.finfo(query.dtype).min / 2
    if attn_mask.dtype == torch.bool:
        attended = attn_mask.to(query.dtype).amax(dim=-1, keepdim=True)
        # No row is NaN here, so a product suffices. ONNX Runtime computes it faster than Where.
        return attend(query, key, value, (~attn_mask).to(query.dtype) * low, *args, **kw) * attended
    finite = attn_mask > float("-inf")
    result = attend(query, key, value, torch.where(finite, attn_mask.clamp(min=low), attn_mask), *args, **kw)
    unattended = finite.to(query.dtype).sum(dim=-1, keepdim=True) < 1
    return torch.where(unattended, torch.zeros((), dtype=result.dtype, device=result.device), result)


def attention_by_products(*args: Any, **kw: Any) -> torch.Tensor:
    """Computes `attention` with two matrix products and a softmax."""
    return attention(*args, attend=_attend_by_products, **kw)


def _attend_by_products(  # noqa: PLR0913 - the parameters of scaled_dot_product_attention
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes attention in a form that lets ONNX Runtime fuse the transpose into the product.

    The formula is in the documentation of ``torch.nn.functional.scaled_dot_product_attention``. ``torch.onnx`` reshapes
    the keys to three dimensions before it transposes them. This costs a copy of the keys and a dozen shape nodes.
    """
    if is_causal or enable_gqa or dropout_p or isinstance(scale, torch.SymFloat):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, dim=-1), value)
