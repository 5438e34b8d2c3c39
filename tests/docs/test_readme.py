"""What the pages show is what happens: Python runs, files are quoted whole, links lead somewhere, lists are whole."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(
        page
        for part in ("optexport", "examples", "tests")
        for page in sorted((ROOT / part).rglob("README.md"))
        if "node_modules" not in page.parts
    ),
]
README = PAGES[0].read_text(encoding="utf-8")


def page(folder: str) -> str:
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


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
    commands = re.findall(r"^    (.+)$", page("optexport/bundle/signing"), re.MULTILINE)
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


def anchors(path: Path) -> set[str]:
    """Those that GitHub makes of the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_or_a_heading() -> None:
    for path in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if "://" not in link:
                assert target.exists(), (path, link)
                assert not anchor or anchor in anchors(target), (path, link)


@pytest.mark.parametrize("path", PAGES[1:], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_page_is_found_from_the_first(path: Path) -> None:
    assert f"({path.relative_to(ROOT).as_posix()}" in README


def test_every_command_and_exit_code_is_in_it() -> None:
    from optexport import errors
    from optexport.cli.main import cli

    commands = page("optexport/cli")
    assert [name for name in cli.commands if f"| `optexport {name}" not in commands] == []
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {cls.exit_code for cls in classes if issubclass(cls, errors.OptexportError)} - {1}
    assert [code for code in codes if f"\n| {code} |" not in README] == []


def test_every_key_of_a_config_is_in_the_page_of_its_table() -> None:
    from optexport.config.schema import Config

    sections = re.split(r"^## ", page("optexport/config"), flags=re.MULTILINE)[1:]
    schema = Config.model_json_schema()
    for table, value in schema["properties"].items():
        section = next(text for text in sections if f"[{table}]" in text.splitlines()[0])
        (definition,) = re.findall(r"#/\$defs/(\w+)", str(value))
        for key in schema["$defs"][definition]["properties"]:
            assert re.search(rf"`(\w+)?\.?{key}[`.]", section), f"{table}.{key}"
