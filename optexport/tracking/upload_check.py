"""Checks that uploaded files are in the store.

A proxy or another server may accept all files and store none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optexport.errors import TrackingError

_MAX_PROBLEMS = 4


def check_upload(list_files: Callable[[str | None], Iterable[Any]], folder: Path, target: str = "") -> None:
    """Compares the files in a store with the uploaded folder, by name and size in bytes.

    The size is compared only if the store reports it.

    Args:
        list_files: Returns MLflow's file entries at a path of the store. It is called once per folder.
        folder: The uploaded folder.
        target: The path of the upload in the store; by default its root.

    Raises:
        TrackingError: A file is missing or has another size.
    """
    problems = []
    for subfolder in sorted({path.parent for path in folder.rglob("*") if path.is_file()}):
        inside = "/".join(part for part in (target, *subfolder.relative_to(folder).parts) if part)
        sizes = {str(file.path): file.file_size for file in list_files(inside or None) if not file.is_dir}
        for path in sorted(path for path in subfolder.iterdir() if path.is_file()):
            name, size = f"{inside}/{path.name}".lstrip("/"), path.stat().st_size
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] not in (None, size):
                problems.append(f"{name}: expected {size} bytes, found {sizes[name]}")
    if problems:
        rest = len(problems) - _MAX_PROBLEMS
        shown = "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
        raise TrackingError(f"the store accepted the upload but does not have all files: {shown}")
