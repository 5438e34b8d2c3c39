"""The text of a config: read within limits, and refused where a secret could not be taken out of its copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optexport.config.load import load_config, parse_config
from optexport.config.text import parse
from optexport.errors import ConfigError
from tests._helpers.cli import CliRunner, cli

MODEL = '[model]\nsource = "python:mine:make"\n'
BEYOND = f"0x{'f' * 4000}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{MODEL}arguments = {{ n = {BEYOND} }}", "model.arguments.n: it is no whole number of 64 bits"),
        (f"{MODEL}[parity]\nmultiple = {BEYOND}", "parity.noise_multiple: it is no whole number of 64 bits"),
        (f"{MODEL}arguments = {{ a = {'[' * 300}{']' * 300} }}", "nested deeper than 64"),
        (f"[model.arguments.{'a.' * 5000}a]", "nested deeper than 64"),
        (MODEL + "[parity]\n" + "".join(f"k{n} = 1\n" for n in range(20_000)), "more than 10000 keys"),
    ],
    ids=["a number", "a number of ours", "lists", "tables", "keys"],
)
def test_what_nobody_writes_is_refused_at_once(text: str, told: str, tmp_path: Path) -> None:
    """These ended as defects, or not at all."""
    (tmp_path / "mine.toml").write_text(text)
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "mine.toml")])
    assert done.exit_code == 2
    assert "mine.toml: " in done.stderr
    assert told in done.stderr


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "it is no file"),
        (os.mkdir, "it is no file"),
        (lambda path: path.write_bytes(b"#" * (1 << 21)), "it is larger than"),
        (lambda path: path.write_bytes(b"\xff"), "it cannot be read"),
        (lambda path: None, "there is no such file"),
    ],
    ids=["a pipe", "a folder", "large", "no text", "nothing"],
)
def test_what_is_no_config_file_is_refused_at_once(make: Callable[[Path], object], told: str, tmp_path: Path) -> None:
    make(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / "mine.toml")


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check passed, and the run ended as a defect where torch was to write its file."""
    folder = tmp_path / os.fsdecode(b"zwei-\xfc")
    folder.mkdir()
    (folder / "mine.toml").write_text(MODEL)
    (folder / "mine.py").write_text("")
    for place in (folder, Path()):
        done = CliRunner().invoke(cli, ["check", str(place / "mine.toml")])
        assert done.exit_code == 2, done.stdout
        assert "the path of the folder is not UTF-8" in done.stderr
        monkeypatch.chdir(folder)
    monkeypatch.chdir(tmp_path)
    named = tmp_path / os.fsdecode(b"drei-\xfc.toml")
    named.write_text(MODEL)
    (tmp_path / "mine.py").write_text("")
    assert load_config(named).model.source == "python:mine:make"


@pytest.mark.parametrize(
    "key",
    [
        *("password", "hf_token", "API_KEY", "aws_secret", "token", "nested.db_password", "password.value"),
        *("api-key", "hfToken", "private_key", "bearer"),
    ],
)
def test_secrets_among_the_arguments_of_a_model_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.arguments.{key}: a config holds no secrets") as caught:
        parse_config(f'{MODEL}[model.arguments]\n{key} = "hunter2"', tmp_path / "mine.toml")
    assert "hunter2" not in str(caught.value)


def test_a_secret_is_one_in_a_list_and_as_a_number_too(tmp_path: Path) -> None:
    for value in ('["hunter2"]', "8877665544"):
        with pytest.raises(ConfigError, match="a config holds no secrets"):
            parse_config(f"{MODEL}[model.arguments]\npassword = {value}", tmp_path / "mine.toml")


@pytest.mark.parametrize("argument", ['pad_token = "[PAD]"', "max_tokens = 5", "token = 5", 'secretary = "x"'])
def test_arguments_that_sound_like_secrets_pass(argument: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    parse_config(f"{MODEL}[model.arguments]\n{argument}", tmp_path / "mine.toml")


def test_a_password_that_hides_behind_escapes_is_refused(tmp_path: Path) -> None:
    """The text of a config is copied, and what is taken out of the copy is looked for as it is written."""
    (tmp_path / "mine.py").touch()
    hidden = '[tracking]\nuri = "http:\\u002f/someone:hunter2@127.0.0.1:1"'
    with pytest.raises(ConfigError, match=r"tracking\.uri: it holds a password or token that is written with escapes"):
        parse_config(f"{MODEL}{hidden}", tmp_path / "mine.toml")
    plain = '[tracking]\nuri = "http://someone:hunter2@127.0.0.1:1"'
    parse_config(f"{MODEL}{plain}", tmp_path / "mine.toml")


@pytest.mark.parametrize("written", ["[{}]", "{} = 1", "x = {{ {} = 1 }}", "[[ {} ]]"])
@pytest.mark.parametrize("part", ["a", '"a b"', "'.'"])
def test_a_key_of_very_many_parts_is_refused_before_a_parser_takes_minutes_for_it(written: str, part: str) -> None:
    text = written.format(".".join([part] * 50_000))
    began = time.process_time()
    with pytest.raises(ConfigError, match="it is nested deeper than 64"):
        parse(text, Path("mine.toml"))
    assert time.process_time() - began < 10  # it took more than a minute


@pytest.mark.parametrize(
    "value",
    [
        '"' + "a. b " * 2000 + '"',
        "[" + "0.5, " * 2000 + "]",
        '"""\n' + ". " * 2000 + '"""',
        '"""\n' + "A few words. " * 2000 + '"""',
    ],
)
def test_many_points_in_values_are_no_long_key(value: str) -> None:
    parse(f"x = {value}  # {'A few words. ' * 2000}\n# {'0.5 ' * 2000}", Path("mine.toml"))


@pytest.mark.parametrize("before", ["", '"""\n""", ', '"""\n# """, '])
def test_a_long_key_is_found_behind_a_text_that_ends_there(before: str) -> None:
    with pytest.raises(ConfigError, match="it is nested deeper than 64"):
        parse(f"x = [{before}{{ {'.'.join(['a'] * 50_000)} = 1 }}, 'x']", Path("mine.toml"))


def test_a_key_goes_on_where_only_python_ends_a_line() -> None:
    """Of TOML's keys, quoted, U+2028 is a part: a key of 100,000 parts looked like short lines."""
    text = ".".join((["a"] * 200 + ['"\u2028"']) * 500) + " = 1"
    with pytest.raises(ConfigError, match="it is nested deeper than 64"):
        parse(text, Path("mine.toml"))
