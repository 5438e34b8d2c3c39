"""Sequence models: x-transformers and kinds of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.model import Input, Model, ids, mask

LENGTHS = ({"batch": 2, "length": 12}, {"batch": 3, "length": 7}, {"batch": 1, "length": 31})
_TOKENS = Input(("batch", "length"), ids(100))


def _transformer(kind: str, **options: Any) -> nn.Module:
    import x_transformers

    layers = getattr(x_transformers, kind)(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    model: nn.Module = x_transformers.TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)
    return model


_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("Encoder", {}),
    "decoder": ("Decoder", {}),
    "rotary": ("Decoder", {"rotary_pos_emb": True}),
    "alibi": ("Decoder", {"alibi_pos_bias": True, "alibi_num_heads": 2}),
    "relative_bias": ("Encoder", {"rel_pos_bias": True}),
    "rmsnorm_swiglu": ("Decoder", {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True}),
    "grouped_queries": ("Decoder", {"attn_kv_heads": 1}),
    "qk_norm": ("Encoder", {"attn_qk_norm": True}),
}


def models() -> Iterator[Model]:
    """Yields the models."""
    dims = {"length": {"max": 64}}
    for name, (kind, options) in _OPTIONS.items():
        yield Model(
            f"x-transformers/{name}", lambda k=kind, o=options: _transformer(k, **o), {"x": _TOKENS}, LENGTHS, dims
        )
    yield Model(
        "x-transformers/encoder_mask",
        lambda: _transformer("Encoder"),
        {"x": _TOKENS, "mask": Input(("batch", "length"), mask)},
        LENGTHS,
        dims,
    )
