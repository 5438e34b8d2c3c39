"""Classifiers of images: timm, vit-pytorch and others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.absent import absent
from tests.zoo.libraries.model import Input, Model

# Any height and width, as a convolutional network takes them.
IMAGE = Input(("batch", 3, "height", "width"))
ANY_SIZE = (
    {"batch": 2, "height": 64, "width": 96},
    {"batch": 3, "height": 96, "width": 64},
    {"batch": 1, "height": 75, "width": 110},
)
EVEN_SIZE = (
    {"batch": 2, "height": 64, "width": 96},
    {"batch": 3, "height": 96, "width": 64},
    {"batch": 1, "height": 128, "width": 160},
)
BATCHES = ({"batch": 2}, {"batch": 1}, {"batch": 5})

# Networks of any size.
_CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "test_resnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "resnet10t": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "ghostnet_050": {},
    "tf_efficientnet_lite0": {},
}
# Networks of images of one size, with the size.
_FIXED: dict[str, tuple[int, dict[str, Any]]] = {
    "test_vit": (160, {}),
    "levit_128s": (224, {}),
    "deit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2)}),
}


def _timm(name: str, **options: Any) -> nn.Module:
    with absent("torchvision"):
        import timm
    model: nn.Module = timm.create_model(name, num_classes=10, **options)
    return model


def _vit(module: str, name: str, **options: Any) -> nn.Module:
    with absent("torchvision"):
        networks = importlib.import_module(f"vit_pytorch.{module}")
    model: nn.Module = getattr(networks, name)(**options)
    return model


def _square(side: int, channels: int = 3) -> Input:
    return Input(("batch", channels, side, side))


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, options in _CONVOLUTIONAL.items():
        dims = {"height": {"min": 32}, "width": {"min": 32}}
        yield Model(f"timm/{name}", lambda n=name, o=options: _timm(n, **o), {"x": IMAGE}, ANY_SIZE, dims)
    for name, (side, options) in _FIXED.items():
        yield Model(f"timm/{name}", lambda n=name, o=options: _timm(n, **o), {"x": _square(side)}, BATCHES)
    yield from _vit_pytorch()


_SMALL = {"num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "image_size": 32, "patch_size": 8}
_CCT = {
    "img_size": 32,
    "embedding_dim": 32,
    "n_conv_layers": 1,
    "kernel_size": 3,
    "stride": 1,
    "padding": 1,
    "pooling_kernel_size": 3,
    "pooling_stride": 2,
    "pooling_padding": 1,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 10,
    "positional_embedding": "learnable",
}
_CROSS = {
    "image_size": 32,
    "num_classes": 10,
    "depth": 1,
    "cross_attn_depth": 1,
    "cross_attn_heads": 2,
} | {
    f"{branch}_{option}": value
    for branch, values in {"sm": (16, 4, 1, 2, 32), "lg": (32, 8, 1, 2, 32)}.items()
    for option, value in zip(("dim", "patch_size", "enc_depth", "enc_heads", "enc_mlp_dim"), values, strict=True)
}
# Class, name of its argument, and options, by module.
_VIT_PYTORCH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViT", "img", _SMALL),
    "simple_vit": ("SimpleViT", "img", _SMALL),
    "cait": ("CaiT", "img", {**_SMALL, "cls_depth": 1}),
    "deepvit": ("DeepViT", "img", _SMALL),
    "cct": ("CCT", "x", _CCT),
    "cross_vit": ("CrossViT", "img", _CROSS),
}


def _vit_pytorch() -> Iterator[Model]:
    for module, (name, argument, options) in _VIT_PYTORCH.items():
        yield Model(
            f"vit-pytorch/{module}",
            lambda m=module, n=name, o=options: _vit(m, n, **o),
            {argument: _square(32)},
            BATCHES,
        )
