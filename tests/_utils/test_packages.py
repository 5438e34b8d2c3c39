"""Installed package versions are checked before an import could fail on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from optexport._utils import packages
from tests._helpers.cli import MODULE, CliRunner, cli, config

STUB = "raise ImportError('safetensors of an older release was imported')\n"


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with an older safetensors, which shadows the installed one on the path."""
    folder = tmp_path_factory.mktemp("drifted")
    (folder / "safetensors").mkdir()
    (folder / "safetensors" / "__init__.py").write_text(STUB)
    (folder / "safetensors-0.7.0.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: safetensors\nVersion: 0.7.0\n"
    (folder / "safetensors-0.7.0.dist-info" / "METADATA").write_text(text)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a config, its lock and its bundle."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "halves.py").write_text(MODULE)
    (folder / "mine.toml").write_text(config(more="[parity]\neffort = 'quick'"))
    for command in ("lock", "run"):
        sys.modules.pop("halves", None)
        done = CliRunner().invoke(cli, [command, str(folder / "mine.toml")])
        assert done.exit_code == 0, done.stderr
    return folder


def _run_command(folder: Path, drifted: Path, *arguments: str) -> str:
    """Returns the error of a command that exits with code 2, run in a new process with the older package."""
    path = os.pathsep.join([str(drifted), *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-m", "optexport", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.returncode == 2, process.stderr
    assert "This is a bug" not in process.stderr
    return process.stderr


def _here() -> str:
    return packages.versions()["safetensors"]


UNMET = "safetensors: found 0.7.0, transformers needs safetensors>=0.8.0"


def test_installed_packages_are_compatible() -> None:
    packages.check()


@pytest.mark.slow
def test_locked_run_names_the_package_that_differs(project: Path, drifted: Path) -> None:
    text = _run_command(project, drifted, "run", "--locked", "mine.toml")
    assert f"safetensors: locked {_here()}, now 0.7.0" in text
    assert "optexport lock mine.toml" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "check", "lock"])
def test_old_package_is_named_with_the_required_version(project: Path, drifted: Path, command: str) -> None:
    text = _run_command(project, drifted, command, "mine.toml")
    assert UNMET in text
    assert "was imported" not in text
    (advised,) = re.findall(r"pip install '(\S+)'", text)  # once, though several packages need it
    assert Requirement(advised).name == "safetensors"
    assert "0.7.0" not in Requirement(advised).specifier


@pytest.mark.slow
def test_reproduce_names_the_package_that_differs(project: Path, drifted: Path) -> None:
    text = _run_command(project, drifted, "reproduce", "build/model")
    assert UNMET in text
    assert f"safetensors: {_here()} before, 0.7.0 now" in text


@pytest.mark.slow
def test_import_error_of_an_old_package_is_not_a_defect(project: Path, drifted: Path) -> None:
    assert UNMET in _run_command(project, drifted, "diagnose", "mine.toml")
