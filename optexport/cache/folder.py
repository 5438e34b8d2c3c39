"""The folder of the cache. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def find_cache_folder() -> Path | None:
    """Returns the folder of the cache, or None if the cache is off.

    The folder is ``OPTEXPORT_CACHE``, by default ``optexport`` in the user's cache folder. An empty variable turns the
    cache off.
    """
    variable = os.environ.get("OPTEXPORT_CACHE")
    try:
        if variable is not None:
            return Path(variable).expanduser().absolute() if variable else None
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # user ids in containers may have no home folder
        return None
    return Path(caches) / "optexport"
