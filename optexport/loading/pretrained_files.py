"""Files that lie beside a model of transformers, in its folder or on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from optexport.errors import SourceError, first_line

_FROM_HUB = ("local_files_only", "revision")


def find_all(name: str, filename: str, options: Mapping[str, Any]) -> list[Path]:
    """The files of that name in a folder and in those of a model's parts; of a model on the hub its own alone.

    Args:
        name, options: As for `find`.
    """
    if Path(name).is_dir():
        return sorted(path for path in Path(name).rglob(filename) if path.is_file())
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

    found = cached_file(
        name,
        filename,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{key: options[key] for key in ("subfolder", *_FROM_HUB) if key in options},
    )
    return None if found is None else Path(found)


def check_shards(name: str) -> None:
    """Checks that the parts of a model's weights lie in its folder, as its index names them.

    Another's folder would have any weights of this machine exported as its own.

    Args:
        name: A folder, or a hub id, whose files the hub's client fetches by their names.

    Raises:
        SourceError: An index names a file elsewhere, or is no JSON.
    """
    for path in find_all(name, "*.index.json", {}) if Path(name).is_dir() else ():
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise SourceError(f"it is no JSON: {first_line(error)}", location=str(path)) from error
        parts = index.get("weight_map") if isinstance(index, dict) else None
        for part in dict.fromkeys(map(str, parts.values())) if isinstance(parts, dict) else ():
            if PurePosixPath(part).is_absolute() or ".." in PurePosixPath(part).parts:
                raise SourceError(
                    f"it names {part}, which lies outside of the model's folder",
                    location=str(path),
                    hint="Copy the file there, and name it alone.",
                )


def check_reachable(name: str, options: Mapping[str, Any]) -> None:
    """Asks for the config of a model on the hub, for 23 seconds where that does not answer, as `find` does every time.

    Args:
        name: A hub id.
        options: As for `find`.

    Raises:
        OSError: It is not on this machine, and the hub does not answer; or that has no such model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, "config.json", **{key: options[key] for key in _FROM_HUB if key in options})
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:  # for transformers to say what that means
        return
