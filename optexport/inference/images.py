"""Reads images for image processors: RGB, 8 bits, upright; imports no torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from optexport._utils.extras import check_extra
from optexport.errors import ConfigError, first_line

# The channels of an image with transparency.
_WITH_ALPHA = 4
# Pillow's modes with more than 8 bits, or with floats. Its conversion to RGB clips them: a 16-bit image becomes white.
_DEEP = ("I", "F")


def read(image: Any) -> Any:
    """Reads an image, and rotates it as its Exif data say, like transformers.

    Args:
        image: A path, a PIL image, or a uint8 array [height, width] or [height, width, channels].

    Returns:
        A PIL image, or the array if it has color channels.

    Raises:
        ConfigError: The image has another type, cannot be read, or has more than 8 bits; or Pillow is missing.
    """
    if isinstance(image, np.ndarray) and image.dtype != np.uint8:
        raise ConfigError(f"expected dtype uint8, found {image.dtype}", location="images", hint="Scale to 0 to 255.")
    if isinstance(image, np.ndarray) and image.ndim > 2 and image.shape[-1] != _WITH_ALPHA:
        return image
    check_extra("images", "images")
    from PIL import Image

    if isinstance(image, np.ndarray):
        return Image.fromarray(image).convert("RGB")
    if isinstance(image, Image.Image):
        return _upright(image, "images")
    if not isinstance(image, str | os.PathLike):
        kind = type(image).__name__
        raise ConfigError(f"expected a path, a PIL image or a numpy array, found {kind}", location="images")
    try:
        with Image.open(image) as opened:
            return _upright(opened, str(image))
    except ConfigError:
        raise
    except Exception as error:  # Pillow raises many kinds
        raise ConfigError(f"the file cannot be read as an image: {first_line(error)}", location=str(image)) from error


def _upright(image: Any, location: str) -> Any:
    from PIL import ImageOps

    if image.mode.startswith(_DEEP):
        raise ConfigError(
            f"the pixels have more than 8 bits (Pillow's mode {image.mode})",
            location=location,
            hint="Scale the pixels to 0 to 255 like the model's training data, and save the image with 8 bits.",
        )
    return ImageOps.exif_transpose(image).convert("RGB")
