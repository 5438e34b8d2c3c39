"""Code of a plugin for cache keys: its file and the local modules that it imports, without packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from optexport.cache.imported_modules import code_of


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").write_text("")
    (tmp_path / "package_of_mine" / "rule.py").write_text("import helper_of_mine\nimport torch\n")
    (tmp_path / "helper_of_mine.py").write_text("N = 1\n")
    (tmp_path / "other_of_mine.py").write_text("N = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("package_of_mine", "package_of_mine.rule", "helper_of_mine"):
        sys.modules.pop(name, None)
    importlib.import_module("package_of_mine.rule")
    return tmp_path


def test_local_import_of_a_plugin_is_part_of_its_code(plugin: Path) -> None:
    before = code_of("package_of_mine.rule")
    assert before.keys() == {"rule.py", "helper_of_mine.py", "package_of_mine/__init__.py", "package_of_mine/rule.py"}
    (plugin / "other_of_mine.py").write_text("N = 2\n")
    assert code_of("package_of_mine.rule") == before
    (plugin / "helper_of_mine.py").write_text("N = 2\n")
    changed = {name for name, digest in code_of("package_of_mine.rule").items() if digest != before[name]}
    assert changed == {"helper_of_mine.py"}


def test_linked_plugin_uses_helpers_next_to_the_link(plugin: Path) -> None:
    elsewhere = plugin / "elsewhere"
    elsewhere.mkdir()
    (plugin / "package_of_mine" / "rule.py").rename(elsewhere / "rule.py")
    (plugin / "package_of_mine" / "rule.py").symlink_to(elsewhere / "rule.py")
    assert {"rule.py", "helper_of_mine.py", "package_of_mine/rule.py"} <= code_of("package_of_mine.rule").keys()


def test_code_of_an_installed_package_is_its_own_modules() -> None:
    digests = code_of("safetensors.torch")
    assert {"torch.py", "__init__.py"} <= digests.keys()
    assert len(digests) < 20
    assert code_of("no_such_module") == code_of("builtins") == {}


def test_module_without_a_file_has_no_code(plugin: Path) -> None:
    (plugin / "package_of_mine" / "rule.py").unlink()
    assert code_of("package_of_mine.rule") == {}
