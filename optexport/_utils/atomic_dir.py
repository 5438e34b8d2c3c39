"""Folders that appear under their name only when they are whole, whatever ends the program before.

A draft lies beside its final name, and is locked as long as its run lives. So a run finds out whether another one
writes to the same place, and removes what one that was killed has left. A lock is of the folder and not of its name: it
stays on what has become the bundle for whoever goes on to read it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from optexport._utils import signals
from optexport.bundle.layout import GENERATION, check_replaceable
from optexport.errors import ConfigError, OptexportError

# Of <linux/fs.h> and <fcntl.h>.
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
# What file systems answer that know no locks, or no exchange of names.
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)

# More than a run takes to look for the drafts of others, or to make the tables of a store.
_PATIENCE_SECONDS = 60.0
# The drafts that this process has locked.
_OWN: set[Path] = set()


@contextmanager
def drafting(
    output: Path, check: Callable[[Path], None] = check_replaceable, held: contextlib.ExitStack | None = None
) -> Iterator[Path]:
    """Gives a folder to write a bundle in; it takes its final name when the block ends well, and goes when it fails.

    A bundle of an earlier run stays under the name until then, and longer where it is locked, as while it is sent.

    Args:
        check: Raises where something is there that may not be replaced.
        held: Takes the lock over once the bundle has its name: until it is closed nobody replaces it.

    Raises:
        ConfigError: Another run writes to the same place, or what is there is being sent.
    """
    with contextlib.ExitStack() as locks:
        draft = _draft(output, locks)
        try:
            yield draft
            mask = _umask()
            for path in (draft, *draft.rglob("*")):  # some writers keep their files to themselves
                path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
            with locked(output, wait=True):
                check(output)  # once more: the work took its time
                with signals.deferred():
                    signals.check()
                    if output.exists():
                        _exchange(draft, output)
                        shutil.rmtree(draft)
                    else:
                        draft.rename(output)
                    if held is not None:
                        held.enter_context(locks.pop_all())
        except BaseException as error:
            with signals.deferred():
                shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OptexportError) and output.is_dir() and any(output.iterdir()):
                error.hint = f"{error.hint or ''}\n  {output} holds an earlier bundle yet.".lstrip()
            raise


@contextmanager
def scratch(bundle: Path) -> Iterator[Path]:
    """Gives a folder on the file system of a bundle that is there already, which is gone afterwards.

    It lies beside the bundle: what a killed program leaves is no part of it, and goes when the next one comes by. Where
    nothing may be written there, or where another file system begins with the bundle, it lies within.

    Raises:
        OSError: Nothing may be written there either.
    """
    location = bundle.resolve()
    while (location.parent / GENERATION).is_file():  # a part, and its signature is that of the whole
        location = location.parent
    own = {draft.resolve() for draft in _OWN}
    beside = location.parent
    if (
        not own.isdisjoint((location, *location.parents))
        or not os.access(beside, os.W_OK | os.X_OK)
        or beside.stat().st_dev != location.stat().st_dev
    ):
        with tempfile.TemporaryDirectory(dir=bundle) as within:
            yield Path(within)
        return
    with contextlib.ExitStack() as locks:
        draft = _draft(location, locks, alone=False)
        try:
            yield draft
        finally:
            with signals.deferred():
                shutil.rmtree(draft, ignore_errors=True)


def _draft(output: Path, locks: contextlib.ExitStack, *, alone: bool = True) -> Path:
    """Makes a locked draft, and removes those whose run is no more.

    Args:
        alone: Whether to refuse where another run has one.
    """
    prefix = f".{output.name}.partial-"
    # One run at a time looks for the others. In a draft of its own, which it has locked, there are none.
    looking = contextlib.nullcontext() if output.parent in _OWN else locked_for_a_moment(output.parent)
    with looking:
        for other in output.parent.glob(f"{_literally(prefix)}*"):
            with locked(other, wait=False) as was_free:
                if was_free:
                    with signals.deferred():
                        shutil.rmtree(other, ignore_errors=True)
                elif alone:
                    raise ConfigError(
                        "another run is writing to it",
                        location=f"export.output: {output}",
                        hint="Wait until that one has ended, or choose another place.",
                    )
        # After the drafts, of which one may just have got its name.
        with locked(output, wait=False) if alone else contextlib.nullcontext(True) as was_free:
            if not was_free:
                raise ConfigError(
                    "what is there is being sent to MLflow, by the run that made it or by optexport upload",
                    location=f"export.output: {output}",
                    hint="Wait until that has ended, or choose another place.",
                )
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
        locks.enter_context(locked(draft, wait=False))
        _OWN.add(draft)
        locks.callback(_OWN.discard, draft)
    return draft


def _literally(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Locks a folder, which the system undoes when the process ends, however it ends; says whether it could.

    Args:
        wait: Whether to wait for another process that has locked it. Then what is locked is what has the name at last.
    """
    while True:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):  # its run has just ended, or it is nobody's folder
            yield True
            return
        except PermissionError:  # of another user
            yield False
            return
        try:
            is_ours = _lock(handle, wait=wait)
            if not wait or _has_name(handle, folder):
                yield is_ours
                return
        finally:
            os.close(handle)


@contextmanager
def locked_for_a_moment(folder: Path) -> Iterator[None]:
    """Locks a folder of which others than runs know too, for as long as it takes to look through it.

    Raises:
        ConfigError: Another program holds a lock on it, and does not give it back: ``flock`` by which this one is run
            would wait for itself.
    """
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with locked(folder, wait=False) as is_ours:
            if is_ours or not os.access(folder, os.R_OK):  # a folder that cannot be opened cannot be locked
                yield
                return
        if time.monotonic() > patience:
            raise ConfigError(
                "another program holds a lock on this folder (flock), and does not give it back",
                location=str(folder),
                hint="Have that program lock a file in place of the folder.",
            )
        time.sleep(0.02)


def _lock(handle: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True


def _has_name(handle: int, folder: Path) -> bool:
    """Whether an open folder is the one of a name: another may have taken its place while it was waited for."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def _exchange(draft: Path, output: Path) -> None:
    """Lets a draft and what has its final name change names, at once where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = (_AT_FDCWD, os.fsencode(draft), _AT_FDCWD, os.fsencode(output))
        if libc.renameat2(*names, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
            return
        if (number := ctypes.get_errno()) not in _UNKNOWN:
            raise OSError(number, os.strerror(number), str(output))
    aside = Path(tempfile.mkdtemp(prefix=draft.name, dir=output.parent))
    output.rename(aside / output.name)
    draft.rename(output)
    aside.rename(draft)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
