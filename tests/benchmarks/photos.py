"""Inputs of convolution nets: crops of photos that packages ship, and centers of all images of a folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

# The package that the environment of the tests lacks.
PACKAGE = "scikit-image==0.26.0"
_SIZE, _SHORTER_SIDE = 224, 256
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
        pixels = _pixels(image, (left, top, left + side, top + side))
        crops.append(pixels[:, :: random.choice([-1, 1])])
    return _normalize(crops)


def list_images(folder: Path) -> list[Path]:
    """Returns the JPEG and PNG files of a folder, by name."""
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in {".jpeg", ".jpg", ".png"})


def crop_center(images: list[Path]) -> torch.Tensor:
    """Returns the middle 224 pixels of images whose shorter side becomes 256: (images, 3, 224, 224), normalized."""
    centers = []
    for file in images:
        image = Image.open(file).convert("RGB")
        side = min(image.size) * _SIZE / _SHORTER_SIDE
        left, top = ((length - side) / 2 for length in image.size)
        centers.append(_pixels(image, (left, top, left + side, top + side)))
    return _normalize(centers)


def _pixels(image: Image.Image, box: tuple[float, float, float, float]) -> np.ndarray:
    return np.asarray(image.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC, box), np.float32)


def _normalize(images: list[np.ndarray]) -> torch.Tensor:
    values = (np.stack(images) / 255 - np.array(_MEAN)) / np.array(_DEVIATION)
    return torch.tensor(values.transpose(0, 3, 1, 2), dtype=torch.float32)
