"""Files that lie beside a model of transformers, in its folder or on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def find_all(name: str, filename: str, options: Mapping[str, Any]) -> list[Path]:
    """The files of that name in a folder and in those of a model's parts; of a model on the hub its own alone.

    Args:
        name, options: As for `find`.
    """
    if Path(name).is_dir():
        return sorted(Path(name).rglob(filename))
    found = find(name, filename, options)
    return [] if found is None else [found]


def find(name: str, filename: str, options: Mapping[str, Any]) -> Path | None:
    """Where a file of a model lies on this machine, fetched from the hub if it must be; None where there is none.

    Args:
        name: A folder, or a hub id.
        options: ``local_files_only``, ``revision`` and ``subfolder``, of ``from_pretrained``; others are passed over.
    """
    if Path(name).is_dir():
        path = Path(name, options.get("subfolder", ""), filename)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    known = ("local_files_only", "revision", "subfolder")
    found = cached_file(
        name,
        filename,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{key: options[key] for key in known if key in options},
    )
    return None if found is None else Path(found)
