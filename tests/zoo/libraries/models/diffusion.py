"""Parts of diffusion models: U-Nets, transformers and autoencoders of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.absent import absent
from tests.zoo.libraries.model import Input, Model, ids
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


def _diffusers(name: str, **options: Any) -> nn.Module:
    with absent("torchvision"):
        import diffusers
    model: nn.Module = getattr(diffusers, name)(**options)
    return model


def models() -> Iterator[Model]:
    """Yields the models."""
    blocks = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    yield Model(
        "diffusers/unet2d",
        lambda: _diffusers(
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
        lambda: _diffusers(
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
        lambda: _diffusers("AutoencoderKL", latent_channels=4, **autoencoder),
        {"sample": IMAGE},
        EVEN_SIZE,
        _MULTIPLE,
    )
    yield Model(
        "diffusers/vq_model",
        lambda: _diffusers("VQModel", latent_channels=3, num_vq_embeddings=32, **autoencoder),
        {"sample": IMAGE},
        EVEN_SIZE,
        _MULTIPLE,
    )
    yield Model(
        "diffusers/autoencoder_tiny",
        lambda: _diffusers(
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
        lambda: _diffusers(
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
