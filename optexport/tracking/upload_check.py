"""Checks that uploaded files are in the store.

A proxy or another server may accept all files and store none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optexport.errors import TrackingError

_SHOWN = 4


def check(listed: Callable[[str | None], Iterable[Any]], folder: Path, place: str = "") -> None:
    """Compares the files in a store with the uploaded folder, by name and size in bytes.

    The size is compared only if the store reports it.

    Args:
        listed: Returns MLflow's file entries at a path of the store. It is called once per folder.
        folder: The uploaded folder.
        place: The path of the upload in the store; by default its root.

    Raises:
        TrackingError: A file is missing or has another size.
    """
    wrong = []
    for where in sorted({path.parent for path in folder.rglob("*") if path.is_file()}):
        inside = "/".join(part for part in (place, *where.relative_to(folder).parts) if part)
        found = {str(file.path): file.file_size for file in listed(inside or None) if not file.is_dir}
        for path in sorted(path for path in where.iterdir() if path.is_file()):
            name, size = f"{inside}/{path.name}".lstrip("/"), path.stat().st_size
            if name not in found:
                wrong.append(f"{name} is not there")
            elif found[name] not in (None, size):
                wrong.append(f"{name} has {found[name]} bytes of {size}")
    if wrong:
        told = "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        raise TrackingError(f"files did not arrive, though the store took them: {told}")
