"""Stands in for packages that libraries import but whose code no model here runs, such as torchvision."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class _Empty(type):
    """Class whose every attribute is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Absent(ModuleType):
    """Module whose every attribute is an empty class, so that it may be imported, subclassed and annotated with."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0.99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Empty(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty."""


@contextmanager
def absent(*packages: str) -> Iterator[None]:
    """Lets packages be imported that are not installed; forgets them afterwards.

    transformers decides by what can be imported, so they must not stay.
    """
    finder = _Finder(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]
