"""``--no-custom-code`` refuses configs that run custom code, before any of it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.custom_code import VARIABLE
from optexport.config.load import parse_config
from optexport.errors import ConfigError
from optexport.exporters.openvino import OpenVinoFormat
from optexport.exporters.registry import registered
from tests._helpers.cli import CliRunner, cli

CALLING = {
    "model.source": '[model]\nsource = "python:spy:load"',
    "model.trust_remote_code": '[model]\nsource = "org/name"\ntrust_remote_code = true',
    "transformations[1].use": (
        '[model]\nsource = "org/name"\n[[transformations]]\nuse = "merge-linears"\n'
        '[[transformations]]\nuse = "python:spy:Rule"'
    ),
    "parity.metrics.python:spy:f1": '[model]\nsource = "org/name"\n[parity.metrics]\n"python:spy:f1" = 0.9',
}


@pytest.fixture
def spy(tmp_path: Path) -> Path:
    (tmp_path / "spy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return tmp_path


@pytest.mark.sample(3)
@pytest.mark.parametrize("command", ["check", "run", "diagnose"])
@pytest.mark.parametrize("key", CALLING)
def test_custom_code_is_refused_and_not_imported(
    spy: Path, command: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")  # monkeypatch restores the variable, which the option sets
    (spy / "config.toml").write_text(CALLING[key])
    done = CliRunner().invoke(cli, [command, "--no-custom-code", str(spy / "config.toml")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {spy / 'config.toml'}: {key}: ")
    assert "Hint: Read that code, then run again without --no-custom-code; or remove this key." in done.stderr
    assert not (spy / "ran").exists()


def test_environment_variable_is_equal_to_the_option(spy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match="forbids custom code"):
        parse_config(CALLING["model.source"], spy / "config.toml")
    monkeypatch.setenv(VARIABLE, "0")
    parse_config(CALLING["model.source"], spy / "config.toml")


def test_format_of_a_package_is_custom_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(OpenVinoFormat):
        name = "small"
        file_name = "model.small"

    monkeypatch.setenv(VARIABLE, "1")
    text = '[model]\nsource = "org/name"\n[export]\nformats = ["onnx", "small"]'
    with registered(Small), pytest.raises(ConfigError, match='the format "small" of an installed package is custom'):
        parse_config(text, tmp_path / "config.toml")


def test_config_without_custom_code_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    (tmp_path / "config.toml").write_text('[model]\nsource = "org/name"\n[[transformations]]\nuse = "MergeLinears"')
    done = CliRunner().invoke(cli, ["check", "--no-custom-code", str(tmp_path / "config.toml")])
    assert done.exit_code == 0, done.output
