"""Creates images, videos, sounds and time series for a model from its config.

Configs use different names for the same sizes, and some do not define the order of axes. Each input therefore has
several makers, most likely first. `dummy_inputs` takes the first one that the model runs on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

BATCH = 2

Maker = Callable[[Any], torch.Tensor]

# Used if a config has no image size, which is common for convolutional networks.
_IMAGE_SIDES = (224, 96, 512)
_SAMPLES = 16000
_FRAMES = 64
# Patches per side of an image that is a row of patches. Divisible by 2 and 4, because models merge patches.
_GRID = 8


def wave(*shape: int) -> torch.Tensor:
    """Returns deterministic numbers in [-1, 1] of a shape; adjacent numbers differ."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 0.37).reshape(shape)


def find(config: Any, *names: str) -> Any:
    """Returns the first of these attributes in a config or its nested configs, or None."""
    for part in parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def parts(config: Any) -> Iterator[Any]:
    """Yields a config and all its nested configs, at any depth."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and value is not config:
            yield from parts(value)


def vision(config: Any) -> Any:
    """Returns the vision part of a config, or the config if there is none."""
    for name in ("vision_config", "image_config", "backbone_config", "encoder", "vit_config"):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            return vision(inner)
    return config


def _channels(config: Any) -> int:
    part = vision(config)
    named = [getattr(part, name, None) for name in ("num_channels", "in_channels", "in_chans", "num_input_channels")]
    return next((value for value in named if isinstance(value, int)), 3)


def _sides(config: Any) -> tuple[int, int] | None:
    part = vision(config)
    for source in (part, config):
        for name in ("image_size", "img_size", "crop_size", "input_size", "pretrain_image_size"):
            size = getattr(source, name, None)
            if isinstance(size, int) and size > 1:
                return size, size
            if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(side, int) for side in size):
                return int(size[-2]), int(size[-1])
    return None


def pair(value: Any) -> tuple[int, int]:
    """Returns (height, width) of a size that is one number or two."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[-2]), int(value[-1]))


def _image(side: int) -> Maker:
    def make(config: Any) -> torch.Tensor:
        height, width = _sides(config) or (side, side)
        return wave(BATCH, _channels(config), height, width)

    return make


def _images_of_each_row(config: Any) -> torch.Tensor:
    return _image(_IMAGE_SIDES[0])(config).unsqueeze(1)


def _video(config: Any) -> torch.Tensor:
    height, width = _sides(config) or (_IMAGE_SIDES[0], _IMAGE_SIDES[0])
    frames = find(config, "num_frames", "frames_per_clip", "max_num_frames", "num_image_with_embedding") or 4
    return wave(BATCH, int(frames), _channels(config), height, width)


def _video_channels_first(config: Any) -> torch.Tensor:
    return _video(config).transpose(1, 2).contiguous()


def patch_width(config: Any) -> int:
    """Returns the number of values in an image patch, over all channels and frames."""
    part = vision(config)
    height, width = pair(part.patch_size)
    return _channels(config) * int(getattr(part, "temporal_patch_size", None) or 1) * height * width


def _patches_in_a_row(config: Any) -> torch.Tensor:
    return wave(BATCH * _GRID * _GRID, patch_width(config))


def _patches_of_each_row(config: Any) -> torch.Tensor:
    return wave(BATCH, _GRID * _GRID, patch_width(config))


def _patches_as_images(config: Any) -> torch.Tensor:
    height, width = pair(vision(config).patch_size)
    return wave(BATCH * _GRID * _GRID, _channels(config), height, width)


def _grid(config: Any) -> torch.Tensor:  # noqa: ARG001
    return torch.tensor([[1, _GRID, _GRID]] * BATCH)


def _grid_sides(config: Any) -> torch.Tensor:  # noqa: ARG001
    return torch.tensor([[_GRID, _GRID]] * BATCH)


def _image_sizes(config: Any) -> torch.Tensor:
    return torch.tensor([list(_sides(config) or (_IMAGE_SIDES[0],) * 2)] * BATCH)


def _patch_positions(config: Any) -> torch.Tensor:  # noqa: ARG001
    columns, rows = torch.meshgrid(torch.arange(_GRID), torch.arange(_GRID), indexing="xy")
    return torch.stack([columns, rows], -1).reshape(1, -1, 2).expand(BATCH, -1, 2).clone()


def _bands(config: Any) -> int:
    named = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "num_mel_channels", "mel_bins")
    return int(find(config, *named, "feature_size", "input_feat_size", "n_mels", "input_dim") or 80)


def _spectrogram(config: Any) -> torch.Tensor:
    return wave(BATCH, _bands(config), 2 * int(find(config, "max_source_positions") or 1500))


def _spectrogram_frames(config: Any) -> torch.Tensor:
    return wave(BATCH, _bands(config), _FRAMES)


def _frames_first(config: Any) -> torch.Tensor:
    return wave(BATCH, int(find(config, "max_length_seconds") or _FRAMES), _bands(config))


def _noise(config: Any) -> torch.Tensor:
    """Returns the noise that a vocoder otherwise draws itself."""
    return wave(BATCH, _frames_first(config).shape[1], int(config.model_in_channels))


