"""The text of a config: limits, paths and secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from optexport.config.load import load_config, parse_config
from optexport.errors import ConfigError
from tests._helpers.cli import CliRunner, cli

MODEL = '[model]\nsource = "python:mine:make"\n'
BEYOND = f"0x{'f' * 4000}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{MODEL}arguments = {{ n = {BEYOND} }}", "model.arguments.n: the integer has more than 64 bits"),
        (f"{MODEL}[parity]\nnoise_multiple = {BEYOND}", "parity.noise_multiple: the integer has more than 64 bits"),
        (f"{MODEL}arguments = {{ a = {'[' * 300}{']' * 300} }}", "nested deeper than 64 levels"),
        (f"[model.arguments.{'a.' * 5000}a]", "nested deeper than 64 levels"),
    ],
    ids=["a number", "a number of ours", "lists", "tables"],
)
def test_too_large_numbers_and_deep_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """pydantic, torch and JSON would fail on them without naming the key."""
    (tmp_path / "mine.toml").write_text(text)
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "mine.toml")])
    assert done.exit_code == 2
    assert "mine.toml: " in done.stderr
    assert message in done.stderr


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "the path is not a file"),
        (os.mkdir, "this is the source of a model, not a config"),
        (lambda path: path.write_bytes(b"#" * (1 << 21)), "the file has more than 1,048,576 bytes"),
        (lambda path: path.write_bytes(b"\xff"), "the file is not UTF-8"),
        (lambda path: None, "the config file does not exist"),
    ],
    ids=["a pipe", "a folder", "large", "no text", "nothing"],
)
def test_path_that_is_not_a_config_is_refused(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "mine.toml")


def test_folder_that_is_not_utf_8_is_refused_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check passed, and the run failed as a defect when torch wrote its file."""
    folder = tmp_path / os.fsdecode(b"zwei-\xfc")
    folder.mkdir()
    (folder / "mine.toml").write_text(MODEL)
    (folder / "mine.py").write_text("")
    for parent in (folder, Path()):
        done = CliRunner().invoke(cli, ["check", str(parent / "mine.toml")])
        assert done.exit_code == 2, done.stdout
        assert "the path of the folder is not UTF-8" in done.stderr
        monkeypatch.chdir(folder)
    monkeypatch.chdir(tmp_path)
    named = tmp_path / os.fsdecode(b"drei-\xfc.toml")
    named.write_text(MODEL)
    (tmp_path / "mine.py").write_text("")
    assert load_config(named).model.source == "python:mine:make"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "key",
    [
        *("password", "hf_token", "API_KEY", "aws_secret", "token", "nested.db_password", "password.value"),
        *("api-key", "hfToken", "private_key", "bearer"),
    ],
)
def test_secrets_in_model_arguments_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.arguments.{key}: the key looks like a secret") as caught:
        parse_config(f'{MODEL}[model.arguments]\n{key} = "hunter2"', tmp_path / "mine.toml")
    assert "hunter2" not in str(caught.value)


def test_secrets_in_lists_and_numbers_are_refused(tmp_path: Path) -> None:
    for value in ('["hunter2"]', "8877665544"):
        with pytest.raises(ConfigError, match="the key looks like a secret"):
            parse_config(f"{MODEL}[model.arguments]\npassword = {value}", tmp_path / "mine.toml")


@pytest.mark.parametrize("argument", ['pad_token = "[PAD]"', "max_tokens = 5", "token = 5", 'secretary = "x"'])
def test_arguments_with_names_similar_to_secrets_pass(argument: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    parse_config(f"{MODEL}[model.arguments]\n{argument}", tmp_path / "mine.toml")


def test_escaped_password_is_refused(tmp_path: Path) -> None:
    """Secrets are removed from copies of a config by a search for their literal text, which escapes would hide."""
    (tmp_path / "mine.py").touch()
    hidden = '[tracking]\nuri = "http:\\u002f/someone:hunter2@127.0.0.1:1"'
    with pytest.raises(ConfigError, match=r"tracking\.uri: the text has a password or token with escapes"):
        parse_config(f"{MODEL}{hidden}", tmp_path / "mine.toml")
    plain = '[tracking]\nuri = "http://someone:hunter2@127.0.0.1:1"'
    parse_config(f"{MODEL}{plain}", tmp_path / "mine.toml")
