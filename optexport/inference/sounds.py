"""Reads sounds for feature extractors: mono, from -1 to 1; imports no torch."""

from __future__ import annotations

import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optexport.errors import ConfigError, first_line

_BITS = 8
_MAX_BYTES = 4


def read(sound: Any, rate: int) -> npt.NDArray[np.float32]:
    """Reads a sound.

    Args:
        sound: The path of a WAV file with integer samples, whose channels are averaged, or a floating point array
            [samples], which must have the rate.
        rate: The model's sampling rate, in samples per second.

    Returns:
        float32 [samples].

    Raises:
        ConfigError: The sound has another type or rate, is empty, or cannot be read.
    """
    if isinstance(sound, np.ndarray):
        if sound.ndim != 1 or sound.dtype.kind != "f" or not sound.size:
            raise ConfigError(
                f"expected floating point numbers [samples], found {sound.dtype} {list(sound.shape)}",
                location="sounds",
                hint=f"Pass samples from -1 to 1, at {rate} samples per second.",
            )
        return sound.astype(np.float32)
    if not isinstance(sound, str | os.PathLike):
        raise ConfigError(f"expected a path or a numpy array, found {type(sound).__name__}", location="sounds")
    hint = f"Convert the file: ffmpeg -i {Path(sound).name} -ac 1 -ar {rate} -c:a pcm_s16le mono.wav"
    try:
        with wave.open(str(sound), "rb") as file:
            channels, width, file_rate, frames = file.getparams()[:4]
            content = file.readframes(frames)
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(
            f"the file cannot be read as WAV with integer samples: {first_line(error)}",
            location=str(sound),
            hint=hint,
        ) from error
    if width > _MAX_BYTES:
        bits = f"expected samples of at most {_BITS * _MAX_BYTES} bits, found {_BITS * width}"
        raise ConfigError(bits, location=str(sound), hint=hint)
    if file_rate != rate:
        rates = f"the file has {file_rate} samples per second, but the model needs {rate}"
        raise ConfigError(rates, location=str(sound), hint=hint)
    samples = _numbers(content[: len(content) // (channels * width) * channels * width], width)
    if not samples.size:
        raise ConfigError("the file has no samples", location=str(sound))
    mono: npt.NDArray[np.float32] = samples.reshape(-1, channels).mean(-1).astype(np.float32)
    return mono


def _numbers(content: bytes, width: int) -> npt.NDArray[Any]:
    """Converts WAV samples to floats: unsigned single bytes, otherwise signed little-endian."""
    if width == 1:
        return np.frombuffer(content, np.uint8) / 128 - 1.0
    digits = np.frombuffer(content, np.uint8).reshape(-1, width).astype(np.int64)
    integers = (digits << (_BITS * np.arange(width))).sum(-1)
    half = 1 << (_BITS * width - 1)
    return np.asarray(((integers + half) % (2 * half) - half) / half)
