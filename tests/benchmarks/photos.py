"""Crops of the photos that ship with scikit-image, scikit-learn and matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

# The package that the environment of the tests lacks.
PACKAGE = "scikit-image==0.26.0"
_SIZE = 224
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FILES = {
    "skimage": [
        f"data/{name}"
        for name in (
            *("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg"),
            *("motorcycle_left.png", "retina.jpg", "rocket.jpg"),
        )
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "matplotlib": ["mpl-data/sample_data/grace_hopper.jpg"],
}


def list_photos() -> list[Path]:
    """Returns the twelve photos."""
    photos = []
    for package, files in _FILES.items():
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        photos += [Path(spec.submodule_search_locations[0]) / file for file in files]
    return photos


def crop(photos: list[Path], count: int, seed: int) -> torch.Tensor:
    """Returns random squares of photos in turn, some mirrored, normalized as for ImageNet: (count, 3, 224, 224)."""
    random = np.random.default_rng(seed)
    crops = []
    for index in range(count):
        image = Image.open(photos[index % len(photos)]).convert("RGB")
        side = int(min(image.size) * random.uniform(0.6, 1.0))
        left, top = (int(random.integers(0, length - side + 1)) for length in image.size)
        square = image.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        pixels = np.asarray(square, np.float32)[:, :: random.choice([-1, 1])]
        crops.append(((pixels / 255 - _MEAN) / _DEVIATION).transpose(2, 0, 1))
    return torch.tensor(np.stack(crops), dtype=torch.float32)
