"""Imports of code that a config names, from the config's folder first. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class _Imported:
    """A module that was imported from a config's folder, as its file was then."""

    folder: Path
    file: str
    stamp: tuple[int, int] | None


_imported: dict[str, _Imported] = {}


def import_from(import_path: str, folder: Path, location: str, is_candidate: Callable[[Any], bool] = callable) -> Any:
    """Imports ``module:name``, first from the folder of the config, and again if a file there was changed.

    Args:
        import_path: ``module:name``.
        folder: Folder of the config.
        location: The position in the config, for error messages.
        is_candidate: Selects the names that a hint may suggest.

    Raises:
        ConfigError: The module does not exist, fails to import, or has no such name.
    """
    module_name, _, name = import_path.partition(":")
    _drop_outdated(folder)
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        with importing_beside(folder):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # code of other modules may raise anything
        raise ConfigError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            location=location,
            hint=_import_hint(module_name, error),
        ) from error
    finally:
        for new in sys.modules.keys() - before:
            file = _own_file(new)
            if file is not None and _is_in(file, folder):
                _imported[new] = _Imported(folder.resolve(), file, _stamp(file))
    if not hasattr(module, name):
        candidates = [n for n, value in vars(module).items() if not n.startswith("_") and is_candidate(value)]
        raise ConfigError(f"{module_name} has no {name}", location=location, hint=did_you_mean(name, candidates))
    return getattr(module, name)


def _drop_outdated(folder: Path) -> None:
    """Forgets loaded modules that are not what code in a config's folder would import now.

    These are modules from the folder of another config, modules from elsewhere whose name a file of this folder has,
    and all modules from this folder if one of their files was changed.
    """
    resolved = folder.resolve()
    is_changed = any(
        module.folder == resolved and name in sys.modules and _stamp(module.file) != module.stamp
        for name, module in _imported.items()
    )
    tops = {name.partition(".")[0] for name in sys.modules}
    present = {top for top in tops if (resolved / f"{top}.py").is_file() or (resolved / top / "__init__.py").is_file()}
    for name in list(sys.modules):
        module = _imported.get(name)
        if module is not None and (is_changed or module.folder != resolved):
            del _imported[name], sys.modules[name]
        elif name.partition(".")[0] in present:
            file = _own_file(name)
            if file is not None and not _is_in(file, folder):
                del sys.modules[name]


def _own_file(name: str) -> str | None:
    """Returns the file of a loaded module; None if it is part of Python, of optexport or of an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if not os.path.isabs(file) or name.partition(".")[0] in ("__main__", "optexport", *sys.stdlib_module_names):
        return None  # torch.ops and some others have a made-up file without a folder
    return None if {"site-packages", "dist-packages"}.intersection(Path(file).parts) else file


def _is_in(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder.absolute()) or Path(os.path.realpath(file)).is_relative_to(folder.resolve())


def _stamp(file: str) -> tuple[int, int] | None:
    """Returns size and time of a file, which an edit changes."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def importing_beside(folder: Path) -> Iterator[None]:
    """Puts a folder first on the import path."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # imported code may have changed the path
            sys.path.remove(str(folder))


def _import_hint(module_name: str, error: BaseException) -> str:
    top = module_name.partition(".")[0]
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing == "MODULE":  # as `optexport init` writes it
        return f"Replace MODULE in {top}.py by the module of the model's class."
    if missing == top:
        return f"Install it, or put {top}.py into the folder of the config."
    if missing:
        return f"Install {missing}."
    return f"Fix the module. For the traceback, run python -c 'import {module_name}'."


def check_makes(kind: type, factory: Any, import_path: str, location: str) -> None:
    """Checks, without calling it, that a factory may return an instance of a class.

    A call may do anything. So functions that are not written in Python, such as ``os.system``, are not called, nor are
    classes that create only instances of themselves and are not subclasses.

    Raises:
        ConfigError: The factory cannot return such an instance.
    """
    if not callable(factory):
        raise ConfigError(f"{import_path} is a {type(factory).__name__}, not a function or a class", location=location)
    is_unrelated = isinstance(factory, type) and not issubclass(factory, kind)
    plain = is_unrelated and not inspect.isfunction(factory.__new__) and not inspect.isfunction(type(factory).__call__)
    if plain or inspect.isbuiltin(factory) or inspect.ismethoddescriptor(factory):
        problem = f"not a subclass of {kind.__name__}" if plain else "not written in Python"
        raise ConfigError(
            f"{import_path} is {problem}, so it is not called",
            location=location,
            hint=f"Name a subclass of {kind.__name__}, or a Python function that returns one.",
        )


def parameters(function: Any) -> str:
    """Returns the parameters of a function in brackets, or ``(...)`` if unknown."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
