"""Sequence models: x-transformers and kinds of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.model import Input, Model, ids, mask, network

LENGTHS = ({"batch": 2, "length": 12}, {"batch": 3, "length": 7}, {"batch": 1, "length": 31})
_TOKENS = Input(("batch", "length"), ids(100))
_VECTORS = Input(("batch", "length", 32))
_LIMIT = {"length": {"max": 64}}

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("Encoder", {}),
    "decoder": ("Decoder", {}),
    "rotary": ("Decoder", {"rotary_pos_emb": True}),
    "alibi": ("Decoder", {"alibi_pos_bias": True, "alibi_num_heads": 2}),
    "relative_bias": ("Encoder", {"rel_pos_bias": True}),
    "rmsnorm_swiglu": ("Decoder", {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True}),
    "grouped_queries": ("Decoder", {"attn_kv_heads": 1}),
    "qk_norm": ("Encoder", {"attn_qk_norm": True}),
    "talking_heads": ("Encoder", {"attn_pre_talking_heads": True}),
    "memory_key_values": ("Encoder", {"attn_num_mem_kv": 4}),
    "sandwich_norm": ("Encoder", {"sandwich_norm": True}),
    "residual_attention": ("Encoder", {"residual_attn": True}),
    "macaron": ("Encoder", {"macaron": True}),
    "shift_tokens": ("Decoder", {"shift_tokens": 1}),
    "dynamic_position_bias": ("Decoder", {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False}),
    "scalenorm": ("Encoder", {"use_scalenorm": True}),
    "gate_values": ("Decoder", {"attn_gate_values": True}),
    "relu_squared": ("Decoder", {"ff_relu_squared": True}),
}


def _wrapper(kind: str, **options: Any) -> Any:
    def make() -> nn.Module:
        layers = network(f"x_transformers:{kind}", dim=32, depth=2, heads=2, attn_dim_head=16, **options)()
        return network("x_transformers:TransformerWrapper", num_tokens=100, max_seq_len=64, attn_layers=layers)()

    return make


def _continuous() -> nn.Module:
    layers = network("x_transformers:Encoder", dim=32, depth=2, heads=2, attn_dim_head=16)()
    return network(
        "x_transformers:ContinuousTransformerWrapper", dim_in=8, dim_out=4, max_seq_len=64, attn_layers=layers
    )()


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, (kind, options) in _OPTIONS.items():
        yield Model(f"x-transformers/{name}", _wrapper(kind, **options), {"x": _TOKENS}, LENGTHS, _LIMIT)
    masked = {"x": _TOKENS, "mask": Input(("batch", "length"), mask)}
    yield Model("x-transformers/encoder_mask", _wrapper("Encoder"), masked, LENGTHS, _LIMIT)
    yield Model("x-transformers/continuous", _continuous, {"x": Input(("batch", "length", 8))}, LENGTHS, _LIMIT)
    yield Model(
        "linformer/linformer",
        network("linformer:Linformer", dim=32, seq_len=16, depth=2, heads=2, k=8),
        {"x": Input(("batch", 16, 32))},
        [{"batch": size} for size in (2, 1, 5)],
    )
    yield Model(
        "local-attention/transformer",
        network(
            "local_attention:LocalTransformer",
            num_tokens=100,
            dim=32,
            depth=2,
            max_seq_len=64,
            local_attn_window_size=8,
            heads=2,
            dim_head=16,
        ),
        {"x": _TOKENS},
        LENGTHS,
        _LIMIT,
    )
    yield Model(
        "performer-pytorch/performer",
        network("performer_pytorch:Performer", dim=32, depth=1, heads=2, dim_head=16),
        {"x": _VECTORS},
        LENGTHS,
    )
    yield Model(
        "perceiver-pytorch/perceiver_io",
        network(
            "perceiver_pytorch:PerceiverIO",
            dim=32,
            depth=1,
            queries_dim=32,
            num_latents=8,
            latent_dim=32,
            latent_heads=2,
            latent_dim_head=16,
            cross_dim_head=16,
        ),
        {"data": _VECTORS},
        LENGTHS,
    )
