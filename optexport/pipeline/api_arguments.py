"""Checks the arguments of the Python API, which may have any type."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from optexport.errors import ConfigError
from optexport.loading.loader import Pretrained
from optexport.pipeline.rules import load_preset, load_rule
from optexport.transformations import Transformation, registry
from optexport.transformations.apply import NamedRule

# Examples of mappings, for hints.
_EXAMPLES = {
    "dynamic": '{"x": {0: "batch"}}',
    "values": '{"lengths": {"indexes": "time"}}',
    "metrics": '{"cosine": 0.999}',
    "precision": '{"onnx": "int8"}',
    "passes": '{"onnx": ["sum-residuals"]}',
    "bench": '{"rounds": 50}, or True',
}


# What each argument is, and the class of transformers that loads it.
_PROCESSORS = {
    "tokenizer": ("a tokenizer", "AutoTokenizer"),
    "image_processor": ("an image processor", "AutoImageProcessor"),
}

Rules = Transformation | str | Iterable[Transformation | str]


def name_rules(transformations: Rules | None) -> tuple[NamedRule, ...]:
    """Returns transformations with the names that reports use; by default the preset.

    Args:
        transformations: Transformations, or names of rules as in a config; "preset" stands for the rules of the preset.

    Raises:
        ConfigError: A value is not a transformation, or there is no rule with a name.
    """
    if transformations is None:
        return load_preset()
    value: Any = transformations  # a common mistake is a class without parentheses
    instances = [*value] if isinstance(value, Iterable) and not isinstance(value, str | type) else [value]
    return tuple(rule for instance in instances for rule in _name_rule(instance))


def _name_rule(value: Any) -> tuple[NamedRule, ...]:
    if isinstance(value, str):
        if value == "preset":
            return load_preset()
        registry.check(value, {}, "transformations")
        return (load_rule(registry.canonical_name(value) or value),)
    if not isinstance(value, Transformation):
        raise ConfigError(
            f"{value!r} is not a transformation",
            location="transformations",
            hint='Pass instances, such as optexport.transformations.MergeLinears(), or names, such as "merge-linears".',
        )
    return NamedRule.of(value)


def as_list(value: Any) -> Any:
    """Returns a text, or several values, as a list; leaves a value of another type for the config to reject."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, Iterable) else value


def as_texts(value: Any, name: str) -> list[str]:
    """Returns a text, or several, as a list.

    Raises:
        ConfigError: The value is something else.
    """
    texts = as_list(value)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{value!r} is not a text or a list of texts", location=name)
    return texts


def as_table(value: Any, key: str) -> dict[str, Any] | None:
    """Returns the table of an option that may be a switch, the value of one key, or a mapping; None if it is off."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    return dict(value) if isinstance(value, Mapping) else {key: value}


def as_enabled_table(value: Any, key: str) -> dict[str, Any]:
    """Returns `as_table` for a table that has a key ``enabled``."""
    table = as_table(value, key)
    return {"enabled": table is not None, **(table or {})}


def as_pretrained(**processors: Any) -> Pretrained | None:
    """Returns copies of a tokenizer and an image processor, or None without both.

    Saving them changes settings such as the padding, so the caller's objects are copied.

    Raises:
        ConfigError: One of them cannot be saved, such as a name.
    """
    for name, processor in processors.items():
        noun, auto_class = _PROCESSORS[name]
        if processor is not None and not hasattr(processor, "save_pretrained"):
            raise ConfigError(
                f"{processor!r} is not {noun} of transformers",
                location=name,
                hint=f"Pass the object that transformers.{auto_class}.from_pretrained(...) returns.",
            )
    if all(processor is None for processor in processors.values()):
        return None
    return Pretrained("", {}, **copy.deepcopy(processors))


def check_arguments(model: Any, **mappings: Any) -> None:
    """Checks the types of arguments.

    Raises:
        ConfigError: The model is not a module, or another argument is not a mapping.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        hint = None
        if isinstance(model, Mapping | str | PathLike):
            hint = "Build the module, then call model.load_state_dict(weights) and model.eval()."
        raise ConfigError(f"the model is not an nn.Module (found {type(model).__name__})", location="model", hint=hint)
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{value!r} is not a mapping", location=name, hint=f"Write {_EXAMPLES[name]}.")
    for name, axes in (mappings.get("dynamic") or {}).items():
        if not isinstance(axes, Mapping):
            raise ConfigError(f"{axes!r} is not a mapping", location=f"dynamic: {name}", hint='Write {0: "batch"}.')
