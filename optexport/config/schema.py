"""The JSON schema of a config file, so that editors complete its keys and mark what cannot be meant."""

from __future__ import annotations

from typing import Any

from optexport.config.file import Config
from optexport.registry import RULES, Option

_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", tuple: "array"}


def config_schema() -> dict[str, Any]:
    """The schema, with the options of every built-in rule.

    It takes whatever `optexport check` takes. What `check` finds beyond it is what two keys say together, and what is
    on the disk.
    """
    schema = Config.model_json_schema()
    rule = schema["$defs"]["TransformationConfig"]
    rule["anyOf"] = [*map(_rule, RULES), {"properties": {"use": {"not": {"enum": list(RULES)}}}}]
    return {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config of optexport"}


def _rule(name: str) -> dict[str, Any]:
    """A table of a built-in rule, which has these options and no others."""
    info = RULES[name]
    options = {key: _option(option) for key, option in info.options.items()}
    shared = {"expect": True, "formats": True}
    use = {"const": name, "description": info.summary}
    return {"properties": {"use": use, **shared, **options}, "additionalProperties": False}


def _option(option: Option) -> dict[str, Any]:
    described = {"description": option.summary, "default": option.default, "type": _TYPES[option.type]}
    if option.type is tuple:
        described |= {"default": list(option.default), "items": {"type": "string"}}
    return described | ({"enum": list(option.choices)} if option.choices else {})
