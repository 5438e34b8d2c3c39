"""Converts the rescaling and normalization of an image processor to a shift and a factor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optexport.config.schema import IMAGES
from optexport.errors import ConfigError, first_line

if TYPE_CHECKING:
    from optexport.loading.loader import Pretrained

# Heights and widths of the test images. The tolerance is relative to the largest number: some units in the last place
# of float32.
_SIZES = ((37, 61), (70, 50))
_ROUNDING = 1e-5


@dataclass(frozen=True)
class ImageScale:
    """The scale of an image processor: ``(images - shift) * factor``.

    Attributes:
        shift, factor: float32, [channels, 1, 1].
    """

    shift: torch.Tensor
    factor: torch.Tensor


def image_scale(pretrained: Pretrained | None, location: str) -> tuple[ImageScale, Any]:
    """Returns the scale of a model's image processor, and the processor without it.

    Checks on images that both together equal the processor. Some processors normalize before padding, or round between
    steps, which a scale at the end cannot reproduce.

    Args:
        location: The location for errors.

    Raises:
        ConfigError: The image processor is missing, does not scale, or its scale is not such a shift and factor.
    """
    import transformers

    if pretrained is None:
        raise ConfigError("the model has no image processor", location=location, hint="Leave it out.")
    options = {"local_files_only": True, **pretrained.options}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(pretrained.name, backend="pil", **options)
    except Exception as error:  # transformers raises many kinds of errors
        raise ConfigError(
            f"its image processor cannot be loaded: {first_line(error)}",
            location=location,
            hint="Leave it out, or put the model's preprocessor_config.json beside it.",
        ) from error
    named = type(processor).__name__
    rescales, normalizes = (getattr(processor, key, None) for key in ("do_rescale", "do_normalize"))
    if not (rescales or normalizes):
        raise ConfigError(f"{named} neither rescales nor normalises images", location=location, hint="Leave it out.")
    divisor = 1 / float(processor.rescale_factor) if rescales else 1.0
    mean, deviation = (processor.image_mean, processor.image_std) if normalizes else (0.0, 1.0)
    shift = torch.tensor(mean, dtype=torch.float64).reshape(-1, 1, 1) * divisor
    factor = 1 / (torch.tensor(deviation, dtype=torch.float64).reshape(-1, 1, 1) * divisor)
    scale = ImageScale(shift.float(), factor.float())
    plain = copy.deepcopy(processor)
    plain.do_rescale = plain.do_normalize = False
    if (why := _why_another(processor, plain, scale)) is not None:
        raise ConfigError(
            f"{named} does more with images than to resize, crop, rescale and normalise them: {why}",
            location=location,
            hint="Leave it out.",
        )
    return scale, plain


def _why_another(processor: Any, plain: Any, scale: ImageScale) -> str | None:
    """Returns how a processor differs from a plain one followed by the scale, or None."""
    generator = np.random.default_rng(0)
    one, other = (generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES)
    for images in ([one], [other], [one, other]):
        try:
            expected, given = (dict(each(images=images, return_tensors="np")) for each in (processor, plain))
        except Exception as error:  # transformers raises many kinds
            if len(images) == 1:
                return first_line(error)
            continue  # images of different sizes may be unsupported
        if expected.keys() != given.keys() or IMAGES not in given:
            return f"it makes {', '.join(expected)}"
        if given[IMAGES].dtype != np.uint8:
            return f"without a scale its images are {given[IMAGES].dtype}"
        scaled = (given[IMAGES] - scale.shift.numpy()) * scale.factor.numpy()
        wanted = expected[IMAGES]
        if scaled.shape != wanted.shape or np.abs(scaled - wanted).max() > _ROUNDING * max(1, np.abs(wanted).max()):
            return "its numbers are no scale of what it makes without"
    return None
