"""Checks arguments that the Python API takes, which may be anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from optexport.errors import ConfigError
from optexport.job import preset
from optexport.transformations import Transformation
from optexport.transformations.apply import NamedRule

# How what is a mapping is written.
_WRITTEN = {
    "dynamic": '{"x": {0: "batch"}}',
    "metrics": '{"cosine": 0.999}',
    "precision": '{"onnx": "int8"}',
}


def named_rules(transformations: Transformation | Iterable[Transformation] | None) -> tuple[NamedRule, ...]:
    """The rules that transformations are, by the names that reports give them; the preset by default.

    Raises:
        ConfigError: Something else is among them.
    """
    if transformations is None:
        return preset()
    given: Any = transformations  # which may be anything: a class, where parentheses were forgotten
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
    """Formats as a config has them, which is told of what is none."""
    return list(formats) if isinstance(formats, Iterable) and not isinstance(formats, str) else formats


def check_arguments(model: Any, **mappings: Any) -> None:
    """Checks what is given in Python, where it may be anything.

    Raises:
        ConfigError: The model is none, or another argument is no mapping.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ConfigError(f"it is a {type(model).__name__}, not a module", location="model")
    for name, given in mappings.items():
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{given!r} is no mapping", location=name, hint=f"Write {_WRITTEN[name]}.")
    for name, axes in (mappings.get("dynamic") or {}).items():
        if not isinstance(axes, Mapping):
            raise ConfigError(f"{axes!r} is no mapping", location=f"dynamic: {name}", hint='Write {0: "batch"}.')
