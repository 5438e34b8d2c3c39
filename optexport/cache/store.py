"""Entries that are kept between runs, each under a digest of all that has a say in it.

An entry is a folder that appears whole or not at all, and holds its own digests: one that is damaged is none. Where
nothing can be written, or there is no place, everything is computed every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optexport.bundle.digests import sha256
from optexport.bundle.layout import cache
from optexport.cache.environment import surroundings

# An entry larger than this is not kept, and together they take no more than that.
_ENTRY_BYTES = 1 << 30
_ALL_BYTES = 4 << 30

_SAID = "entry.json"
_NAME = re.compile(r"[0-9a-f]{64}")
_DRAFT = "draft-"
# What a killed run left of an entry is removed after so many seconds, as another may still be at work on it.
_DRAFT_SECONDS = 24 * 3600
_off = 0


def enabled() -> bool:
    """Whether there is a place to keep anything at."""
    return not _off and cache() is not None


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Within it nothing is taken from earlier runs, and nothing is kept."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def name(kind: str, *parts: Any) -> str:
    """Names an entry by all that has a say in it: the parts, as JSON holds them, code, versions and the machine."""
    said = json.dumps([kind, surroundings(), *parts], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def read(entry: str) -> tuple[Path, Any] | None:
    """The folder of an entry, whose files are as they were written, and its notes; None where there is none."""
    place = cache()
    if place is None or _off:
        return None
    folder = place / entry
    try:
        if not all(path.is_file() for path in folder.iterdir()):  # a pipe would be waited for
            return None
        said = json.loads((folder / _SAID).read_bytes())
        files, notes = said["files"], said["notes"]
        found = {path.name: sha256(path) for path in folder.iterdir() if path.name != _SAID}
        if found != files or said["sha256"] != _digest(entry, files, notes):
            return None
        (folder / _SAID).touch()  # what was not used for longest goes first
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or a damaged one
        return None
    return folder, notes


def write(entry: str, notes: Any = None, *, size: int = 0, fill: Callable[[Path], None] = lambda folder: None) -> None:
    """Keeps an entry, in place of one of that name.

    Args:
        notes: What JSON can hold.
        size: Bytes that its files take, about.
        fill: Writes its files to a folder.
    """
    place = cache()
    if place is None or _off or size > _ENTRY_BYTES:
        return
    with contextlib.suppress(OSError):  # where nothing can be written it is computed every time
        place.mkdir(parents=True, exist_ok=True)
        _make_room(place, size)
        with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=place) as draft:
            folder = Path(draft) / entry
            folder.mkdir()
            fill(folder)
            files = {path.name: sha256(path) for path in folder.iterdir()}
            said = {"files": files, "notes": notes, "sha256": _digest(entry, files, notes)}
            (folder / _SAID).write_text(json.dumps(said), encoding="utf-8")
            _remove(place / entry)
            folder.replace(place / entry)


def _remove(place: Path) -> None:
    """Removes whatever is there, be it a pipe, which Python 3.11 would wait for as it looks for a folder."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _digest(entry: str, files: dict[str, str], notes: Any) -> str:
    return hashlib.sha256(json.dumps([entry, files, notes], sort_keys=True).encode()).hexdigest()


def _make_room(place: Path, size: int) -> None:
    """Removes what was not used for longest, and drafts of runs that were killed; nothing that is not of this store."""
    for draft in place.glob(f"{_DRAFT}*"):
        if draft.stat().st_mtime < time.time() - _DRAFT_SECONDS:
            _remove(draft)
    used = {}
    for folder in filter(lambda each: _NAME.fullmatch(each.name), place.iterdir()):
        if (folder / _SAID).is_file():
            used[folder] = (folder / _SAID).stat().st_mtime
        else:  # a run was killed as it removed it
            _remove(folder)
    for folder in sorted(used, key=lambda folder: used[folder], reverse=True):
        size += sum(path.stat().st_size for path in folder.iterdir())
        if size > _ALL_BYTES:
            shutil.rmtree(folder, ignore_errors=True)
