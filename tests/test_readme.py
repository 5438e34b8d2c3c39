"""What the README shows is what happens: its Python runs, its files are quoted whole, its lists are complete."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import exports
from tests.calling import CliRunner, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", [code for code in blocks("python") if "import optexport" in code or "compose" in code])
def test_its_python_runs_and_prints_what_it_says(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    said = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize("path", ["examples/minilm.toml", "examples/plugin/drop_dropout.py"])
def test_files_are_quoted_whole(path: str) -> None:
    assert f"\n{(ROOT / path).read_text(encoding='utf-8')}```" in README


def test_the_list_of_rules_is_what_the_program_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optexport", "transformations"], capture_output=True, text=True, check=True
    )
    assert f"$ optexport transformations\n{done.stdout}```" in README


@pytest.mark.skipif(shutil.which("openssl") is None, reason="its keys are made by openssl")
def test_its_way_to_sign_and_check_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("### Signing\n")[1].split("\n### ")[0]
    commands = re.findall(r"^    (.+)$", section, re.MULTILINE)
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


def test_every_file_that_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_and_exit_code_is_in_it() -> None:
    from optexport import errors
    from optexport.cli.main import cli

    assert [name for name in cli.commands if f"`optexport {name}" not in README] == []
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {cls.exit_code for cls in classes if issubclass(cls, errors.OptexportError)} - {1}
    assert [code for code in codes if f"\n| {code} |" not in README] == []


def test_every_key_of_a_config_is_in_it() -> None:
    from optexport.config.file import Config

    text = re.search(r"\| key \| meaning \|\n(.*?)\n\n", README, re.DOTALL)
    assert text is not None
    for table, field in Config.model_fields.items():
        for key in getattr(field.annotation, "model_fields", {}):
            assert re.search(rf"`{table}\.{key}|`\.?{key}\b", text[1]), f"{table}.{key}"
