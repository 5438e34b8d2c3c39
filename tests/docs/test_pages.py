"""The pages match the program: links, quotes, commands, config keys and Python blocks."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from optexport.config.json_schema import config_schema
from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli
from tests.docs import quotes
from tests.docs.pages import PAGES, README, ROOT, anchors, blocks, links, read

# Blocks of these pages run without changes, except those that need a file or package of the reader.
_RUNNABLE = ("README.md", "docs/reference/python-api.md", "docs/explanation/transformations.md")
_PYTHON = [
    pytest.param(code, id=f"{name}-{number}")
    for name in _RUNNABLE
    for number, code in enumerate(blocks(read(name), "python"))
    if "optexport.export(" in code or "compose(" in code
]


def _page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("code", _PYTHON)
def test_python_blocks_print_what_they_show(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    expected = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("path", PAGES, ids=_page_id)
def test_quotes_equal_their_sources(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert quotes.render(text) == text, "run: python -m tests.docs.quotes"


@pytest.mark.parametrize("path", PAGES, ids=_page_id)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" not in link:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("path", [path for path in PAGES if path != README], ids=_page_id)
def test_pages_are_linked_from_the_index(path: Path) -> None:
    index = ROOT / "docs" / "README.md"
    targets = {(index.parent / link.partition("#")[0]).resolve() for link in links(read("docs/README.md"))}
    assert path == index or path in targets


@pytest.mark.parametrize("path", PAGES, ids=_page_id)
def test_toml_blocks_parse(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "toml"):
        tomllib.loads(block)


@pytest.mark.parametrize("path", PAGES, ids=_page_id)
def test_named_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = set(re.findall(r"(?:`|^\$ |^    )optexport ([a-z][a-z-]+)", text, re.MULTILINE))
    assert names <= set(cli.commands)


def test_modules_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    modules = {name for name in re.findall(r"`([a-z_]+/[a-z_/0-9]+\.py)`", text) if not name.startswith("tests/")}
    assert modules
    assert [name for name in sorted(modules) if not (ROOT / "optexport" / name).is_file()] == []


def test_readme_fits_on_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_cli_page_lists_every_exit_code() -> None:
    from optexport import errors

    page = read("docs/reference/cli.md")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {cls.exit_code for cls in classes if issubclass(cls, errors.OptexportError)} | {0}
    assert [code for code in codes if f"\n| {code} |" not in page] == []


def test_config_page_has_every_table() -> None:
    page = read("docs/reference/config.md")
    assert [name for name in config_schema()["properties"] if f"<!-- generated: config {name} -->" not in page] == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="its keys are made by openssl")
def test_signing_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^    (.+)$", read("docs/how-to/signing.md"), re.MULTILINE)
    assert len(commands) == 5
    shutil.copytree(exports.exported().output, tmp_path / "build" / "minilm")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "optexport":
            assert CliRunner().invoke(cli, arguments).exit_code == 0
        else:
            module = [sys.executable, "-m", program] if program == "model_signing" else [program]
            subprocess.run([*module, *arguments], capture_output=True, check=True)
