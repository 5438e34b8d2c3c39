"""Writes the starter config of ``optexport init`` and ``optexport export``, using the files in the model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optexport.cli._forward_signature import find_forward_parameters
from optexport.cli._starter_inputs import (
    NO_TOKENIZER,
    SOUND_KEYS,
    TOKENIZER_LENGTH,
    StarterInputs,
    quoted,
    starter_inputs,
)
from optexport.config.source import SourceKind, find_source_folder, model_name, source_kind
from optexport.config.tasks import AUTO_CLASSES
from optexport.transformations.registry import PRESET, RULES, canonical_name

# The end of an architecture's class name, and the task that loads it.
_TASKS = {auto.removeprefix("AutoModel"): task for task, auto in AUTO_CLASSES.items() if auto != "AutoModel"}
_ENDINGS = {**_TASKS, "ForConditionalGeneration": "text2text-generation", "LMHeadModel": "text-generation"}
_SENTENCES = "modules of sentence-transformers"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_DEFAULT_URI = '# uri = "http://127.0.0.1:5000"  # by default MLFLOW_TRACKING_URI, or sqlite:///mlflow.db'


@dataclass(frozen=True)
class Tensor:
    """A random input: its sizes and names of axes, and its dtype."""

    shape: Sequence[int | str]
    dtype: str = "float32"


@dataclass(frozen=True)
class Choices:
    """Values that the options of a command set in a starter config; the others get defaults.

    Attributes:
        data: A file with the inputs; a relative path starts at the folder of the config.
        budget: The time of the run if it is tuned.
        guesses: Whether to write inputs that must be edited if the source does not describe them.
    """

    task: str | None = None
    output: str | None = None
    formats: Sequence[str] = ("torchscript", "onnx", "pt2")
    dynamic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    data: str | None = None
    rules: Sequence[str] = PRESET
    budget: str | None = None
    uri: str | None = None
    experiment: str | None = None
    is_tracked: bool = True
    guesses: bool = True


def starter_config(source: str, folder: Path, choices: Choices | None = None) -> str:
    """Returns the text of a starter config for a model.

    Args:
        source: As in ``model.source``. For a folder, its config.json is read.
        folder: The folder of the new config; a relative source starts there.
        choices: The values that options of the command set.
    """
    choices = choices or Choices()
    kind = source_kind(source, folder)
    config = _config_json(source, folder)
    name = model_name(source, folder)
    parameters = find_forward_parameters(source[len("python:") :], folder) if kind is SourceKind.PYTHON else []
    inputs = _inputs(choices, config, kind, parameters)
    lines = [
        *([] if choices.rules else ["# The rules: none.", "transformations = []", ""]),
        "# The model: a folder, a hub id, package:NAME/PATH, python:module:factory,",
        "# mlflow:models:/NAME@ALIAS, a .pt2 file or a TorchScript file. Paths are relative to this file.",
        "[model]",
        f"source = {quoted(source)}",
        *(_task(config) if choices.task is None else [f"task = {quoted(choices.task)}"]),
        '# dtype = "float32"',
        "",
        "# The inputs for the trace and the checks.",
        "[inputs]",
        *inputs.lines,
        *_dynamic(inputs.dynamic),
        "",
        *_rules(choices.rules),
        "# The tolerance: 4 times the noise floor, which is the model's own distance from float64.",
        "[parity]",
        "noise_multiple = 4.0",
        "",
        "[export]",
        f"formats = {json.dumps([*choices.formats])}",
        f"output = {quoted(choices.output or f'build/{name}')}",
        '# layout = "triton"  # arranges the files as a model repository of Triton Inference Server',
        "",
        *_tune(choices.budget),
        "# The MLflow store: the URL of a server, or a local database.",
        "[tracking]",
        *([] if choices.is_tracked else ["enabled = false"]),
        f"uri = {quoted(choices.uri)}" if choices.uri is not None else _DEFAULT_URI,
        f"experiment = {quoted(name if choices.experiment is None else choices.experiment)}",
    ]
    return "\n".join(lines) + "\n"


def _tune(budget: str | None) -> list[str]:
    if budget is None:
        return []
    return ["# Searches for faster rules and format passes.", "[tune]", f"budget = {quoted(budget)}", ""]


def _inputs(choices: Choices, config: dict[str, Any], kind: SourceKind, parameters: Sequence[str]) -> StarterInputs:
    """Returns the chosen inputs, or those that fit the model."""
    if choices.data is not None:
        inputs = StarterInputs([f"data = {quoted(choices.data)}"])
    elif choices.tensors:
        tensors = choices.tensors.items()
        inputs = StarterInputs([line for name, tensor in tensors for line in _tensor(name, tensor)])
    else:
        inputs = starter_inputs(config, kind, parameters, guesses=choices.guesses)
    return StarterInputs(inputs.lines, choices.dynamic or inputs.dynamic)


def _tensor(name: str, tensor: Tensor) -> list[str]:
    return [
        f"[inputs.tensors.{quoted(name)}]",
        f"shape = {json.dumps([*tensor.shape], ensure_ascii=False)}",
        f"dtype = {quoted(tensor.dtype)}",
    ]


def _dynamic(ranges: Mapping[str, tuple[int, int]]) -> list[str]:
    if not ranges:
        return []
    return [
        "",
        "# Ranges of the dynamic axes. The files are also checked at sizes that were never traced.",
        "[inputs.dynamic]",
        *(f"{name if name.isascii() else quoted(name)} = [{low}, {high}]" for name, (low, high) in ranges.items()),
    ]


def _config_json(source: str, folder: Path) -> dict[str, Any]:
    path = find_source_folder(source, folder)
    if path is None:
        return {}
    config = _json(path / "config.json")
    if (max_length := _json(path / "tokenizer_config.json").get("model_max_length")) is not None:
        config.setdefault(TOKENIZER_LENGTH, max_length)
    if config and (path / "modules.json").is_file():
        config[_SENTENCES] = True
    if config and not any((path / name).is_file() for name in _TOKENIZERS):
        config[NO_TOKENIZER] = True
    return config


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():  # reading a pipe would block
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


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
    if config.keys() & SOUND_KEYS:
        return "automatic-speech-recognition"
    return "image-text-to-text" if "vision_config" in config else "text2text-generation"


def _rules(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    which = "These are also the default. " if tuple(names) == PRESET else ""
    return [
        f"# The rules, in the order of application. {which}List all: optexport transformations",
        *[line for name in names for line in _rule(name)],
        "",
    ]


def _rule(name: str) -> list[str]:
    use = f"use = {quoted(name)}"
    rule = canonical_name(name)
    if rule is None:  # a rule of another package, or an unknown one
        return ["[[transformations]]", use]
    # The summary of a switch says what it does when it is on.
    values = {key: True if option.default is False else option.default for key, option in RULES[rule].options.items()}
    options = [f"# {key} = {json.dumps(value)}  # {RULES[rule].options[key].summary}" for key, value in values.items()]
    return ["[[transformations]]", f"{use}  # {RULES[rule].summary}", *options]
