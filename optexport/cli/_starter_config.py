"""Writes the starter config of ``optexport init``, using the files in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optexport.config.source import TORCHSCRIPT_SUFFIXES, SourceKind, find_source_folder, source_kind
from optexport.config.tasks import AUTO_CLASSES
from optexport.transformations.registry import PRESET, RULES

# The end of an architecture's class name, and the task that loads it.
_TASKS = {auto.removeprefix("AutoModel"): task for task, auto in AUTO_CLASSES.items() if auto != "AutoModel"}
_ENDINGS = {**_TASKS, "ForConditionalGeneration": "text2text-generation", "LMHeadModel": "text-generation"}
_LENGTHS = ("max_position_embeddings", "n_positions")
_SOUND_KEYS = {"num_mel_bins", "num_feat_extract_layers", "input_feat_per_channel", "audio_config"}
_TOKENIZER_LENGTH = "tokenizer's model_max_length"
_NO_TOKENIZER = "no tokenizer"
_SENTENCES = "modules of sentence-transformers"
# Comments above inputs that were guessed.
GUESS = "# These inputs are guessed, because the source has no config.json that could be read. Edit them."
GUESSED_SIZE = (
    "# The image size 224 is guessed, because config.json has none. Set the size that the image processor gives."
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def starter_config(source: str, folder: Path) -> str:
    """Returns the text of a starter config for a model.

    Args:
        source: As in ``model.source``. For a folder, its config.json is read.
        folder: The folder of the new config; a relative source starts there.
    """
    kind = source_kind(source, folder)
    config = _config_json(source, folder)
    path = (folder / source).resolve().name if kind is SourceKind.FOLDER else source.rstrip("/").rpartition("/")[2]
    name = source[len("package:") :].partition("/")[0] if kind is SourceKind.PACKAGE else path.rpartition(":")[2]
    if kind is SourceKind.MLFLOW:  # the last part of the URI is a version
        name = source.partition(":/")[2].strip("/").replace("/", "-") or name
    for suffix in (".pt2", *TORCHSCRIPT_SUFFIXES):
        name = name.removesuffix(suffix) or name  # do not name the output folder after the file
    lines = [
        "# The model: a folder, a hub id, package:NAME/PATH, python:module:factory,",
        "# mlflow:models:/NAME@ALIAS, a .pt2 file or a TorchScript file. Paths are relative to this file.",
        "[model]",
        f"source = {_quoted(source)}",
        *_task(config),
        '# dtype = "float32"',
        "",
        "# The inputs for the trace and the checks.",
        "[inputs]",
        *_inputs(config, kind),
        "",
        "# The rules, in the order of application. These are also the default. List all: optexport transformations",
        *[line for rule in PRESET for line in _rule(rule)],
        "",
        "# The tolerance: 4 times the noise floor, which is the model's own distance from float64.",
        "[parity]",
        "noise_multiple = 4.0",
        "",
        "[export]",
        'formats = ["torchscript", "onnx", "pt2"]',
        f"output = {_quoted(f'build/{name}')}",
        '# layout = "triton"  # arranges the files as a model repository of Triton Inference Server',
        "",
        "# The MLflow store: this file, or the URL of an MLflow server.",
        "[tracking]",
        'uri = "sqlite:///mlflow.db"',
        f"experiment = {_quoted(name)}",
    ]
    return "\n".join(lines) + "\n"


def _config_json(source: str, folder: Path) -> dict[str, Any]:
    path = find_source_folder(source, folder)
    if path is None:
        return {}
    config = _json(path / "config.json")
    if (max_length := _json(path / "tokenizer_config.json").get("model_max_length")) is not None:
        config.setdefault(_TOKENIZER_LENGTH, max_length)
    if config and (path / "modules.json").is_file():
        config[_SENTENCES] = True
    if config and not any((path / name).is_file() for name in _TOKENIZERS):
        config[_NO_TOKENIZER] = True
    return config


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _quoted(text: str) -> str:
    """Returns a TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: Any, minimum: int, default: int) -> int:
    """Returns a number from a file, or the default if it is not a valid size."""
    return value if type(value) is int and minimum <= value < 2**31 else default


