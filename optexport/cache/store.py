"""Cache entries. The key of an entry is a digest of everything that affects its content.

An entry is a folder that appears complete or not at all. It contains its own digests, and damaged entries are ignored.
Without a writable cache folder, everything is computed each time.
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
from optexport.cache.folder import find_cache_folder
from optexport.cache.key_environment import environment

# Limits in bytes for one entry and for all entries together.
_ENTRY_BYTES = 1 << 30
_ALL_BYTES = 4 << 30

_RECORD = "entry.json"
_NAME = re.compile(r"[0-9a-f]{64}")
_DRAFT = "draft-"
# In seconds: the age at which a draft counts as the leftover of a killed run and is removed.
_DRAFT_SECONDS = 24 * 3600
_off = 0


def enabled() -> bool:
    """Returns True if the cache is on."""
    return not _off and find_cache_folder() is not None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Turns the cache off within the block, for reading and for writing."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def entry_key(kind: str, *parts: Any, depends_on_threads: bool = True) -> str:
    """Returns the key of an entry: a digest of its kind, its parts and the environment."""
    fields = environment()
    if not depends_on_threads:
        del fields["threads"]
    text = json.dumps([kind, fields, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read(entry: str) -> tuple[Path, Any] | None:
    """Returns the folder and the notes of an intact entry, or None."""
    cache = find_cache_folder()
    if cache is None or _off:
        return None
    folder = cache / entry
    try:
        if not all(path.is_file() for path in folder.iterdir()):  # a read from a pipe would block
            return None
        record = json.loads((folder / _RECORD).read_bytes())
        files, notes = record["files"], record["notes"]
        digests = {path.name: sha256(path) for path in folder.iterdir() if path.name != _RECORD}
        if digests != files or record["sha256"] != _digest(entry, files, notes):
            return None
        (folder / _RECORD).touch()  # the least recently used entries are removed first
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        return None
    return folder, notes


def write(entry: str, notes: Any = None, *, size: int = 0, fill: Callable[[Path], None] = lambda folder: None) -> None:
    """Stores an entry and replaces one of the same key.

    Args:
        notes: Any JSON value.
        size: The approximate size of the files, in bytes.
        fill: Writes the files into a folder.
    """
    cache = find_cache_folder()
    if cache is None or _off or size > _ENTRY_BYTES:
        return
    with contextlib.suppress(OSError):  # without write access everything is computed each time
        cache.mkdir(parents=True, exist_ok=True)
        _make_room(cache, size)
        with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=cache) as draft:
            folder = Path(draft) / entry
            folder.mkdir()
            fill(folder)
            files = {path.name: sha256(path) for path in folder.iterdir()}
            record = {"files": files, "notes": notes, "sha256": _digest(entry, files, notes)}
            (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            _remove(cache / entry)
            folder.replace(cache / entry)


def _remove(path: Path) -> None:
    """Removes a file, folder or pipe. On a pipe, `shutil.rmtree` of Python 3.11 would block."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(entry: str, files: dict[str, str], notes: Any) -> str:
    return hashlib.sha256(json.dumps([entry, files, notes], sort_keys=True).encode()).hexdigest()


def _make_room(cache: Path, size: int) -> None:
    """Removes the least recently used entries and old drafts of killed runs."""
    for draft in cache.glob(f"{_DRAFT}*"):
        if draft.stat().st_mtime < time.time() - _DRAFT_SECONDS:
            _remove(draft)
    used = {}
    for folder in filter(lambda path: _NAME.fullmatch(path.name), cache.iterdir()):
        if (folder / _RECORD).is_file():
            used[folder] = (folder / _RECORD).stat().st_mtime
        else:  # a run was killed while it removed the entry
            _remove(folder)
    for folder in sorted(used, key=lambda folder: used[folder], reverse=True):
        size += sum(path.stat().st_size for path in folder.iterdir())
        if size > _ALL_BYTES:
            shutil.rmtree(folder, ignore_errors=True)
