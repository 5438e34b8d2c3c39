"""English sentences from the docstrings of Python's standard library, which every machine has."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_WORDS = range(6, 31)


def list_sentences(count: int) -> list[str]:
    """Returns different sentences of 6 to 30 words, taken evenly from all modules."""
    sentences = sorted({sentence for path in _list_modules() for sentence in _read_sentences(path)})
    assert len(sentences) >= count
    return [sentences[index * len(sentences) // count] for index in range(count)]


def _list_modules() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return [path for path in sorted(folder.rglob("*.py")) if not excluded & {*path.relative_to(folder).parts}]


def _read_sentences(path: Path) -> Iterator[str]:
    """Yields the first lines of docstrings that are sentences."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = (ast.get_docstring(node) or "").partition("\n")[0]
            if line[:1].isupper() and line.endswith(".") and line.isascii() and len(line.split()) in _WORDS:
                yield line