def _noise_of_patches(config: Any) -> torch.Tensor:
    """Returns the noise by which a masked autoencoder otherwise chooses patches itself."""
    image = _IMAGES[0](config)
    side = int(vision(config).patch_size)
    return wave(BATCH, (image.shape[-2] // side) * (image.shape[-1] // side))


def _frames_of_patches(config: Any) -> torch.Tensor:
    return wave(BATCH, int(getattr(config, "max_length", None) or _FRAMES), _bands(config))


def _samples(config: Any) -> torch.Tensor:  # noqa: ARG001
    return wave(BATCH, _SAMPLES)


def _samples_of_channels(config: Any) -> torch.Tensor:
    return wave(BATCH, int(find(config, "audio_channels") or 1), _SAMPLES)


def _latents(config: Any) -> torch.Tensor:
    return wave(BATCH, int(find(config, "hidden_size", "latent_dim") or 64), 12)


def _past_length(config: Any) -> int:
    lags = getattr(config, "lags_sequence", None) or [0]
    length = getattr(config, "context_length", None) or getattr(config, "prediction_length", None) or 32
    return int(length) + int(max(lags))


def _past_values(config: Any) -> torch.Tensor:
    width = int(getattr(config, "input_size", None) or 1)
    return wave(BATCH, _past_length(config), *([width] if width > 1 else []))


def _past_channels(config: Any) -> torch.Tensor:
    return wave(BATCH, _past_length(config), int(getattr(config, "num_input_channels", None) or 1))


def _time_features(length: Callable[[Any], int]) -> Maker:
    def make(config: Any) -> torch.Tensor:
        count = int(getattr(config, "num_time_features", 0)) + int(getattr(config, "num_dynamic_real_features", 0))
        return wave(BATCH, length(config), count)

    return make


def _past_like(fill: Callable[..., torch.Tensor]) -> Maker:
    return lambda config: fill(_past_values(config).shape)


_IMAGES: tuple[Maker, ...] = tuple(map(_image, _IMAGE_SIDES))

# Makers of each input, most likely first.
MEDIA: dict[str, tuple[Maker, ...]] = {
    "pixel_values": (
        *_IMAGES,
        _images_of_each_row,
        _video,
        _patches_in_a_row,
        _patches_of_each_row,
        _patches_as_images,
    ),
    "pixel_values_videos": (_video, _video_channels_first, _patches_in_a_row),
    "pixel_attention_mask": (lambda config: torch.ones(BATCH, _GRID * _GRID, dtype=torch.int64),),
    "pixel_position_ids": (_patch_positions,),
    "image_position_ids": (_patch_positions,),
    "spatial_shapes": (_grid_sides,),
    "target_sizes": (_grid_sides,),
    "image_sizes": (_image_sizes,),
    "image_grid_thw": (_grid,),
    "grid_thw": (_grid,),
    "merge_sizes": (lambda config: torch.ones(BATCH, dtype=torch.int64),),
    "image_merge_sizes": (lambda config: torch.ones(BATCH, dtype=torch.int64),),
    "hidden_states": (_patches_in_a_row, _patches_of_each_row),
    "flattened_patches": (
        lambda config: torch.cat([_patch_positions(config) + 1.0, wave(BATCH, _GRID * _GRID, patch_width(config))], -1),
    ),
    "input_values": (_samples, _samples_of_channels, _frames_of_patches),
    "input_features": (_spectrogram, _spectrogram_frames, _frames_first),
    "input_features_mask": (lambda config: torch.ones(BATCH, _FRAMES, dtype=torch.int64),),
    "audio_mel": (_frames_first,),
    "audio_mel_mask": (lambda config: torch.zeros(BATCH, _FRAMES, dtype=torch.bool),),
    "latents": (_latents,),
    "noise_sequence": (_noise,),
    "noise": (_noise_of_patches,),
    "past_values": (_past_values, _past_channels),
    "past_observed_mask": (_past_like(torch.ones),),
    "past_values_padding": (_past_like(torch.zeros),),
    "past_time_features": (_time_features(_past_length),),
    "future_time_features": (_time_features(lambda config: int(getattr(config, "prediction_length", None) or 1)),),
    "freq": (lambda config: torch.zeros(BATCH, 1, dtype=torch.int64),),
    "static_categorical_features": (lambda config: torch.zeros(BATCH, 1, dtype=torch.int64),),
    "states": (lambda config: wave(BATCH, 9, int(config.state_dim)),),
    "actions": (lambda config: wave(BATCH, 9, int(config.act_dim)),),
    "rewards": (lambda config: wave(BATCH, 9, 1),),
    "returns_to_go": (lambda config: wave(BATCH, 9, 1),),
    "timesteps": (lambda config: torch.arange(9).expand(BATCH, -1).clone(),),
    "query_embeds": (lambda config: wave(BATCH, 6, int(config.hidden_size)),),
    "encoder_hidden_states": (
        lambda config: wave(BATCH, 9, int(find(config, "encoder_hidden_size", "cross_attention_hidden_size") or 64)),
    ),
    "prompt_pixel_values": _IMAGES,
    "prompt_masks": _IMAGES,
}
