"""Tests of reading images: orientation, bit depth and colors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from optexport.errors import ConfigError
from optexport.inference import images


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photo_is_rotated_by_its_exif_orientation(orientation: int, tmp_path: Path) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo.save(tmp_path / "photo.png", exif=exif)
    expected = np.asarray(load_image(str(tmp_path / "photo.png")))
    assert expected.shape == ((10, 6, 3) if orientation > 4 else (6, 10, 3))
    assert np.array_equal(images.read(tmp_path / "photo.png"), expected)
    with Image.open(tmp_path / "photo.png") as opened:
        assert np.array_equal(images.read(opened), expected)


@pytest.mark.parametrize(("dtype", "name"), [("uint16", "deep.png"), ("int32", "deep.tiff"), ("float32", "deep.tiff")])
def test_pixels_of_more_than_8_bits_are_not_cut_off(dtype: str, name: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 300, dtype=dtype)).save(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}: the pixels have more than 8 bits"):
        images.read(tmp_path / name)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_colours_are_made_red_green_and_blue(mode: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4, 3), 255, np.uint8)).convert(mode).save(tmp_path / "image.png")
    assert np.array_equal(images.read(tmp_path / "image.png"), np.full((4, 4, 3), 255))
