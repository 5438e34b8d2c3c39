"""Explains mistakes in a config, all in one message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from optexport.errors import ConfigError, did_you_mean, with_hint
from optexport.redaction import redact

P = ParamSpec("P")

# Expected types by pydantic's error, each with a hint.
_TYPES = {
    **dict.fromkeys(("model_type", "dict_type"), ("a table", "Write a table, such as { key = value }.")),
    **dict.fromkeys(("list_type", "tuple_type"), ("a list", "Put the values in brackets.")),
    **dict.fromkeys(("bool_type", "bool_parsing"), ("true or false", "Write true or false, without quotes.")),
    "int_type": ("a whole number", "Write a number without quotes and without a decimal point."),
    "float_type": ("a number", "Write a number without quotes."),
    "string_type": ("a text", "Put the text in quotes."),
    "finite_number": ("a finite number", "Write a number other than inf and nan."),
}
# Bounds by pydantic's error: the name of the bound in the error's context, the words, and a hint.
_BOUNDS = {
    "greater_than_equal": ("ge", "at least {}", "Write {} or a larger number."),
    "greater_than": ("gt", "more than {}", "Write a number above {}."),
    "less_than_equal": ("le", "at most {}", "Write {} or a smaller number."),
    "less_than": ("lt", "less than {}", "Write a number below {}."),
}
# Examples of required keys.
_EXAMPLES = {
    "model": '[model] with source = "./my-model"',
    "source": 'source = "./my-model"',
    "use": 'use = "merge-linears"',
    "shape": 'shape = ["batch", 3, 224, 224]',
    "name": 'name = "my-model"',
    "min": "min = 0.99",
}


class Table(BaseModel):
    """Base class of the tables of a config: frozen, without unknown keys, conversions and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)


class InvalidValueError(ValueError):
    """A value that a table refuses. pydantic keeps the error, so that `explain_errors` reports its hint.

    Args:
        message: What is wrong.
        hint: What to write instead.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message, self.hint = message, hint
        super().__init__(with_hint(message, hint))


def dimension_name(name: str) -> str:
    """Returns the name of a dimension unchanged, if ``torch.export`` accepts it.

    Raises:
        InvalidValueError: It is not an identifier.
    """
    if not name.isidentifier():
        raise InvalidValueError(
            f'"{name}" is not a valid name of a dimension', 'Write letters, digits and underscores, such as "batch".'
        )
    return name


def explain_errors(error: ValidationError, model: type[BaseModel], name: str) -> ConfigError:
    """Converts pydantic's errors to one ConfigError with a line for each mistake.

    Args:
        error: The error of pydantic.
        model: The class of the outermost table.
        name: The path of the config.
    """
    mistakes: list[ConfigError] = []
    for detail in error.errors():
        key = list(detail["loc"])
        message, hint = _explain(detail, model, key)
        mistakes.append(ConfigError(message, location=f"{name}: {format_key(key)}", hint=hint))
    return _join(mistakes, name, "Correct these first. Further checks follow when all values are valid.")


def _explain(detail: Mapping[str, Any], model: type[BaseModel], key: list[int | str]) -> tuple[str, str | None]:
    """Returns a message and a hint for an error of pydantic."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        noun = "table" if len(key) == 1 and isinstance(value, dict) else "key"
        return f'unknown {noun} "{key[-1]}"', did_you_mean(str(key[-1]), _list_keys(model, key[:-1]))
    if kind == "missing":
        return "this required key is missing", f"Add {_EXAMPLES.get(str(key[-1]), key[-1])}."
    if kind == "value_error":
        error = context["error"]
        return (error.message, error.hint) if isinstance(error, InvalidValueError) else (str(error), None)
    if kind in _TYPES:
        expected, hint = _TYPES[kind]
        return f"expected {expected}, found {show_value(value)}", _example(expected, value, key) or hint
    if kind in _BOUNDS:
        name, words, hint = _BOUNDS[kind]
        limit = f"{context[name]:g}" if isinstance(context[name], float) else str(context[name])
        return f"expected {words.format(limit)}, found {show_value(value)}", hint.format(limit)
    if kind == "literal_error":
        expected = context["expected"].replace("'", '"')
        return f"expected {expected}, found {show_value(value)}", "Write one of these values, in quotes."
    if kind.endswith(("too_short", "too_long")):
        return _explain_length(kind, value, context, key)
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {show_value(value)}", None


