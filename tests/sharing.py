"""Makes expensive things once for all workers of a test run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

# Set by conftest.py: a folder that the workers of one test run share, removed when the run ends.
folder: Path | None = None


def make_once(name: str, make: Callable[[Path], Any]) -> Any:
    """Returns what `make` returned to the first worker that called this; `make` is given a new path of its own.

    The result travels by pickle, so it holds paths and plain data, no modules.
    """
    assert folder is not None
    pickled = folder / f"{name}.pickle"
    with FileLock(folder / f"{name}.lock"):
        if not pickled.exists():
            pickled.write_bytes(pickle.dumps(make(folder / name)))
        return pickle.loads(pickled.read_bytes())
