"""Finds the inputs of a model in a Python file by reading it; no code is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_Class = tuple[ast.ClassDef, Path]
_MOST_IMPORTS = 5  # files that import the class from another file


def find_forward_parameters(spec: str, folder: Path) -> list[str]:
    """Returns the parameters of ``forward`` that have no default; none if the model's class is not found.

    Args:
        spec: The rest of a ``python:module:factory`` source. The factory is a class, or a function that names one.
        folder: The folder of the module.
    """
    module, _, name = spec.partition(":")
    found = _find_class(name, folder / Path(*module.split(".")).with_suffix(".py"), folder)
    for _ in range(_MOST_IMPORTS):
        if found is None:
            return []
        definition, path = found
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                return _required_parameters(node.args)
        bases = (_find_class(base.id, path, folder) for base in definition.bases if isinstance(base, ast.Name))
        found = next(filter(None, bases), None)
    return []


def _required_parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[1 : len(positional) - len(arguments.defaults)]  # without self
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [argument.arg for argument in [*required, *(argument for argument, default in keywords if default is None)]]


def _find_class(name: str, path: Path, folder: Path, imports: int = 0) -> _Class | None:
    """Returns the class with a name, or the class that the function with this name builds."""
    if imports > _MOST_IMPORTS or not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, path
        if isinstance(node, ast.FunctionDef) and node.name == name:
            built = (_find_class(called, path, folder, imports + 1) for called in _called_names(node))
            return next(filter(None, built), None)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            source = (path.parent if node.level else folder) / Path(*node.module.split(".")).with_suffix(".py")
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find_class(alias.name, source, folder, imports + 1)
    return None


def _called_names(function: ast.FunctionDef) -> Iterator[str]:
    """Yields the annotated result of a function, and the names that it calls."""
    if isinstance(function.returns, ast.Name):
        yield function.returns.id
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != function.name:
            yield node.func.id
