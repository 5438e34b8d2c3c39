"""Adds the path of the config to errors whose location is one of its keys."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from optexport.config.schema import Config
from optexport.config.validation import Table
from optexport.errors import OptexportError

_KEY = re.compile(r"([a-z_]+)(?:\.([a-z_0-9]+))?(?=[:.\[]|$)")


@contextlib.contextmanager
def naming_config(path: Path) -> Iterator[None]:
    """Adds the path of a config to the location of an error, if the location is one of the config's keys."""
    try:
        yield
    except OptexportError as error:
        if error.location and _starts_with_key(error.location) and not error.location.startswith(f"{path}:"):
            error.locate(f"{path}: {error.location}")
        raise


def _starts_with_key(location: str) -> bool:
    """Returns True for ``model.source: ...``, and False for ``model.onnx: ...``, which is a file."""
    match = _KEY.match(location)
    if match is None or match[1] not in Config.model_fields:
        return False
    annotation = Config.model_fields[match[1]].annotation
    kinds = (annotation, *get_args(annotation))
    tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Table)]
    return match[2] is None or not tables or any(match[2] in table.model_fields for table in tables)
