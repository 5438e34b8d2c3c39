"""Networks of segmentation-models-pytorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.absent import absent
from tests.zoo.libraries.model import Model
from tests.zoo.libraries.models.images import EVEN_SIZE, IMAGE


def _smp(name: str, **options: Any) -> nn.Module:
    with absent("torchvision"):
        import segmentation_models_pytorch as networks
    model: nn.Module = getattr(networks, name)(encoder_weights=None, in_channels=3, classes=2, **options)
    return model


_NETWORKS: dict[str, dict[str, Any]] = {
    "Unet": {"encoder_depth": 3, "decoder_channels": (32, 16, 8)},
    "FPN": {},
    "Linknet": {},
    "PSPNet": {},
    "DeepLabV3Plus": {"decoder_channels": 16},
}


def models() -> Iterator[Model]:
    """Yields the models."""
    dims = {axis: {"min": 32, "multiple_of": 32} for axis in ("height", "width")}
    for name, options in _NETWORKS.items():
        yield Model(
            f"segmentation-models-pytorch/{name.lower()}",
            lambda name=name, options=options: (
                _smp(name, encoder_name="timm-mobilenetv3_small_minimal_100", **options)
                if name != "DeepLabV3Plus"
                else _smp(name, encoder_name="tu-resnet10t", **options)
            ),
            {"x": IMAGE},
            EVEN_SIZE,
            dims,
        )
