"""Writes the starter config of ``optexport init``, asking the model's folder for what it can tell."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from optexport.config import SourceKind, source_kind
from optexport.registry import PRESET, RULES
from optexport.tasks import AUTO_CLASSES

# What an architecture's class name ends with, and the task that loads it.
_TASKS = {auto.removeprefix("AutoModel"): task for task, auto in AUTO_CLASSES.items() if auto != "AutoModel"}
_ENDINGS = {**_TASKS, "ForConditionalGeneration": "text2text-generation", "LMHeadModel": "text-generation"}


def starter_config(source: str, folder: Path) -> str:
    """The text of a config for a model.

    Args:
        source: As in ``model.source``; a folder is asked for its config.json.
        folder: Where the config will lie, which a relative source starts from.
    """
    kind = source_kind(source, folder)
    known = _config_json(source, kind, folder)
    path = (folder / source).resolve().name if kind is SourceKind.FOLDER else source.rstrip("/").rpartition("/")[2]
    name = source[len("package:") :].partition("/")[0] if kind is SourceKind.PACKAGE else path.rpartition(":")[2]
    lines = [
        "# What to export. A folder, a hub id, package:NAME/PATH, python:module:factory,",
        "# mlflow:models:/NAME@ALIAS, or a .pt2 file. Paths are relative to this file.",
        "[model]",
        f"source = {json.dumps(source)}",
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
        "multiple = 4.0",
        "",
        "[export]",
        'formats = ["torchscript", "onnx", "pt2"]',
        f"output = {json.dumps(f'build/{name}')}",
        "",
        "# The embedded database; any MLflow server will do.",
        "[tracking]",
        'uri = "sqlite:///mlflow.db"',
        f"experiment = {json.dumps(name)}",
    ]
    return "\n".join(lines) + "\n"


def _config_json(source: str, kind: SourceKind, folder: Path) -> dict[str, Any]:
    if kind is SourceKind.FOLDER:
        path = folder / os.path.expanduser(source)
    elif kind is SourceKind.PACKAGE:
        from importlib.util import find_spec

        package, _, inner = source.removeprefix("package:").partition("/")
        spec = find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            return {}
        path = Path(next(iter(spec.submodule_search_locations))) / inner
    else:
        return {}
    try:
        known = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _task(known: dict[str, Any]) -> list[str]:
    architectures = known.get("architectures") or []
    for architecture in architectures:
        for ending, task in _ENDINGS.items():
            if str(architecture).endswith(ending):
                return [f"task = {json.dumps(task)}  # its config names {architecture}"]
    if architectures:
        return [f'task = "feature-extraction"  # its config names {architectures[0]}']
    return ['# task = "feature-extraction"']


def _inputs(known: dict[str, Any], kind: SourceKind) -> list[str]:
    if "vocab_size" in known or "text_config" in known:
        longest = known.get("max_position_embeddings") or 512
        return [
            'texts = ["A sentence of the kind that the model will see.", "And another one, of another length."]',
            '# data = "lines.jsonl"  # or real data: {"text": "..."} or {"input_ids": [...]} a line',
            "",
            "# Sizes that the exported files must take; sizes never traced are checked too.",
            "[inputs.dynamic]",
            "batch = [1, 64]",
            f"sequence = [2, {longest}]",
        ]
    size = known.get("image_size") or 224
    height, width = size if isinstance(size, list) else (size, size)
    if "num_channels" in known or "image_size" in known:
        name, shape = "pixel_values", f'["batch", {known.get("num_channels", 3)}, {height}, {width}]'
    else:
        name, shape = "x", '["batch", 3, 224, 224]'
    hint = [] if known else ["# The name and shape of the model's input."]
    if kind is SourceKind.HUB:
        hint = ['# For a text model: texts = ["..."] instead of the table below.']
    return [*hint, f"[inputs.tensors.{name}]", f"shape = {shape}", "", "[inputs.dynamic]", "batch = [1, 16]"]


def _rule(name: str) -> list[str]:
    options = [f"# {key} = {json.dumps(o.default)}  # {o.summary}" for key, o in RULES[name].options.items()]
    return ["[[transformations]]", f"use = {json.dumps(name)}  # {RULES[name].summary}", *options]
