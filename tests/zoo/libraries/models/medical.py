"""Networks of MONAI for medical images of two and three dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.model import Input, Model

_IMAGE = Input(("batch", 1, "height", "width"))
_VOLUME = Input(("batch", 1, "depth", "height", "width"))
_SIZES = (
    {"batch": 2, "depth": 16, "height": 32, "width": 48},
    {"batch": 1, "depth": 32, "height": 48, "width": 32},
    {"batch": 3, "depth": 16, "height": 64, "width": 16},
)
_MULTIPLE = {name: {"min": 16, "multiple_of": 16} for name in ("depth", "height", "width")}


def _monai(name: str, *arguments: Any, **options: Any) -> nn.Module:
    from monai.networks import nets

    model: nn.Module = getattr(nets, name)(*arguments, **options)
    return model


def _any(name: str, call: str, make: Any, image: Input = _IMAGE) -> Model:
    sizes = [{axis: size for axis, size in sizes.items() if axis in image.shape} for sizes in _SIZES]
    dims = {axis: limits for axis, limits in _MULTIPLE.items() if axis in image.shape}
    return Model(f"monai/{name}", make, {call: image}, sizes, dims)


def models() -> Iterator[Model]:
    """Yields the models."""
    two = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    three = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    unet = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}
    yield _any("unet_2d", "x", lambda: _monai("UNet", **two, **unet))
    yield _any("unet_3d", "x", lambda: _monai("UNet", **three, **unet), _VOLUME)
    yield _any("basic_unet", "x", lambda: _monai("BasicUNet", **two, features=(8, 8, 16, 16, 16, 8)))
    yield _any("attention_unet", "x", lambda: _monai("AttentionUnet", **two, channels=(8, 16, 32), strides=(2, 2)))
    yield _any("seg_resnet", "x", lambda: _monai("SegResNet", **two, init_filters=8))
    yield _any("seg_resnet_3d", "x", lambda: _monai("SegResNet", **three, init_filters=8), _VOLUME)
    yield _any("densenet", "x", lambda: _monai("DenseNet", **two, init_features=8, growth_rate=4, block_config=(2, 2)))
    yield Model(
        "monai/unetr",
        lambda: _monai(
            "UNETR", 1, 2, (32, 32), feature_size=8, hidden_size=32, mlp_dim=64, num_heads=2, spatial_dims=2
        ),
        {"x_in": Input(("batch", 1, 32, 32))},
        ({"batch": 2}, {"batch": 1}, {"batch": 4}),
    )
