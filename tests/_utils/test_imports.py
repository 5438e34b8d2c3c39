"""Modules of the same name in the folders of two configs."""

from __future__ import annotations

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