def _task(config: dict[str, Any]) -> list[str]:
    if config.get(_SENTENCES):
        return ['task = "sentence-similarity"  # from modules.json; needs the extra sentence-transformers']
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    names = [name for name in names if name.isidentifier()]
    endings = {**_ENDINGS, "ForConditionalGeneration": _generation(config)}
    for name in names:
        for ending, task in endings.items():
            if name.endswith(ending):
                return [f"task = {json.dumps(task)}  # from config.json: {name}"]
    if names and names[0].endswith("ForCTC"):
        return [f"# No task: config.json names the class {names[0]}."]
    if names:
        return [f'task = "feature-extraction"  # from config.json: {names[0]}']
    return ['# task = "feature-extraction"']


def _generation(config: dict[str, Any]) -> str:
    if config.keys() & _SOUND_KEYS:
        return "automatic-speech-recognition"
    return "image-text-to-text" if "vision_config" in config else "text2text-generation"


def _max_length(config: dict[str, Any]) -> int:
    """Returns the longest sequence that both the model and its tokenizer accept."""
    positions = next((config[key] for key in _LENGTHS if key in config), None)
    max_length = _number(positions, 2, 512)
    return min(max_length, _number(config.get(_TOKENIZER_LENGTH), 2, max_length))


def _inputs(config: dict[str, Any], kind: SourceKind) -> list[str]:
    if kind is SourceKind.PT2:
        return [
            "# By default, random numbers with the shapes in the file. To use real data:",
            '# data = "inputs.safetensors"  # or .npz: one tensor per input, by name',
        ]
    if config.keys() & {*_SOUND_KEYS, "text_config", "vision_config"}:
        return [
            "# By default, random inputs that fit config.json. To use real data:",
            '# data = "inputs.safetensors"  # or .npz: one tensor per input, by name',
            "",
            "[inputs.dynamic]",
            "batch = [1, 16]",
        ]
    if "vocab_size" in config:
        max_length = _max_length(config)
        return [
            *_texts(config),
            "",
            "# Ranges of the dynamic axes. The files are also checked at sizes that were never traced.",
            "[inputs.dynamic]",
            "batch = [1, 64]",
            f"sequence = [2, {max_length}]",
            *([f"decoder_sequence = [2, {max_length}]"] if config.get("is_encoder_decoder") is True else []),
        ]
    size = config.get("image_size")
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    height, width = (_number(side, 1, 224) for side in sides)
    if "num_channels" in config or "image_size" in config:
        name, shape = "pixel_values", f'["batch", {_number(config.get("num_channels"), 1, 3)}, {height}, {width}]'
    else:
        name, shape = "x", '["batch", 3, 224, 224]'
    hint = [GUESSED_SIZE] if size is None else []
    if not config:
        hint = [GUESS, "# Set the name and shape of the model's input."]
    if kind in (SourceKind.HUB, SourceKind.MLFLOW):
        hint = [GUESS, '# For a text model, write texts = ["..."] instead of the table below.']
    return [*hint, f"[inputs.tensors.{name}]", f"shape = {shape}", "", "[inputs.dynamic]", "batch = [1, 16]"]


def _texts(config: dict[str, Any]) -> list[str]:
    if _NO_TOKENIZER in config:
        ids = ['dtype = "int64"', "low = 0", f"high = {_number(config.get('vocab_size'), 2, 1000)}"]
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
        'texts = ["A typical sentence for this model.", "Another sentence, which has another length."]',
        '# data = "lines.jsonl"  # or real data: {"text": "..."} or {"input_ids": [...]} on each line',
    ]


def _rule(name: str) -> list[str]:
    # The summary of a switch says what it does when it is on.
    values = {key: True if option.default is False else option.default for key, option in RULES[name].options.items()}
    options = [f"# {key} = {json.dumps(value)}  # {RULES[name].options[key].summary}" for key, value in values.items()]
    return ["[[transformations]]", f"use = {json.dumps(name)}  # {RULES[name].summary}", *options]
