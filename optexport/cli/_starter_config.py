"""Writes the starter config of ``optexport init``, using the files in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optexport.config.source import TORCHSCRIPT_SUFFIXES, SourceKind, source_folder, source_kind
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
# Comment above inputs that nothing is known about.
GUESS = "# These inputs are a guess: edit them, since the source could not be asked."
GUESSED_SIZE = "# Its config names no size of images, so 224 is a guess: write what its image processor makes of them."
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
    known = _config_json(source, folder)
    path = (folder / source).resolve().name if kind is SourceKind.FOLDER else source.rstrip("/").rpartition("/")[2]
    name = source[len("package:") :].partition("/")[0] if kind is SourceKind.PACKAGE else path.rpartition(":")[2]
    if kind is SourceKind.MLFLOW:  # the last part of the URI is a version
        name = source.partition(":/")[2].strip("/").replace("/", "-") or name
    for suffix in (".pt2", *TORCHSCRIPT_SUFFIXES):
        name = name.removesuffix(suffix) or name  # the source is a file, and the output a folder
    lines = [
        "# What to export. A folder, a hub id, package:NAME/PATH, python:module:factory,",
        "# mlflow:models:/NAME@ALIAS, a .pt2 or a TorchScript file. Paths are relative to this file.",
        "[model]",
        f"source = {_quoted(source)}",
        *_task(known),
        '# dtype = "float32"',
        "",
        "# What to trace the model with, and to check it on.",
        "[inputs]",
        *_inputs(known, kind),
        "",
        "# Rules are applied in this order. Without any, these are. `optexport transformations` lists them all.",
        *[line for rule in PRESET for line in _rule(rule)],
        "",
        "# The limit is measured: results may be 4 times farther from float64 than the model's own are.",
        "[parity]",
        "noise_multiple = 4.0",
        "",
        "[export]",
        'formats = ["torchscript", "onnx", "pt2"]',
        f"output = {_quoted(f'build/{name}')}",
        '# layout = "triton"  # puts them into a model repository of Triton Inference Server, inside the bundle',
        "",
        "# The embedded database; any MLflow server will do.",
        "[tracking]",
        'uri = "sqlite:///mlflow.db"',
        f"experiment = {_quoted(name)}",
    ]
    return "\n".join(lines) + "\n"


def _config_json(source: str, folder: Path) -> dict[str, Any]:
    path = source_folder(source, folder)
    if path is None:
        return {}
    known = _json(path / "config.json")
    if (longest := _json(path / "tokenizer_config.json").get("model_max_length")) is not None:
        known.setdefault(_TOKENIZER_LENGTH, longest)
    if known and (path / "modules.json").is_file():
        known[_SENTENCES] = True
    if known and not any((path / name).is_file() for name in _TOKENIZERS):
        known[_NO_TOKENIZER] = True
    return known


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _quoted(text: str) -> str:
    """Returns a TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: Any, least: int, default: int) -> int:
    """Returns a number from a file, or the default if it is not a valid size."""
    return value if type(value) is int and least <= value < 2**31 else default


def _task(known: dict[str, Any]) -> list[str]:
    if known.get(_SENTENCES):
        return ['task = "sentence-similarity"  # its modules.json; needs the extra sentence-transformers']
    architectures = known.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    names = [name for name in names if name.isidentifier()]
    endings = {**_ENDINGS, "ForConditionalGeneration": _generation(known)}
    for name in names:
        for ending, task in endings.items():
            if name.endswith(ending):
                return [f"task = {json.dumps(task)}  # its config names {name}"]
    if names and names[0].endswith("ForCTC"):
        return [f"# Without a task it is loaded as its config names it: {names[0]}"]
    if names:
        return [f'task = "feature-extraction"  # its config names {names[0]}']
    return ['# task = "feature-extraction"']


def _generation(known: dict[str, Any]) -> str:
    if known.keys() & _SOUND_KEYS:
        return "automatic-speech-recognition"
    return "image-text-to-text" if "vision_config" in known else "text2text-generation"


def _longest(known: dict[str, Any]) -> int:
    """Returns the longest sequence that both the model and its tokenizer accept."""
    positions = next((known[key] for key in _LENGTHS if key in known), None)
    longest = _number(positions, 2, 512)
    return min(longest, _number(known.get(_TOKENIZER_LENGTH), 2, longest))


def _inputs(known: dict[str, Any], kind: SourceKind) -> list[str]:
    if kind is SourceKind.PT2:
        return [
            "# Without more they are random numbers of the shapes that the file takes. For real data:",
            '# data = "inputs.safetensors"  # or .npz: a tensor for each input, by name',
        ]
    if known.keys() & {*_SOUND_KEYS, "text_config", "vision_config"}:
        return [
            "# Without more they are made from the model's own config. For real data:",
            '# data = "inputs.safetensors"  # or .npz: a tensor for each input, by name',
            "",
            "[inputs.dynamic]",
            "batch = [1, 16]",
        ]
    if "vocab_size" in known:
        longest = _longest(known)
        return [
            *_texts(known),
            "",
            "# Sizes that the exported files must take; sizes never traced are checked too.",
            "[inputs.dynamic]",
            "batch = [1, 64]",
            f"sequence = [2, {longest}]",
            *([f"decoder_sequence = [2, {longest}]"] if known.get("is_encoder_decoder") is True else []),
        ]
    size = known.get("image_size")
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    height, width = (_number(side, 1, 224) for side in sides)
    if "num_channels" in known or "image_size" in known:
        name, shape = "pixel_values", f'["batch", {_number(known.get("num_channels"), 1, 3)}, {height}, {width}]'
    else:
        name, shape = "x", '["batch", 3, 224, 224]'
    hint = [GUESSED_SIZE] if size is None else []
    if not known:
        hint = [GUESS, "# The name and shape of the model's input."]
    if kind in (SourceKind.HUB, SourceKind.MLFLOW):
        hint = [GUESS, '# For a text model: texts = ["..."] instead of the table below.']
    return [*hint, f"[inputs.tensors.{name}]", f"shape = {shape}", "", "[inputs.dynamic]", "batch = [1, 16]"]


def _texts(known: dict[str, Any]) -> list[str]:
    if _NO_TOKENIZER in known:
        ids = ['dtype = "int64"', "low = 0", f"high = {_number(known.get('vocab_size'), 2, 1000)}"]
        decoder = ["[inputs.tensors.decoder_input_ids]", 'shape = ["batch", "decoder_sequence"]', *ids]
        return [
            "# The folder holds no tokenizer, so these are random numbers. For real data:",
            '# data = "inputs.npz"  # or .safetensors: a tensor for each input, by name',
            "[inputs.tensors.input_ids]",
            'shape = ["batch", "sequence"]',
            *ids,
            "[inputs.tensors.attention_mask]",
            'shape = ["batch", "sequence"]',
            'dtype = "int64"',
            "low = 1",
            "high = 2",
            *(decoder if known.get("is_encoder_decoder") is True else []),
        ]
    return [
        'texts = ["A sentence of the kind that the model will see.", "And another one, of another length."]',
        '# data = "lines.jsonl"  # or real data: {"text": "..."} or {"input_ids": [...]} a line',
    ]


def _rule(name: str) -> list[str]:
    options = [f"# {key} = {json.dumps(o.default)}  # {o.summary}" for key, o in RULES[name].options.items()]
    return ["[[transformations]]", f"use = {json.dumps(name)}  # {RULES[name].summary}", *options]
