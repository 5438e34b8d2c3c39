"""Adapters of low rank (LoRA and its kin), merged into the model that they were trained for.

The one door to ``peft``, an optional package: its extra is ``adapters``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from optexport._utils.extras import check_extra
from optexport.errors import SourceError, first_line
from optexport.loading import peft_patterns
from optexport.loading.peft_patterns import CONFIG
from optexport.tracing import transformers_exporter

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of what an adapter keeps beside its own matrices: a head that was trained with it


def saved_weights(folder: Path) -> Collection[str]:
    """The names that the weights in an adapter's folder would have in the model, if the model has any such.

    Raises:
        SourceError: It is no adapter's folder, or holds its weights as a pickle.
    """
    location = f"model.adapter: {folder.name}"
    if not (folder / CONFIG).is_file():
        raise SourceError(
            f"it holds no {CONFIG}", location=location, hint="Give the folder that PeftModel.save_pretrained wrote."
        )
    if not (folder / _WEIGHTS).is_file():
        raise SourceError(
            f"it holds no {_WEIGHTS}; weights in a pickle are not loaded, which may run code",
            location=location,
            hint="Save it again with safe_serialization=True.",
        )
    try:
        with safe_open(folder / _WEIGHTS, "pt") as file:
            return {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{_WEIGHTS} cannot be read: {first_line(error)}", location=location) from error


def merge(model: nn.Module, folder: Path) -> nn.Module:
    """Adds an adapter's weights to those of the layers that it changes.

    Args:
        model: Changed in place, and may not be used any more.
        folder: What ``PeftModel.save_pretrained`` wrote.

    Returns:
        The model as it was built, without layers of the adapter.

    Raises:
        ConfigError: peft is not installed.
        SourceError: The adapter is none that can be merged into this model.
    """
    location = f"model.adapter: {folder.name}"
    saved = saved_weights(folder)
    check_extra("adapters", location)
    peft_patterns.check(folder / CONFIG)
    with transformers_exporter.quiet():
        import peft
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with transformers_exporter.quiet():
            adapted: Any = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
        known = {name.removeprefix(_PREFIX) for name in peft.get_peft_model_state_dict(adapted)}
    except Exception as error:  # peft raises many kinds
        raise SourceError(f"peft could not load it: {first_line(error)}", location=location) from error
    if wrong := sorted(known ^ set(saved)):
        which = "is not in the folder" if wrong[0] in known else f"has no place in {type(model).__name__}"
        raise SourceError(
            f"{len(wrong)} weights do not fit, {wrong[0]} for one, which {which}",
            location=location,
            hint=f"It was trained for {settings.get('base_model_name_or_path')}: is that model.source, with its task?",
        )
    if not hasattr(adapted, "merge_and_unload"):
        raise SourceError(
            f"a {settings.get('peft_type')} adapter cannot be merged into weights",
            location=location,
            hint="Give a LoRA one.",
        )
    try:
        with torch.no_grad(), transformers_exporter.quiet():
            merged: nn.Module = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft raises many kinds; NaN among what it sums is one
        raise SourceError(f"peft could not merge it: {first_line(error)}", location=location) from error
    return merged
