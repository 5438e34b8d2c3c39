"""Finds and checks files of a transformers model, in its folder or on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from optexport.errors import SourceError, first_line

_FROM_HUB = ("local_files_only", "revision")


def find_all(name: str, filename: str, options: Mapping[str, Any]) -> list[Path]:
    """Returns all files with a name in a folder and its subfolders, or one on the hub.

    Args:
        name: As for `find`.
        options: As for `find`.
    """
    if Path(name).is_dir():
        return sorted(path for path in Path(name).rglob(filename) if path.is_file())
    path = find(name, filename, options)
    return [] if path is None else [path]


def find(name: str, filename: str, options: Mapping[str, Any]) -> Path | None:
    """Returns the local path of a model's file, or None; downloads the file if necessary.

    Args:
        name: A folder, or a hub id.
        options: Options of ``from_pretrained``; only ``local_files_only``, ``revision`` and ``subfolder`` are used.
    """
    if Path(name).is_dir():
        path = Path(name, options.get("subfolder", ""), filename)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    cached = cached_file(
        name,
        filename,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{key: options[key] for key in ("subfolder", *_FROM_HUB) if key in options},
    )
    return None if cached is None else Path(cached)


def check_shards(name: str) -> None:
    """Checks that the weight files in a model's index are in its folder.

    A path to another folder would export any local weights as the model's.

    Args:
        name: A folder, or a hub id; the hub's client downloads shards by name, so these are not checked.

    Raises:
        SourceError: An index names a file elsewhere, or is not JSON.
    """
    for path in find_all(name, "*.index.json", {}) if Path(name).is_dir() else ():
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise SourceError(
                f"the index of the weights is not valid JSON: {first_line(error)}",
                location=str(path),
                hint="Save the model again.",
            ) from error
        parts = index.get("weight_map") if isinstance(index, dict) else None
        for part in dict.fromkeys(map(str, parts.values())) if isinstance(parts, dict) else ():
            if PurePosixPath(part).is_absolute() or ".." in PurePosixPath(part).parts:
                raise SourceError(
                    f"the weights file {part} is outside of the model's folder",
                    location=str(path),
                    hint="Copy the file into the folder, and correct its path in the index.",
                )


def check_reachable(name: str, options: Mapping[str, Any]) -> None:
    """Requests the config of a model on the hub, so that a missing network is reported early.

    A request without an answer takes 23 seconds, and `find` would repeat it for every file.

    Args:
        name: A hub id.
        options: As for `find`.

    Raises:
        OSError: The file is not on this machine, and the hub does not answer or has no such model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, "config.json", **{key: options[key] for key in _FROM_HUB if key in options})
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:  # transformers reports this error better
        return
