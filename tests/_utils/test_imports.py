"""Modules of the same name in the folders of two configs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from optexport._utils import imports
from optexport.errors import ConfigError
from optexport.transformations import MergeLinears, registry


def test_modules_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    """Two runs in one process must import two modules."""
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "module_of_one_name.py").write_text(f"place = {place!r}\n", encoding="utf-8")
    for place in ("first", "second", "first"):
        assert imports.import_from("module_of_one_name:place", tmp_path / place, "here") == place
    with pytest.raises(ConfigError, match="module_of_one_name cannot be imported"):
        imports.import_from("module_of_one_name:place", tmp_path, "here")
    assert isinstance(registry.load("merge-linears", {}, tmp_path, "here"), MergeLinears)


def write_pair(folder: Path, value: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "module_with_a_helper.py").write_text("from helper_of_one_name import value\n", encoding="utf-8")
    (folder / "helper_of_one_name.py").write_text(f"value = {value!r}\n", encoding="utf-8")


def test_helpers_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    """The second config got the helper of the first."""
    for place in ("first", "second"):
        write_pair(tmp_path / place, place)
    for place in ("first", "second", "first"):
        assert imports.import_from("module_with_a_helper:value", tmp_path / place, "here") == place


def test_helper_that_the_caller_imported_from_elsewhere_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "caller", "caller")
    write_pair(tmp_path / "config", "config")
    for name in ("module_with_a_helper", "helper_of_one_name"):
        sys.modules.pop(name, None)  # imported by another test
    monkeypatch.syspath_prepend(str(tmp_path / "caller"))
    assert importlib.import_module("module_with_a_helper").value == "caller"
    assert imports.import_from("module_with_a_helper:value", tmp_path / "config", "here") == "config"


def test_changed_helper_is_imported_again(tmp_path: Path) -> None:
    """In a notebook, the code of the first run was exported again, and the lock file named the new code."""
    for value in ("first", "second longer"):
        write_pair(tmp_path, value)
        assert imports.import_from("module_with_a_helper:value", tmp_path, "here") == value


def test_unchanged_module_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "module_with_an_object.py").write_text("value = object()\n", encoding="utf-8")
    values = {imports.import_from("module_with_an_object:value", tmp_path, "here") for _ in range(2)}
    assert len(values) == 1
