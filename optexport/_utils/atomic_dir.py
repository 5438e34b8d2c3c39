"""Folders that appear under their final name only when they are complete.

This holds even if the program is killed.

A run writes a draft next to the final name and takes two locks. The writer lock lasts as long as the run. So a second
run to the same output is refused, and a draft without a writer is from a killed run. The lock of the folder itself is
held while the folder is replaced, and while its bundle is uploaded.

Two renames replace an earlier folder. If the program is killed between them, the next program that uses the same place
restores the earlier folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from optexport._utils import signals
from optexport.errors import ConfigError, OptexportError

# Errors of file systems that do not support locks.
_NO_LOCKS = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)

# Drafts of this process.
_own_drafts: set[Path] = set()


@contextmanager
def drafting(
    output: Path, check: Callable[[Path], None], output_lock: contextlib.ExitStack | None = None
) -> Iterator[Path]:
    """Yields a draft that replaces the output if the block succeeds.

    If the block fails, the draft is removed.

    Args:
        output: The final folder.
        check: Raises an error if the existing output must not be replaced.
        output_lock: Takes over the lock of the output; until it is closed, no other run replaces the output.

    Raises:
        ConfigError: Another run writes to the same output, or the bundle there is being uploaded.
    """
    with contextlib.ExitStack() as locks:
        draft = _make_draft(output, locks)
        try:
            yield draft
            mask = _umask()
            for path in (draft, *draft.rglob("*")):  # some writers make their files readable to their user only
                path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
            with contextlib.ExitStack() as lock:
                lock.enter_context(locked(output, wait=True))
                check(output)  # a second time, because the output may have changed during the run
                with signals.deferred():
                    signals.check()
                    _replace(draft, output)
                    if output_lock is not None:
                        output_lock.enter_context(lock.pop_all())
        except BaseException as error:
            with signals.deferred():
                shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OptexportError) and output.is_dir() and any(output.iterdir()):
                earlier = f"The earlier bundle in {output} is unchanged."
                error.details = earlier if error.details is None else f"{error.details}\n{earlier}"
            raise


def recover(output: Path) -> None:
    """Restores an earlier folder if a program was killed between the two renames."""
    output = Path(os.path.abspath(output))
    if output.exists() or not _previous(output).is_dir():
        return
    with locked(output, wait=True) as is_locked:
        if is_locked:
            _put_back(output)


@contextmanager
def scratch(bundle: Path, outermost: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder on the file system of a bundle.

    The folder is next to the bundle, so that a killed program leaves nothing in the bundle. The next call removes such
    remains. It is inside the bundle if the parent is not writable or is on another file system.

    Args:
        bundle: The folder of the bundle.
        outermost: The bundle that has this one as a part; a signature covers all its parts.

    Raises:
        OSError: The bundle is not writable either.
    """
    location = (outermost or bundle).resolve()
    parent = location.parent
    if (
        not _own_drafts.isdisjoint((location, *location.parents))
        or not os.access(parent, os.W_OK | os.X_OK)
        or parent.stat().st_dev != location.stat().st_dev
    ):
        with tempfile.TemporaryDirectory(dir=bundle) as folder_in_bundle:
            yield Path(folder_in_bundle)
        return
    prefix = f".{location.name}.scratch-"
    _remove_scratch(parent, prefix)
    with contextlib.ExitStack() as lock:
        folder = _make_scratch(parent, prefix, lock)
        try:
            yield folder
        finally:
            with signals.deferred():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Locks a folder with a lock file next to it.

    The system releases the lock even if the process is killed.

    Args:
        folder: The folder.
        wait: Wait for another process that has the lock.

    Yields:
        False if another process has the lock, or if the lock file cannot be written.
    """
    folder = folder.resolve()
    try:
        lock = _acquire(folder.with_name(f".{folder.name}.lock"), wait=wait)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        lock = None
    with lock or contextlib.nullcontext():
        yield lock is not None


def _acquire(path: Path, *, wait: bool) -> contextlib.ExitStack | None:
    """Locks a file and returns the stack that releases it, or None if it is locked."""
    path = path.absolute()  # the code of a model may change the working directory
    release = contextlib.ExitStack()
    if not path.parent.is_dir():  # FileLock would create the folder
        return release
    # A soft lock would remain after its process is killed.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return release
    release.callback(lock.release)
    # Removed while locked: a waiting process notices that the file is gone, and creates another one.
    release.callback(path.unlink, missing_ok=True)
    return release


def _make_draft(output: Path, locks: contextlib.ExitStack) -> Path:
    """Creates a draft with a writer lock, and removes the remains of a killed run."""
    writer = output.with_name(f".{output.name}.partial.lock")
    if (writer_lock := _acquire(writer, wait=False)) is None:
        raise ConfigError(
            "another run is writing to this folder",
            location=f"export.output: {output}",
            hint="Wait until the other run has ended, or choose another output.",
        )
    locks.enter_context(writer_lock)
    with locked(output, wait=False) as is_locked:
        if not is_locked:
            raise ConfigError(
                "the bundle in this folder is being uploaded to MLflow",
                location=f"export.output: {output}",
                hint="Wait until the upload has ended, or choose another output.",
            )
        with signals.deferred():
            _put_back(output)
            shutil.rmtree(_previous(output), ignore_errors=True)
    prefix = f".{output.name}.partial-"
    for abandoned in _with_prefix(output.parent, prefix):
        with signals.deferred():
            shutil.rmtree(abandoned, ignore_errors=True)
    _remove_scratch(output.parent, f".{output.name}.scratch-")
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    _own_drafts.add(draft.resolve())
    locks.callback(_own_drafts.discard, draft.resolve())
    return draft


def _replace(draft: Path, output: Path) -> None:
    """Renames a draft to the output, and removes the earlier folder."""
    if not output.exists():
        draft.rename(output)
        return
    previous = _previous(output)
    output.rename(previous)
    try:
        draft.rename(output)
    except BaseException:
        previous.rename(output)
        raise
    previous.rename(draft)  # an incomplete folder must not be restored, so it gets another name first
    shutil.rmtree(draft)


def _previous(output: Path) -> Path:
    """Returns the name of an earlier folder between the two renames."""
    return output.with_name(f".{output.name}.previous")


def _put_back(output: Path) -> None:
    if not output.exists() and _previous(output).is_dir():
        _previous(output).rename(output)


def _make_scratch(parent: Path, prefix: str, lock: contextlib.ExitStack) -> Path:
    """Creates a temporary folder with a lock file in it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may remove the folder as abandoned before it is locked.
        with contextlib.suppress(FileNotFoundError):
            own_lock = _acquire(folder / ".lock", wait=False)
            if own_lock is not None and folder.is_dir():
                lock.enter_context(own_lock)
                return folder


def _remove_scratch(parent: Path, prefix: str) -> None:
    """Removes temporary folders of killed programs."""
    for folder in _with_prefix(parent, prefix):
        with contextlib.suppress(OSError):  # removed by another process, or not owned by this user
            lock = _acquire(folder / ".lock", wait=False)
            if lock is not None:
                with lock, signals.deferred():
                    shutil.rmtree(folder, ignore_errors=True)


def _with_prefix(parent: Path, prefix: str) -> list[Path]:
    return [path for path in parent.iterdir() if path.name.startswith(prefix)] if parent.is_dir() else []


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
