"""JSON documents that carry their own digest, in one canonical form: a changed byte anywhere shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optexport.errors import BundleError

# In bytes; the manifest of MiniLM has 40,000.
LARGEST = 256 << 20
_MEND = "The bundle was changed after it was written: get it again, or export it again."


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document with its digest."""
    path.write_bytes(_canonical({**document, "digest": _digest(document)}))


def read(path: Path) -> dict[str, Any]:
    """Reads a document that `write` wrote.

    Raises:
        BundleError: It is missing, is not JSON, or is not byte for byte what was written.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise BundleError(f"it is larger than {LARGEST} bytes", place=str(path), mend=_MEND)
        content = path.read_bytes()
        document = json.loads(content)
        whole = (
            isinstance(document, dict)
            and document.get("digest") == _digest(document)
            and content == _canonical(document)
        )
    except FileNotFoundError as error:
        raise BundleError("it is missing", place=str(path), mend=_MEND) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"it cannot be read: {error}", place=str(path), mend=_MEND) from error
    if not whole:
        raise BundleError("it does not match its own digest", place=str(path), mend=_MEND)
    assert isinstance(document, dict)
    return document


def _digest(document: Mapping[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(_canonical(content)).hexdigest()


def _canonical(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()
