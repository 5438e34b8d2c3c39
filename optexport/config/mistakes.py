"""What pydantic found wrong in a config, in words for the one who wrote it."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from optexport.errors import ConfigError, did_you_mean


def explained(error: ValidationError, model: type[BaseModel], name: str) -> ConfigError:
    """All that pydantic found, as one message: a line per mistake, unknown keys with the nearest known one."""
    mistakes: list[tuple[str, str, str | None]] = []
    for found in error.errors():
        location = list(found["loc"])
        cause, mend = found["msg"][:1].lower() + found["msg"][1:], None
        if found["type"] in ("too_short", "too_long"):
            least, most = (found["ctx"].get(f"{end}_length") for end in ("min", "max"))
            cause = f"it must hold {f'at least {least}' if most is None else most}"
        elif found["type"] in ("model_type", "dict_type"):
            cause = "it must be a table"
        if found["type"] == "extra_forbidden":
            cause, mend = (
                "there is no such key",
                did_you_mean(str(location[-1]), _known_keys(model, location[:-1])),
            )
        elif found["type"] == "missing":
            cause = "it is required"
        elif found["type"] == "value_error":
            cause = str(found["ctx"]["error"])
        else:
            cause = f"{cause}, not {_shown(found['input'])}"
        mistakes.append((_dotted(location), cause, mend))
    if len(mistakes) == 1:
        place, cause, mend = mistakes[0]
        return ConfigError(cause, place=f"{name}: {place}", mend=mend)
    lines = [f"\n  {place}: {'. '.join(filter(None, [cause, mend]))}" for place, cause, mend in mistakes]
    return ConfigError(f"{len(mistakes)} mistakes{''.join(lines)}", place=name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dotted(location: list[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"


def _known_keys(model: type[BaseModel], location: list[int | str]) -> list[str]:
    annotation: Any = model
    for part in location:
        annotation = _inside(annotation, part)
    table = _table_in(annotation)
    return [] if table is None else list(_fields(table))


def _fields(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields by the names that they have in the file."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _inside(annotation: Any, part: int | str) -> Any:
    """What a key of a table holds, or an item of a list, or of a table whose keys are free."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _fields(annotation)[str(part)].annotation
    first, *rest = get_args(annotation)
    if get_origin(annotation) is dict:
        return rest[-1]
    return first if get_origin(annotation) is list else _inside(first, part)


def _table_in(annotation: Any) -> Any:
    """The table class somewhere inside an annotation such as ``dict[str, TensorConfig] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_table_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)
