"""Checks the arguments of the Python API, which may have any type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from optexport.errors import ConfigError
from optexport.pipeline.rules import load_preset
from optexport.transformations import Transformation
from optexport.transformations.apply import NamedRule

# Examples of mappings, for hints.
_EXAMPLES = {
    "dynamic": '{"x": {0: "batch"}}',
    "values": '{"lengths": {"indexes": "time"}}',
    "metrics": '{"cosine": 0.999}',
    "precision": '{"onnx": "int8"}',
    "passes": '{"onnx": ["sum-residuals"]}',
}


def name_rules(transformations: Transformation | Iterable[Transformation] | None) -> tuple[NamedRule, ...]:
    """Returns transformations with the names that reports use; by default the preset.

    Raises:
        ConfigError: A value is not a transformation.
    """
    if transformations is None:
        return load_preset()
    value: Any = transformations  # a common mistake is a class without parentheses
    instances = [*value] if isinstance(value, Iterable) and not isinstance(value, str | type) else [value]
    for transformation in instances:
        if not isinstance(transformation, Transformation):
            raise ConfigError(
                f"{transformation!r} is not a transformation",
                location="transformations",
                hint="Pass instances, such as optexport.transformations.MergeLinears().",
            )
    return NamedRule.of(instances)


def as_list(formats: Any) -> Any:
    """Returns formats as a list for the config; leaves other values for the config to reject."""
    return list(formats) if isinstance(formats, Iterable) and not isinstance(formats, str) else formats


def check_arguments(model: Any, **mappings: Any) -> None:
    """Checks the types of arguments.

    Raises:
        ConfigError: The model is not a module, or another argument is not a mapping.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ConfigError(f"the model is not an nn.Module (found {type(model).__name__})", location="model")
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{value!r} is not a mapping", location=name, hint=f"Write {_EXAMPLES[name]}.")
    for name, axes in (mappings.get("dynamic") or {}).items():
        if not isinstance(axes, Mapping):
            raise ConfigError(f"{axes!r} is not a mapping", location=f"dynamic: {name}", hint='Write {0: "batch"}.')
