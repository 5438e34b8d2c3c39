"""Examples and pages use public names only, and the page on the Python API lists all of them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import optexport
from optexport import exporters, testing, transformations
from tests.docs.pages import PAGES, ROOT, blocks, read

_MODULES = (
    "optexport",
    "optexport.transformations",
    "optexport.transformations.analysis",
    "optexport.testing",
    "optexport.exporters",
)
_EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*.py") if not {"build", "node_modules"} & set(path.parts)
)


def _analysis_modules() -> set[str]:
    package = importlib.import_module("optexport.transformations.analysis")
    return {module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")}


def _is_public(module: str, name: str | None) -> bool:
    """Returns True if ``from module import name`` (or ``import module``) is public."""
    if name is None:
        return module in _MODULES
    if module == "optexport":
        return name in optexport.__all__ or name in ("transformations", "testing", "exporters")
    if module == "optexport.transformations":
        return name in transformations.__all__ or name == "analysis"
    if module == "optexport.exporters":
        return name in exporters.__all__
    if module == "optexport.testing":
        return not name.startswith("_") and hasattr(testing, name)
    if module == "optexport.transformations.analysis":
        return name in _analysis_modules()
    parent, _, last = module.rpartition(".")
    return parent == "optexport.transformations.analysis" and last in _analysis_modules() and not name.startswith("_")


def _private_uses(source: str) -> list[str]:
    private = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if _is_ours(alias.name) and not _is_public(alias.name, None)]
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            private += [f"{node.module}.{a.name}" for a in node.names if not _is_public(node.module, a.name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "optexport":
            private += [] if _is_public("optexport", node.attr) else [f"optexport.{node.attr}"]
    return private


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "optexport"


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.name)
def test_examples_use_public_names(path: Path) -> None:
    assert _private_uses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_use_public_names(path: Path) -> None:
    code = blocks(path.read_text(encoding="utf-8"), "python")
    assert [use for block in code for use in _private_uses(block)] == []


def test_private_names_are_recognized() -> None:
    source = (
        "import optexport\nfrom optexport.parity import checker\nimport optexport.cli.main\noptexport.pipeline.run()"
    )
    assert _private_uses(source) == ["optexport.parity.checker", "optexport.cli.main", "optexport.pipeline"]


def test_reference_has_the_docstring_of_every_public_name() -> None:
    shown = set(re.findall(r"^::: (.+)$", read("docs/reference/python-api.md") + read("docs/reference/rules.md"), re.M))
    names = [f"optexport.{name}" for name in optexport.__all__ if not name.startswith("__") and "Error" not in name]
    names += [f"optexport.transformations.{name}" for name in transformations.__all__]
    names += [f"optexport.transformations.analysis.{name}" for name in _analysis_modules()]
    names += [f"optexport.testing.check_{name}" for name in ("applied", "refused", "laws", "format")]
    names += [f"optexport.exporters.{name}" for name in exporters.__all__]
    assert shown == {*names, "optexport.OptexportError"}
