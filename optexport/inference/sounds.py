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
_MOST_BYTES = 4


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
                f"it is {sound.dtype} {list(sound.shape)}",
                location="sounds",
                hint=f"Give floating point numbers [samples], from -1 to 1, {rate} for a second.",
            )
        return sound.astype(np.float32)
    if not isinstance(sound, str | os.PathLike):
        raise ConfigError(f"it is a {type(sound).__name__}, and neither a path nor a numpy array", location="sounds")
    hint = f"ffmpeg -i {Path(sound).name} -ac 1 -ar {rate} -c:a pcm_s16le mono.wav"
    try:
        with wave.open(str(sound), "rb") as file:
            channels, width, found, frames = file.getparams()[:4]
            held = file.readframes(frames)
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(
            f"it is no WAV file of whole numbers that can be read: {first_line(error)}", location=str(sound), hint=hint
        ) from error
    if width > _MOST_BYTES:
        raise ConfigError(f"its samples have {_BITS * width} bits", location=str(sound), hint=hint)
    if found != rate:
        raise ConfigError(
            f"it has {found} samples a second, and the model takes {rate}", location=str(sound), hint=hint
        )
    samples = _numbers(held[: len(held) // (channels * width) * channels * width], width)
    if not samples.size:
        raise ConfigError("it holds no sound", location=str(sound))
    mono: npt.NDArray[np.float32] = samples.reshape(-1, channels).mean(-1).astype(np.float32)
    return mono


def _numbers(held: bytes, width: int) -> npt.NDArray[Any]:
    """Converts WAV samples to floats: unsigned single bytes, otherwise signed little-endian."""
    if width == 1:
        return np.frombuffer(held, np.uint8) / 128 - 1.0
    digits = np.frombuffer(held, np.uint8).reshape(-1, width).astype(np.int64)
    whole = (digits << (_BITS * np.arange(width))).sum(-1)
    half = 1 << (_BITS * width - 1)
    return np.asarray(((whole + half) % (2 * half) - half) / half)
