"""Images as image processors take them: red, green and blue in 8 bits each, upright. Needs no torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from optexport._utils.extras import check_extra
from optexport.errors import ConfigError, first_line

# So many channels has an image that is transparent in places.
_WITH_ALPHA = 4
# What Pillow calls pixels of more than 8 bits, or of fractions: made red, green and blue it cuts them off, so that an
# image of 16 bits is white.
_DEEP = ("I", "F")


def read(image: Any) -> Any:
    """Reads an image, and turns it as its camera was held, which Exif tells, as transformers does.

    Args:
        image: A path, an image of PIL, or an array of uint8 [height, width], with or without channels.

    Returns:
        An image of PIL, or the array where it has channels of colours already.

    Raises:
        ConfigError: It is none of these, cannot be read, or has pixels of more than 8 bits; or Pillow is missing.
    """
    if isinstance(image, np.ndarray) and image.dtype != np.uint8:
        raise ConfigError(f"it is {image.dtype}", location="images", hint="Give uint8, from 0 to 255.")
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
        raise ConfigError(f"it is a {kind}, and neither a path nor an image of PIL or numpy", location="images")
    try:
        with Image.open(image) as opened:
            return _upright(opened, str(image))
    except ConfigError:
        raise
    except Exception as error:  # Pillow raises many kinds
        raise ConfigError(f"it is no image that can be read: {first_line(error)}", location=str(image)) from error


def _upright(image: Any, location: str) -> Any:
    from PIL import ImageOps

    if image.mode.startswith(_DEEP):
        raise ConfigError(
            f"its pixels have more than 8 bits (Pillow's mode {image.mode})",
            location=location,
            hint="Scale them to 0 to 255 as the model's training data was, and save it with 8 bits.",
        )
    return ImageOps.exif_transpose(image).convert("RGB")
