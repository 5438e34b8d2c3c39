"""Merges low-rank adapters (LoRA and similar) into the model that they were trained for.

Only this module imports ``peft``, an optional package (extra ``adapters``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from optexport._utils.extras import check_extra
from optexport.errors import SourceError, first_line
from optexport.loading.pretrained_files import find_all
from optexport.tracing import dynamo_exporter

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft's prefix of weights outside the adapter layers, such as a trained head


def check_configs(name: str, options: Mapping[str, Any]) -> None:
    """Checks the configs of all adapters next to a model and in the folders of its parts.

    Args:
        name: A folder, or a hub id.
        options: As for ``from_pretrained``.

    Raises:
        SourceError: `check_config` refuses a config.
    """
    for path in find_all(name, CONFIG, options):
        check_config(path)


def check_config(path: Path) -> None:
    """Checks that an adapter's config does not make peft import a module.

    Args:
        path: The path of ``adapter_config.json``.

    Raises:
        SourceError: The config names a module, or is not JSON.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise SourceError(
            f"the config of the adapter is not valid JSON: {first_line(error)}",
            location=str(path),
            hint="Save the adapter again.",
        ) from error
    if isinstance(settings, dict) and settings.get("megatron_config") is not None:
        raise SourceError(
            "the key megatron_config makes peft import a module that this file names",
            location=str(path),
            hint="Remove megatron_config and megatron_core from the file.",
        )


def read_weight_names(folder: Path) -> Collection[str]:
    """Returns the names of an adapter's weights, without peft's prefix.

    Raises:
        SourceError: The folder contains no adapter, or its weights are a pickle.
    """
    location = f"model.adapter: {folder.name}"
    if not (folder / CONFIG).is_file():
        raise SourceError(
            f"the folder has no {CONFIG}",
            location=location,
            hint="Set model.adapter to a folder that PeftModel.save_pretrained wrote.",
        )
    if not (folder / _WEIGHTS).is_file():
        raise SourceError(
            f"the folder has no {_WEIGHTS}; pickled weights are not loaded, because they may run code",
            location=location,
            hint="Save the adapter again with safe_serialization=True.",
        )
    try:
        with safe_open(folder / _WEIGHTS, "pt") as file:
            return {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"{_WEIGHTS} cannot be read: {first_line(error)}", location=location, hint="Save the adapter again."
        ) from error


def merge(model: nn.Module, folder: Path) -> nn.Module:
    """Adds an adapter's weights to the weights of the layers that it changes.

    Args:
        model: Changed in place; do not use it afterwards.
        folder: A folder that ``PeftModel.save_pretrained`` wrote.

    Returns:
        The model with merged weights, without layers of the adapter.

    Raises:
        ConfigError: peft is not installed.
        SourceError: The adapter cannot be merged into this model.
    """
    location = f"model.adapter: {folder.name}"
    names = read_weight_names(folder)
    check_extra("adapters", location)
    check_config(folder / CONFIG)
    with dynamo_exporter.quiet():
        import peft
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with dynamo_exporter.quiet():
            adapted: Any = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
        expected = {name.removeprefix(_PREFIX) for name in peft.get_peft_model_state_dict(adapted)}
    except Exception as error:  # peft raises many types
        raise SourceError(
            f"peft could not load the adapter: {first_line(error)}",
            location=location,
            hint="Check that the adapter was trained for this model.",
        ) from error
    if wrong := sorted(expected ^ set(names)):
        problem = "is missing in the adapter" if wrong[0] in expected else f"does not exist in {type(model).__name__}"
        raise SourceError(
            f"{len(wrong)} weights do not match the model; for example, {wrong[0]} {problem}",
            location=location,
            hint="Set model.source and model.task to the model that the adapter was trained for: "
            f"{settings.get('base_model_name_or_path')}.",
        )
    if not hasattr(adapted, "merge_and_unload"):
        raise SourceError(
            f"a {settings.get('peft_type')} adapter cannot be merged into weights",
            location=location,
            hint="Use a LoRA adapter.",
        )
    try:
        with torch.no_grad(), dynamo_exporter.quiet():
            merged: nn.Module = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft raises many types, for instance if a sum is NaN
        raise SourceError(
            f"peft could not merge the adapter: {first_line(error)}",
            location=location,
            hint="Check the weights of the adapter for NaN and infinity.",
        ) from error
    return merged
