"""Parts of diffusion models: U-Nets, transformers and autoencoders of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.model import Input, Model, ids, network
from tests.zoo.libraries.models.images import EVEN_SIZE, IMAGE

_LATENTS = (
    {"batch": 2, "height": 16, "width": 24, "length": 5},
    {"batch": 1, "height": 32, "width": 16, "length": 9},
    {"batch": 3, "height": 24, "width": 40, "length": 3},
)
_LATENT = Input(("batch", 4, "height", "width"))
_STEP = Input(("batch",), ids(1000))
_TEXT = Input(("batch", "length", 32))
_MULTIPLE = {name: {"min": 8, "multiple_of": 8} for name in ("height", "width")}


def _diffusers(name: str, **options: Any) -> Callable[[], nn.Module]:
    return network(f"diffusers:{name}", **options)


def models() -> Iterator[Model]:
    """Yields the models."""
    blocks = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    yield Model(
        "diffusers/unet2d",
        _diffusers(
            "UNet2DModel",
            sample_size=16,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            **blocks,
        ),
        {"sample": _LATENT, "timestep": _STEP},
        [{k: v for k, v in sizes.items() if k != "length"} for sizes in _LATENTS],
        _MULTIPLE,
    )
    yield Model(
        "diffusers/unet2d_condition",
        _diffusers(
            "UNet2DConditionModel",
            sample_size=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            **blocks,
        ),
        {"sample": _LATENT, "timestep": _STEP, "encoder_hidden_states": _TEXT},
        _LATENTS,
        _MULTIPLE,
    )
    autoencoder = {
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **blocks,
    }
    yield Model(
        "diffusers/autoencoder_kl",
        _diffusers("AutoencoderKL", latent_channels=4, **autoencoder),
        {"sample": IMAGE},
        EVEN_SIZE,
        _MULTIPLE,
    )
    yield Model(
        "diffusers/vq_model",
        _diffusers("VQModel", latent_channels=3, num_vq_embeddings=32, **autoencoder),
        {"sample": IMAGE},
        EVEN_SIZE,
        _MULTIPLE,
    )
    yield Model(
        "diffusers/autoencoder_tiny",
        _diffusers(
            "AutoencoderTiny",
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        {"sample": IMAGE},
        EVEN_SIZE,
        _MULTIPLE,
    )
    yield Model(
        "diffusers/dit",
        _diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=2,
            sample_size=16,
            num_embeds_ada_norm=1000,
            norm_num_groups=4,
        ),
        {"hidden_states": Input(("batch", 4, 16, 16)), "timestep": _STEP, "class_labels": Input(("batch",), ids(10))},
        ({"batch": 2}, {"batch": 1}, {"batch": 5}),
    )
    heads = {"num_attention_heads": 2, "attention_head_dim": 8}
    yield Model(
        "diffusers/pixart",
        _diffusers(
            "PixArtTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=1,
            cross_attention_dim=16,
            sample_size=16,
            caption_channels=32,
            norm_num_groups=4,
            use_additional_conditions=False,
            **heads,
        ),
        {"hidden_states": Input(("batch", 4, 16, 16)), "encoder_hidden_states": _TEXT, "timestep": _STEP},
        ({"batch": 2, "length": 5}, {"batch": 1, "length": 9}, {"batch": 3, "length": 3}),
        constants={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    )
    yield Model(
        "diffusers/sd3",
        _diffusers(
            "SD3Transformer2DModel",
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=12,
            pos_embed_max_size=32,
            **heads,
        ),
        {
            "hidden_states": _LATENT,
            "encoder_hidden_states": _TEXT,
            "pooled_projections": Input(("batch", 12)),
            "timestep": _STEP,
        },
        _LATENTS,
        {axis: {"min": 2, "max": 64, "multiple_of": 2} for axis in ("height", "width")},
    )
    yield Model(
        "diffusers/prior_transformer",
        _diffusers(
            "PriorTransformer", embedding_dim=16, num_embeddings=5, additional_embeddings=4, num_layers=1, **heads
        ),
        {
            "hidden_states": Input(("batch", 16)),
            "timestep": _STEP,
            "proj_embedding": Input(("batch", 16)),
            "encoder_hidden_states": Input(("batch", 5, 16)),
        },
        ({"batch": 2}, {"batch": 1}, {"batch": 5}),
    )
    yield Model(
        "diffusers/transformer_2d",
        _diffusers(
            "Transformer2DModel", in_channels=16, num_layers=1, norm_num_groups=4, cross_attention_dim=32, **heads
        ),
        {"hidden_states": Input(("batch", 16, "height", "width")), "encoder_hidden_states": _TEXT},
        _LATENTS,
    )
    yield Model(
        "diffusers/controlnet",
        _diffusers(
            "ControlNetModel",
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            conditioning_embedding_out_channels=(8, 16),
            **blocks,
        ),
        {
            "sample": Input(("batch", 4, 16, 24)),
            "timestep": _STEP,
            "encoder_hidden_states": _TEXT,
            "controlnet_cond": Input(("batch", 3, 32, 48)),
        },
        ({"batch": 2, "length": 5}, {"batch": 1, "length": 9}, {"batch": 3, "length": 3}),
    )
