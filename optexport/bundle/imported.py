"""Code of others that a run imported: which modules lie in a folder, and what stands behind a plugin."""

from __future__ import annotations

import sys
from pathlib import Path

from optexport.bundle.digests import sha256

# Of what is installed, versions say which it is.
_INSTALLED = {"site-packages", "dist-packages"}


def imported_from(folder: Path) -> list[str]:
    """The modules that were imported from a folder, by their paths in it, but for packages that are installed in it."""
    folder = folder.resolve()
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "optexport"]
    files = [getattr(module, "__file__", None) for module in modules]
    # Some of torch's name a file that is nowhere.
    found = (Path(file).resolve() for file in files if file and Path(file).is_absolute() and Path(file).is_file())
    beside = (path.relative_to(folder) for path in found if path.is_relative_to(folder))
    return sorted({path.as_posix() for path in beside if not _INSTALLED.intersection(path.parts)})


def code_of(module: str) -> dict[str, str]:
    """Digests of the file of a module, and of all that was imported from where it was: it may call any of that.

    Of a package that is installed they are those of its own modules. What has no file has none.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return {}
    path = Path(file).resolve()
    depth = module.count(".") + (path.name == "__init__.py")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    if _INSTALLED.intersection(folder.parts):
        folder /= module.partition(".")[0]
    return {path.name: sha256(path), **{name: sha256(folder / name) for name in imported_from(folder)}}
