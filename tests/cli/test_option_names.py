"""Messages of the engine name arguments of Python functions; the commands name their options instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import optexport
from optexport._utils.custom_code import VARIABLE
from optexport.cli._group import Command, no_custom_code_option
from optexport.cli._option_names import name_options
from optexport.errors import ConfigError
from tests._helpers import exports, signed
from tests._helpers.cli import message

# A whole command line can be typed by a user of Python, too. CSS has variables.
COMMAND_LINE = re.compile(r"\b(optexport [a-z]+|pip install|openssl|mlflow server) .*--|var\(--")
OPTION = re.compile(r"(?<![\w-])--[a-z]")
# Modules that only write or run command lines.
COMMANDS = ("bundle/git.py", "report/html/contents.py")
DOCUMENTATION = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a module with their lines, without docstrings and lists, which are command lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part != node}
    parts |= {id(node.body[0].value) for node in nodes if isinstance(node, DOCUMENTATION) and ast.get_docstring(node)}
    parts |= {id(item) for node in nodes if isinstance(node, ast.List) for item in node.elts}
    for node in nodes:
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_engine_names_no_option_of_the_command_line() -> None:
    package = Path(optexport.__file__).parent
    modules = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    outside = {name: path for name, path in modules.items() if not name.startswith("cli/") and name not in COMMANDS}
    found = [
        f"{name}:{line}: {text}"
        for name, path in outside.items()
        for line, text in texts(path)
        if OPTION.search(text) and not COMMAND_LINE.search(text)
    ]
    assert len(outside) > 200
    assert not found, "\n".join(found)


def test_python_gets_the_argument_and_the_command_its_option(tmp_path: Path) -> None:
    bundle, key = exports.exported().output, tmp_path / "absent.pem"
    with pytest.raises(ConfigError) as caught:
        optexport.verify(bundle, key=key)
    assert str(caught.value).startswith(f"`key={key}`: the file does not exist")
    assert message(signed.call("verify", bundle, key), 2).startswith(f"--key {key}: the file does not exist")


@pytest.mark.parametrize(
    ("options", "location", "hint", "named"),
    [
        ([], "`shapes`[0]", "Set `shapes=8`, `other`.", "--shape[0]: m `shapes`\nHint: Set --shape 8, `other`."),
        ([], "a", "Run again with `without=r`.", "a: m `shapes`\nHint: Run again with optexport run --without r."),
        ([], "`shapes=a`b` c`", "", "--shape a`b` c: m `shapes`"),
        ([], "a", "For the traceback, import it.", "a: m `shapes`\nHint: For the traceback, import it."),
        ([], "a", "See the traceback.", "a: m `shapes`\nHint: See the traceback (--debug)."),
        ([], "a", f"Run without {VARIABLE}.", f"a: m `shapes`\nHint: Run without {VARIABLE}."),
        (["--no-custom-code"], "a", f"Unset {VARIABLE}.", "a: m `shapes`\nHint: Unset --no-custom-code."),
    ],
)
def test_only_locations_and_hints_name_options(
    options: list[str], location: str, hint: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may quote another library."""
    monkeypatch.setenv(VARIABLE, "")

    @click.command(cls=Command)
    @click.option("--shape", "shapes")
    @no_custom_code_option
    def command(shapes: str | None) -> None:
        raise ConfigError("m `shapes`", location=location, hint=hint)

    with pytest.raises(ConfigError) as caught:
        command.main(options, standalone_mode=False)
    assert str(caught.value) == named
    with command.make_context("command", list(options)):
        name_options(caught.value)  # a second time changes nothing
    assert str(caught.value) == named
