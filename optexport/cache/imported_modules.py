"""Digests of imported modules without a version: code of configs and plugins."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

from optexport.bundle.digests import sha256

_INSTALLED = {"site-packages", "dist-packages"}
# These packages are identified by their versions, or by the package's own digest.
IDENTIFIED_PACKAGES = {"torch", "transformers", "optexport", "builtins"}


def imported_from(folder: Path) -> list[str]:
    """Returns the paths of modules that were imported from a folder, relative to it.

    Installed packages and the program itself are excluded. A link in the folder counts as a module of the folder,
    because in a mounted ConfigMap every file is a link.
    """
    ignored = ("optexport", "__main__", "__mp_main__")  # the program that starts the run is no part of it
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in ignored]
    names = [getattr(module, "__file__", None) for module in modules]
    # Some modules of torch name a file that does not exist.
    files = {os.path.abspath(name) for name in names if name and os.path.isabs(name) and os.path.isfile(name)}
    prefixes = [os.path.join(prefix, "") for prefix in (os.path.abspath(folder), os.path.realpath(folder))]
    resolve = functools.cache(os.path.realpath)  # called for folders, because they are fewer than files
    inside: set[Path] = set()
    for file in files:
        parent, name = os.path.split(file)
        target = os.path.realpath(file) if os.path.islink(file) else os.path.join(resolve(parent), name)
        # The import path comes first, then the target of the link.
        paths = [path.removeprefix(prefix) for path in (file, target) for prefix in prefixes if path.startswith(prefix)]
        inside.update(Path(path) for path in paths[:1])
    return sorted(path.as_posix() for path in inside if not _INSTALLED.intersection(path.parts))


def code_of(module: str) -> dict[str, str]:
    """Returns the digests of a module and of all modules imported from its folder.

    For an installed package, these are the modules of the package. A module without a file has no digest.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return {}
    path = Path(os.path.abspath(file))  # not resolved: helpers are next to the link, not next to its target
    depth = module.count(".") + (path.name == "__init__.py")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    if _INSTALLED.intersection(folder.parts):
        folder /= module.partition(".")[0]
    return {path.name: sha256(path), **{name: sha256(folder / name) for name in imported_from(folder)}}


def is_installed(module: str) -> bool:
    """Returns True if a module is part of Python or of an installed package."""
    package = module.partition(".")[0]
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    is_known = package in IDENTIFIED_PACKAGES or package in sys.stdlib_module_names
    return is_known or bool(_INSTALLED.intersection(path.parts))


def installed_distributions() -> list[str]:
    """Returns the names and versions of all installed packages, as the names of their metadata folders."""
    suffixes = ("dist", "egg")
    return sorted(
        {path.name for folder in sys.path for kind in suffixes for path in Path(folder).glob(f"*.{kind}-info")}
    )


def code_outside_packages() -> dict[str, str]:
    """Returns the digests, by name, of all imported modules outside installed packages.

    A model may call any of them.
    """
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]))
    prefixes = tuple(os.path.join(path, "") for path in standard)
    digests = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        is_versioned = bool(_INSTALLED.intersection(path.parts)) or str(path).startswith(prefixes)
        if path.is_absolute() and not is_versioned and path.is_file():
            digests[name] = sha256(path)
    return digests
