"""The JSON schema of a config file, for completion and checks in editors."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from optexport.config.schema import Config
from optexport.config.tasks import AUTO_CLASSES
from optexport.config.validation import find_table
from optexport.exporters.registry import BUILT_IN, list_passes
from optexport.transformations.registry import RULES, Option

_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", tuple: "array"}


def config_schema() -> dict[str, Any]:
    """Returns the schema, with the options of every built-in rule.

    It accepts everything that `optexport check` accepts. `check` also finds contradictions between keys, and problems
    with files on the disk.
    """
    schema = Config.model_json_schema(schema_generator=_Described)
    tables = schema["$defs"]
    tables["ModelConfig"]["properties"]["task"] |= {"anyOf": [{"enum": list(AUTO_CLASSES)}, {"type": "null"}]}
    tables["ExportConfig"]["properties"]["passes"]["properties"] = {
        name: {"type": "array", "items": {"enum": list(list_passes(name))}} for name in BUILT_IN
    }
    rule = tables["TransformationConfig"]
    rule["properties"]["use"] |= {"anyOf": [{"enum": list(RULES)}, {"type": "string"}]}
    rule["anyOf"] = [*map(_rule, RULES), {"properties": {"use": {"not": {"enum": list(RULES)}}}}]
    return {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config of optexport"}


class _Described(GenerateJsonSchema):
    """Takes the description of a key from the docstring of its table, or of the nested table."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        document, table = super().model_schema(schema), schema["cls"]
        document["description"], descriptions = _docstring(table)
        for name, field in table.model_fields.items():
            inner = find_table(field.annotation)
            is_described = name in descriptions or inner is None
            text = descriptions[name] if is_described else _docstring(inner)[0]
            document["properties"][field.alias or name]["description"] = text
        return document


def _docstring(table: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """Returns the summary of a table's docstring, and the description of each key."""
    summary, _, attributes = (inspect.getdoc(table) or "").partition("\n\nAttributes:\n")
    keys = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return _plain(summary), {name: _plain(text) for name, text in keys}


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _rule(name: str) -> dict[str, Any]:
    """Returns the schema of a table for a built-in rule, which allows its options only."""
    info = RULES[name]
    options = {key: _option(option) for key, option in info.options.items()}
    shared = {"min_matches": True, "formats": True}
    use = {"const": name, "description": info.summary}
    return {"properties": {"use": use, **shared, **options}, "additionalProperties": False}


def _option(option: Option) -> dict[str, Any]:
    document = {"description": option.summary, "default": option.default, "type": _TYPES[option.type]}
    if option.type is tuple:
        document |= {"default": list(option.default), "items": {"type": "string"}}
    return document | ({"enum": list(option.choices)} if option.choices else {})
