"""Checks the arguments of the Python API, which may have any type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from optexport.errors import ConfigError
from optexport.job import preset
from optexport.transformations import Transformation
from optexport.transformations.apply import NamedRule

# Examples of mappings, for hints.
_WRITTEN = {
    "dynamic": '{"x": {0: "batch"}}',
    "metrics": '{"cosine": 0.999}',
    "precision": '{"onnx": "int8"}',
}


def named_rules(transformations: Transformation | Iterable[Transformation] | None) -> tuple[NamedRule, ...]:
    """Returns transformations with the names that reports use; by default the preset.

    Raises:
        ConfigError: A value is not a transformation.
    """
    if transformations is None:
        return preset()
    given: Any = transformations  # a common mistake is a class without parentheses
    listed = [*given] if isinstance(given, Iterable) and not isinstance(given, str | type) else [given]
    for transformation in listed:
        if not isinstance(transformation, Transformation):
            raise ConfigError(
                f"{transformation!r} is no transformation",
                location="transformations",
                hint="Give instances, such as optexport.transformations.MergeLinears().",
            )
    return NamedRule.of(listed)


def listed(formats: Any) -> Any:
    """Returns formats as a list for the config; leaves other values for the config to reject."""
    return list(formats) if isinstance(formats, Iterable) and not isinstance(formats, str) else formats


def check_arguments(model: Any, **mappings: Any) -> None:
    """Checks the types of arguments.

    Raises:
        ConfigError: The model is not a module, or another argument is not a mapping.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ConfigError(f"it is a {type(model).__name__}, not a module", location="model")
    for name, given in mappings.items():
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{given!r} is no mapping", location=name, hint=f"Write {_WRITTEN[name]}.")
    for name, axes in (mappings.get("dynamic") or {}).items():
        if not isinstance(axes, Mapping):
            raise ConfigError(f"{axes!r} is no mapping", location=f"dynamic: {name}", hint='Write {0: "batch"}.')
