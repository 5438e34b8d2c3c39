"""Explains mistakes in a config, all in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from optexport.errors import ConfigError, did_you_mean
from optexport.redaction import redact

P = ParamSpec("P")


class Table(BaseModel):
    """Base class of the tables of a config: frozen, without unknown keys, conversions and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)


# Expected values, by the type of pydantic's error.
_FORMS = {
    "model_type": "a table",
    "dict_type": "a table",
    "list_type": "a list, in brackets",
    "tuple_type": "a list, in brackets",
    "bool_type": "true or false, without quotes",
    "bool_parsing": "true or false, without quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text, in quotes",
}


def explained(error: ValidationError, model: type[BaseModel], name: str) -> ConfigError:
    """Converts pydantic's errors to one ConfigError with a line for each mistake.

    An unknown key has a hint with the most similar known key.
    """
    mistakes: list[ConfigError] = []
    for found in error.errors():
        location = list(found["loc"])
        cause, hint = found["msg"][:1].lower() + found["msg"][1:], None
        if found["type"] in ("too_short", "too_long"):
            least, most = (found["ctx"].get(f"{end}_length") for end in ("min", "max"))
            cause = f"it must hold {f'at least {least}' if most is None else most}"
        elif (form := _FORMS.get(found["type"])) is not None:
            cause = f"it must be {form}"
        if found["type"] == "extra_forbidden":
            cause, hint = (
                "there is no such key",
                did_you_mean(str(location[-1]), _known_keys(model, location[:-1])),
            )
        elif found["type"] == "missing":
            cause = "it is required"
        elif found["type"] == "value_error":
            cause = str(found["ctx"]["error"])
        else:
            cause = f"{cause}, not {shown(found['input'])}"
        mistakes.append(ConfigError(cause, location=f"{name}: {dotted(location)}", hint=hint))
    return _as_one(mistakes, name, "; others may show when these are mended")


class Mistakes:
    """Collects the mistakes that several checks of a config find.

    Args:
        name: The path of the config.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[ConfigError] = []

    def of(self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs a check, and collects its ConfigError."""
        try:
            check(*args, **kwargs)
        except ConfigError as error:
            self._found.append(error)

    def tell(self) -> None:
        """Raises all mistakes as one error.

        Raises:
            ConfigError: A check found a mistake.
        """
        if self._found:
            raise _as_one(self._found, self._name)


def _as_one(mistakes: Sequence[ConfigError], name: str, after: str = "") -> ConfigError:
    if len(mistakes) == 1:
        return mistakes[0]
    lines = []
    for mistake in mistakes:
        location = (mistake.location or name).removeprefix(f"{name}: ")
        lines.append(f"\n  {location}: {'. '.join(filter(None, [mistake.message, mistake.hint]))}")
    return ConfigError(f"{len(mistakes)} mistakes{after}{''.join(lines)}", location=name)


def shown(value: Any) -> str:
    """Returns the repr of a value, shortened to 60 characters, without secrets."""
    text = redact(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def dotted(location: Sequence[int | str]) -> str:
    """Formats a path in a config: ``transformations[0].use``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _known_keys(model: type[BaseModel], location: list[int | str]) -> list[str]:
    annotation: Any = model
    for part in location:
        annotation = _inside(annotation, part)
    table = table_in(annotation)
    return [] if table is None else list(_fields(table))


def _fields(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields by their names in the file."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _inside(annotation: Any, part: int | str) -> Any:
    """Returns the annotation of a table's key, of a list's items, or of a dict's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _fields(annotation)[str(part)].annotation
    first, *rest = get_args(annotation)
    if get_origin(annotation) is dict:
        return rest[-1]
    return first if get_origin(annotation) is list else _inside(first, part)


def table_in(annotation: Any) -> Any:
    """Returns the table class inside an annotation such as ``dict[str, TensorConfig] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (table_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)
