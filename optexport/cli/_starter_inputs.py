"""The inputs of a starter config, which are made for the model's config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optexport.config.source import SourceKind

_LENGTHS = ("max_position_embeddings", "n_positions")
SOUND_KEYS = {"num_mel_bins", "num_feat_extract_layers", "input_feat_per_channel", "audio_config"}
TOKENIZER_LENGTH = "tokenizer's model_max_length"
NO_TOKENIZER = "no tokenizer"
# Comments above inputs that were guessed.
GUESS = "# These inputs are guessed. Set the name and shape of forward's input."
GUESSED_SHAPES = "# The names are the arguments of forward in the Python file. The shapes are guessed. Edit them."
GUESSED_SIZE = (
    "# The image size 224 is guessed, because config.json has none. Set the size that the image processor gives."
)


@dataclass(frozen=True)
class StarterInputs:
    """The lines of ``[inputs]``, and the ranges of ``[inputs.dynamic]``; without ranges, the model decides."""

    lines: list[str]
    dynamic: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def starter_inputs(
    config: dict[str, Any], kind: SourceKind, parameters: Sequence[str], *, guesses: bool
) -> StarterInputs:
    """Returns inputs for a model.

    Args:
        config: The model's config.json; empty if it could not be read.
        parameters: The parameters of ``forward``, if they could be read from a Python file.
        kind: The kind of the model's source.
        guesses: Whether to write inputs that must be edited. Otherwise the run makes them up for the loaded model.
    """
    if kind is SourceKind.PT2:
        return StarterInputs(_made_up("with the shapes in the file"))
    if config.keys() & {*SOUND_KEYS, "text_config", "vision_config"}:
        return StarterInputs(_made_up("that fit config.json"), {"batch": (1, 16)})
    if "vocab_size" in config:
        sequence = (2, _max_length(config))
        decoder = {"decoder_sequence": sequence} if config.get("is_encoder_decoder") is True else {}
        return StarterInputs(_texts(config), {"batch": (1, 64), "sequence": sequence, **decoder})
    if parameters and guesses:
        return _guessed_inputs(parameters)
    size = config.get("image_size")
    if kind in (SourceKind.HUB, SourceKind.MLFLOW):
        return StarterInputs(_made_up("that fit the model"))
    if not guesses and ("num_channels" not in config or size is None):
        return StarterInputs(_made_up("that fit the model"))
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    height, width = (number(side, 1, 224) for side in sides)
    if "num_channels" in config or "image_size" in config:
        name, shape = "pixel_values", f'["batch", {number(config.get("num_channels"), 1, 3)}, {height}, {width}]'
    else:
        name, shape = "x", '["batch", 3, 224, 224]'
    hint = [GUESSED_SIZE] if size is None else []
    if not config:
        hint = [GUESS]
    return StarterInputs([*hint, f"[inputs.tensors.{name}]", f"shape = {shape}"], {"batch": (1, 16)})


def _guessed_inputs(parameters: Sequence[str]) -> StarterInputs:
    """Returns inputs with the names of parameters, and shapes and dtypes that their names suggest."""
    lines = [GUESSED_SHAPES]
    sequences = [name for name in parameters if re.search(r"(^|_)(ids?|tokens?|mask|lengths?)$", name)]
    for name in parameters:
        lines.append(f"[inputs.tensors.{name}]")
        if name in sequences:
            lines += ['shape = ["batch", "sequence"]', 'dtype = "int64"', "low = 0", "high = 2"]
        else:
            lines.append('shape = ["batch", 3, 224, 224]')
    return StarterInputs(lines, {"batch": (1, 16), **({"sequence": (2, 128)} if sequences else {})})


def number(value: Any, minimum: int, default: int) -> int:
    """Returns a number from a file, or the default if it is not a valid size."""
    return value if type(value) is int and minimum <= value < 2**31 else default


def _made_up(which: str) -> list[str]:
    return [
        f"# By default, random inputs {which}. To use real data:",
        '# data = "inputs.safetensors"  # or .npz: one tensor per input, by name',
    ]


def _max_length(config: dict[str, Any]) -> int:
    """Returns the longest sequence that both the model and its tokenizer accept."""
    positions = next((config[key] for key in _LENGTHS if key in config), None)
    max_length = number(positions, 2, 512)
    return min(max_length, number(config.get(TOKENIZER_LENGTH), 2, max_length))


def _texts(config: dict[str, Any]) -> list[str]:
    if NO_TOKENIZER in config:
        ids = ['dtype = "int64"', "low = 0", f"high = {number(config.get('vocab_size'), 2, 1000)}"]
        decoder = ["[inputs.tensors.decoder_input_ids]", 'shape = ["batch", "decoder_sequence"]', *ids]
        return [
            "# Random token ids, because the folder has no tokenizer. To use real data:",
            '# data = "inputs.npz"  # or .safetensors: one tensor per input, by name',
            "[inputs.tensors.input_ids]",
            'shape = ["batch", "sequence"]',
            *ids,
            "[inputs.tensors.attention_mask]",
            'shape = ["batch", "sequence"]',
            'dtype = "int64"',
            "low = 1",
            "high = 2",
            *(decoder if config.get("is_encoder_decoder") is True else []),
        ]
    return [
        "# Replace these texts by some that the model will get: the check is as good as its inputs.",
        'texts = ["A typical sentence for this model.", "Another sentence, which has another length."]',
        '# data = "lines.jsonl"  # or from a file: {"text": "..."} or {"input_ids": [...]} on each line',
    ]


def quoted(text: str) -> str:
    """Returns a TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