def _example(expected: str, value: Any, key: list[int | str]) -> str | None:
    """Returns a hint with the value as it must be written, or None if that is unclear."""
    if expected == "a list" and isinstance(value, dict):
        return f"Write [[{format_key(key)}]] in double brackets."
    if expected == "a list" and isinstance(value, str):
        return f"Write [{show_value(value)}]."
    if expected == "a table" and key[0] == "transformations" and isinstance(value, str):
        return f"Write {{ use = {show_value(value)} }}."
    if expected == "a table" and len(key) == 1:
        return f"Write [{key[0]}], and the keys of the table below it."
    return None


def _explain_length(kind: str, value: Any, context: Mapping[str, Any], key: list[int | str]) -> tuple[str, str]:
    """Returns a message and a hint for a text, list or table that is too short or too long."""
    if not value:
        noun = "text" if isinstance(value, str) else "list" if isinstance(value, list) else "table"
        example = _EXAMPLES.get(str(key[-1]))
        return f"the {noun} is empty", f"Write {example}." if example else "Write a value, or remove the key."
    noun = "characters" if isinstance(value, str) else "values"
    limit = f"at least {context['min_length']}" if "short" in kind else f"at most {context['max_length']}"
    return f"expected {limit} {noun}, found {len(value)}", f"Write {limit} {noun}."


class Mistakes:
    """Collects the mistakes that several checks of a config find.

    Args:
        name: The path of the config.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errors: list[ConfigError] = []

    def collect(self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs a check, and collects its ConfigError."""
        try:
            check(*args, **kwargs)
        except ConfigError as error:
            self._errors.append(error)

    def raise_all(self) -> None:
        """Raises all mistakes as one error.

        Raises:
            ConfigError: A check found a mistake.
        """
        if self._errors:
            raise _join(self._errors, self._name)


def _join(mistakes: Sequence[ConfigError], name: str, hint: str | None = None) -> ConfigError:
    """Returns one mistake unchanged, or an error with one line for each mistake."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = []
    for mistake in mistakes:
        location = (mistake.location or name).removeprefix(f"{name}: ")
        lines.append(f"{location}: {'. '.join(filter(None, [mistake.message, mistake.hint]))}")
    return ConfigError(f"{len(mistakes)} mistakes", location=name, details="\n".join(lines), hint=hint)


def show_value(value: Any) -> str:
    """Returns a value as TOML, shortened to 60 characters, without secrets."""
    text = redact(_as_toml(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, dict):
        keys = {key: key if re.fullmatch(r"[\w-]+", key) else _as_toml(key) for key in value}
        items = [f"{keys[key]} = {_as_toml(item)}" for key, item in value.items()]
        return f"{{ {', '.join(items)} }}" if value else "{}"
    return str(value)


def format_key(parts: Sequence[int | str]) -> str:
    """Formats a path in a config: ``transformations[0].use``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _list_keys(model: type[BaseModel], parts: list[int | str]) -> list[str]:
    """Returns the keys of the table at a path in a config."""
    annotation: Any = model
    for part in parts:
        annotation = _descend(annotation, part)
    table = find_table(annotation)
    return [] if table is None else list(_fields(table))


def _fields(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields by their names in the file."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _descend(annotation: Any, part: int | str) -> Any:
    """Returns the annotation of a table's key, of a list's items, or of a dict's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _fields(annotation)[str(part)].annotation
    first, *rest = get_args(annotation)
    if get_origin(annotation) is dict:
        return rest[-1]
    return first if get_origin(annotation) is list else _descend(first, part)


def find_table(annotation: Any) -> Any:
    """Returns the table class inside an annotation such as ``dict[str, TensorConfig] | None``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    tables = map(find_table, getattr(annotation, "__args__", ()))
    return next((table for table in tables if table is not None), None)


def check_finite(value: Any) -> Any:
    """Rejects infinite numbers: the manifest stores all values as JSON, which has none."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_finite(inner)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValueError(f"expected a finite number, found {value}", "Write a number other than inf and nan.")
    return value
