"""Every helper and script of the tests can be imported, so that a rename does not break those that no test runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Runs inside Triton Inference Server, which brings a module of its own.
_FOR_TRITON = "tests.serving.backend"


def _modules() -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests").rglob("*.py")]
    names = [".".join(path.parts) for path in paths if not path.name.startswith(("test_", "__", "conftest"))]
    return sorted(set(names) - {_FOR_TRITON})


@pytest.mark.parametrize("name", _modules())
def test_script_can_be_imported(name: str) -> None:
    importlib.import_module(name)
