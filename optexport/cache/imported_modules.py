"""Code of others that a run imported: which modules lie in a folder, and what stands behind a plugin."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
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


def needed_from(folder: Path) -> list[str]:
    """The modules that were imported from a folder, and those of it that their import statements name, by their paths.

    What a function imports is not imported before it is called.
    """
    needed = [Path(name) for name in imported_from(folder)]
    seen = set(needed)
    for path in needed:
        if path.suffix == ".py":
            new = _named_beside(_parsed(folder / path), path, folder) - seen
            seen |= new
            needed += sorted(new)
    return sorted(path.as_posix() for path in seen)


def _named_beside(tree: ast.Module, path: Path, folder: Path) -> set[Path]:
    """The files of a folder that a module in it imports, with those of the packages that they are in."""
    named: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {Path(*alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # One dot is the folder that the module is in, and each further one is above.
            parents = path.parents
            start = parents[min(node.level, len(parents)) - 1] if node.level else Path()
            module = start.joinpath(*(node.module or "").split("."))
            named |= {module, *(module / alias.name for alias in node.names)}
    packages = {parent / "__init__.py" for name in named for parent in (name, *name.parents) if parent.name}
    files = {name.with_name(f"{name.name}.py") for name in named if name.name} | packages
    return {file for file in files if (folder / file).is_file()}


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


def code_beside_packages() -> dict[str, str]:
    """Digests of all modules that were imported and are of no installed package, by name: a model may call any."""
    known = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]))
    places = tuple(os.path.join(place, "") for place in known)
    digests = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        is_known = bool(_INSTALLED.intersection(path.parts)) or str(path).startswith(places)
        if path.is_absolute() and not is_known and path.is_file():
            digests[name] = sha256(path)
    return digests


def imports_of(modules: Iterable[str], folder: Path) -> set[str]:
    """The packages that code imports, by their first names, also where it does so only once it is called.

    The code is that of the modules, of all beside them that is not installed, and of what is needed from a folder. It
    is read, since of what is loaded much has no say: a run that is tracked loads more than one that is not.

    Args:
        modules: Those that define the classes which are looked at; what else an installed package holds is its own.
    """
    files = {folder / name for name in needed_from(folder)}
    for module in modules:
        top = module.partition(".")[0]
        if top not in KNOWN:
            files |= set(_files(module, module.rpartition(".")[0] if top in _OF_MODELS else top))
    names = {name for file in files if file.suffix == ".py" for name in _imports(_parsed(file))}
    return names - KNOWN - sys.stdlib_module_names


def _files(module: str, package: str) -> Iterator[Path]:
    """The file of a module, and those of its package that were imported and are not installed."""
    for name, known in list(sys.modules.items()):
        if name in (module, package) or name.startswith(f"{package}."):
            path = Path(getattr(known, "__file__", None) or "")
            if path.is_file() and (name == module or not _INSTALLED.intersection(path.parts)):
                yield path


def _parsed(file: Path) -> ast.Module:
    """What a file says, which is nothing where it is not of this Python: it cannot be imported either."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]


def packages_of(modules: Iterable[str], folder: Path) -> dict[str, str]:
    """Digests of all code of the packages that modules are of, by name, whether all of it was imported or not.

    Args:
        folder: What lies in it, and is not installed there, is left out: `needed_from` tells of that.
    """
    beside = {name.partition("/")[0].removesuffix(".py") for name in needed_from(folder)}
    names = {module.partition(".")[0] for module in modules} - KNOWN - _OF_MODELS - beside
    digests = {}
    for name in sorted(names):
        package = sys.modules.get(name)
        places = [Path(place) for place in getattr(package, "__path__", ())]
        files = {str(file.relative_to(place)): file for place in places for file in place.rglob("*.py")}
        if held := {path: sha256(file) for path, file in files.items() if file.is_file()} or code_of(name):
            digests[name] = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    return digests
