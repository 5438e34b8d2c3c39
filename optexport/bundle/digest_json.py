"""JSON documents in a canonical form that contain their own digest.

A change of any byte is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from optexport.errors import BundleError, unreadable

M = TypeVar("M", bound=BaseModel)

# In bytes; the manifest of MiniLM has 40,000. Parsing a file of nested brackets takes 25 times its size in memory.
LARGEST = 32 << 20
_HINT = "The bundle was changed after it was written. Copy it again, or export it again."


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document with its digest."""
    path.write_bytes(_canonical({**document, "digest": _digest(document)}))


def read(path: Path) -> dict[str, Any]:
    """Reads a document written by `write`.

    Raises:
        BundleError: The file is missing, is not JSON, or differs from what `write` wrote.
    """
    try:
        if path.exists() and not path.is_file():  # a read from a pipe would block
            raise BundleError("the path is not a regular file", location=str(path), hint=_HINT)
        if (size := path.stat().st_size) > LARGEST:
            raise BundleError(
                f"the file is too large (expected at most {LARGEST}, found {size} bytes)",
                location=str(path),
                hint=_HINT,
            )
        content = path.read_bytes()
        document = json.loads(content)
        is_intact = (
            isinstance(document, dict)
            and document.get("digest") == _digest(document)
            and content == _canonical(document)
        )
    except FileNotFoundError as error:
        raise BundleError("the file is missing", location=str(path), hint=_HINT) from error
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(error, path, _HINT) from error
    if not is_intact:
        raise BundleError("the content does not match its own digest", location=str(path), hint=_HINT)
    assert isinstance(document, dict)
    return document


def validated(model: type[M], document: Mapping[str, Any], path: Path) -> M:
    """Validates a document against a pydantic model.

    Args:
        path: The path of the document, for the error.

    Raises:
        BundleError: The document does not match the model.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first, *more = error.errors(include_url=False)
        count = f" (and {len(more)} more errors)" if more else ""
        key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        mistake = f"{key}: {message}" if key else message
        raise BundleError(f"the document does not match its schema: {mistake}{count}", location=str(path)) from error


def _digest(document: Mapping[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(_canonical(content)).hexdigest()


def _canonical(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()
