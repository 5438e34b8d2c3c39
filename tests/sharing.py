"""Makes expensive things once for all workers of a test run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

# conftest.py sets this to a folder of pytest that all workers of a run share.
folder: Path | None = None


def make_once(name: str, make: Callable[[Path], Any]) -> Any:
    """Calls `make` with a new path in the first worker, and returns its result in all workers.

    The result is pickled, so it must hold paths and plain data, no modules.
    """
    assert folder is not None
    pickled = folder / f"{name}.pickle"
    with FileLock(folder / f"{name}.lock"):
        if not pickled.exists():
            pickled.write_bytes(pickle.dumps(make(folder / name)))
        return pickle.loads(pickled.read_bytes())
