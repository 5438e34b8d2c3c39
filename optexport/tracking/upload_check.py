"""Whether files that were sent are there: what answers in place of a server may take all and keep none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from optexport.errors import TrackingError

_SHOWN = 4


def check(listed: Callable[[str | None], Iterable[Any]], folder: Path, place: str = "") -> None:
    """Compares what a store lists with a folder that was sent to it: names, and sizes in bytes where it knows them.

    Args:
        listed: Gives MLflow's files of a path in the store, which is asked for once a folder.
        folder: What was sent; all that is in it.
        place: The path in the store that it was sent to; by default its root.

    Raises:
        TrackingError: A file is missing, or has another size.
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
