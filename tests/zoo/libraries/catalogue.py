"""Lists the models."""

from __future__ import annotations

from tests.zoo.libraries.model import Model
from tests.zoo.libraries.models import (
    diffusion,
    graphs,
    images,
    medical,
    segmentation,
    sequences,
    series,
    sounds,
    tables,
)

FIELDS = (diffusion, graphs, images, medical, segmentation, sequences, series, sounds, tables)


def models() -> dict[str, Model]:
    """Returns the models by name."""
    return {model.name: model for module in FIELDS for model in module.models()}
