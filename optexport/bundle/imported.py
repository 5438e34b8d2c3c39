"""Code of others that a run imported: which modules lie in a folder, and what stands behind a plugin."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from optexport.bundle.digests import sha256

_INSTALLED = {"site-packages", "dist-packages"}
# Of which versions, or the package's own digest, say which code it is.
KNOWN = {"torch", "transformers", "optexport", "builtins"}
# Of the code that models bring, as transformers keeps it: of every model that was loaded on this machine.
_OF_MODELS = {"transformers_modules"}


def imported_from(folder: Path) -> list[str]:
    """The modules that were imported from a folder, by their paths in it, but for packages that are installed in it.

    A link in it is a module of the folder, wherever it leads: on a mounted ConfigMap all files are links.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "optexport"]
    files = [getattr(module, "__file__", None) for module in modules]
    # Some of torch's name a file that is nowhere.
    found = {os.path.abspath(file) for file in files if file and os.path.isabs(file) and os.path.isfile(file)}
    places = [os.path.join(place, "") for place in (os.path.abspath(folder), os.path.realpath(folder))]
    real = functools.cache(os.path.realpath)  # of folders, which are fewer than files
    beside: set[Path] = set()
    for file in found:
        parent, name = os.path.split(file)
        there = os.path.realpath(file) if os.path.islink(file) else os.path.join(real(parent), name)
        # As it was imported, or else where links lead.
        seen = [path.removeprefix(place) for path in (file, there) for place in places if path.startswith(place)]
        beside.update(Path(path) for path in seen[:1])
    return sorted(path.as_posix() for path in beside if not _INSTALLED.intersection(path.parts))


def code_of(module: str) -> dict[str, str]:
    """Digests of the file of a module, and of all that was imported from where it was: it may call any of that.

    Of a package that is installed they are those of its own modules. What has no file, or one that is gone, has none.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return {}
    path = Path(os.path.abspath(file))  # as it was imported: helpers lie beside a link, not where it leads
    depth = module.count(".") + (path.name == "__init__.py")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    if _INSTALLED.intersection(folder.parts):
        folder /= module.partition(".")[0]
    return {path.name: sha256(path), **{name: sha256(folder / name) for name in imported_from(folder)}}


def packages_of(modules: Iterable[str], folder: Path) -> dict[str, str]:
    """Digests of all code of the packages that modules are of, by name, whether all of it was imported or not.

    Args:
        folder: What lies in it, and is not installed there, is left out: `imported_from` tells of that.
    """
    beside = {name.partition("/")[0].removesuffix(".py") for name in imported_from(folder)}
    names = {module.partition(".")[0] for module in modules} - KNOWN - _OF_MODELS - beside
    digests = {}
    for name in sorted(names):
        package = sys.modules.get(name)
        places = [Path(place) for place in getattr(package, "__path__", ())]
        files = {str(file.relative_to(place)): file for place in places for file in place.rglob("*.py")}
        if held := {path: sha256(file) for path, file in files.items() if file.is_file()} or code_of(name):
            digests[name] = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    return digests
