"""The command line: exit codes, one message per error, and fast imports."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from optexport import __version__
from optexport.cli._group import Command
from optexport.cli.main import cli
from optexport.config.source import SourceKind
from optexport.errors import OptexportError
from optexport.transformations.registry import RULES
from tests._helpers.cli import Caller, config, message
from tests._helpers.config_errors import MISTAKES, MODEL, NO_TOML

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


# Invalid configs


# The loader finds the errors, and tests/config/test_load.py tests all of them. Here is one sample for each source of an
# error: the check of values, of a rule, of a source, of the file system, and of the syntax.
@pytest.mark.parametrize(
    "name", ["unknown task", "unknown option", "package without a name", "missing data", "not TOML"]
)
def test_check_and_run_exit_with_2_and_one_message(name: str, call: Caller) -> None:
    text = MISTAKES[name][0] if name in MISTAKES else NO_TOML[name]
    error = message(call("check", text), 2)
    assert "mine.toml" in error
    assert message(call("run", text), 2) == error


def test_check_and_run_name_a_missing_execution_provider(call: Caller) -> None:
    text = config(more='[export.onnx]\nproviders = ["NoneExecutionProvider"]').replace('["pt2"]', '["onnx"]')
    error = message(call("check", text), 3)
    assert "mine.toml: export.onnx.providers: the installed ONNX Runtime has no NoneExecutionProvider" in error
    assert message(call("run", text), 3) == error


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["unknown task", "unknown rule", "no unicode"])
def test_debug_shows_a_traceback(name: str, call: Caller) -> None:
    result = call("check", MISTAKES[name][0] if name in MISTAKES else NO_TOML[name], before=("--debug",))
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert result.stderr.count("Error: ") >= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arguments",
    [("--debug", "check"), ("check", "--debug"), ("--debug", "check", "--debug")],
    ids=" ".join,
)
def test_debug_is_accepted_before_and_after_the_command(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, [*arguments, str(tmp_path / "nowhere.toml")])
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert "Traceback" not in CliRunner().invoke(cli, ["check", str(tmp_path / "nowhere.toml")]).stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.toml"], "nowhere.toml: the config file does not exist"),
        (["run"], "Missing argument 'CONFIG'"),
        (["verify", "nowhere"], "nowhere: the folder does not exist"),
        (["bench", "nowhere.onnx"], "'nowhere.onnx' does not exist"),
        (["run", "--unknown"], "No such option '--unknown'"),
        (["bench", "a.onnx", "--output", "nowhere/x.json"], "the folder nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_usage_error_is_in_the_json_output(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.onnx").touch()
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    document = json.loads(result.stdout)
    assert words in document.pop("error")
    assert words in result.stderr
    assert document == {"passed": False, "exit_code": 2, "mlflow_run_id": None, "parity": None}
    assert result.exit_code == 2


# Valid configs


def test_check_names_the_rules(call: Caller, tmp_path: Path) -> None:
    result = call("check", MODEL + '[[transformations]]\nuse = "MergeLinears"\n')
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'mine.toml'}: OK (rules: MergeLinears)\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("output", "words"),
    [
        (".", "the path exists and is not a bundle"),
        ("halves.py", "the path exists and is not a bundle"),
        ("halves.py/x", "the output cannot be written"),
        ("n" * 3000, "the output cannot be written"),
        ("new/" + "n" * 250, "the output cannot be written"),
    ],
    ids=["full folder", "file", "below a file", "long name", "long draft"],
)
def test_check_reports_an_unusable_output_and_creates_nothing(
    output: str, words: str, call: Caller, tmp_path: Path
) -> None:
    error = message(call("check", f'{MODEL}[export]\noutput = "{output}"\n'), 2)
    assert words in error
    assert call("check", f'{MODEL}[export]\noutput = "new/folder"\n').exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["halves.py", "mine.toml"]


def test_check_reports_missing_inputs_if_the_model_needs_them(call: Caller) -> None:
    without = '[model]\nsource = "python:halves:load"\n'
    result = call("check", without)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "The config has no inputs. Only transformers models get example inputs" in result.stdout
    assert "The config has no inputs" not in call("check", f"{without}inputs.tensors.x.shape = [1]\n").stdout
    assert "The config has no inputs" not in call("check", MODEL).stdout


@pytest.mark.slow
@pytest.mark.parametrize("source", ["./model", "package:click"])
def test_check_refuses_a_folder_without_a_model(call: Caller, tmp_path: Path, source: str) -> None:
    (tmp_path / "model").mkdir()
    error = message(call("check", f'[model]\nsource = "{source}"\n'), 2)
    assert f"model.source: {source} has no config.json, so it is not the folder of a transformers model" in error
    assert "Set source to a folder that save_pretrained wrote" in error


def test_check_refuses_a_bundle_and_names_its_pt2_file(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    for name in ("manifest.json", "model.pt2"):
        (tmp_path / "made" / name).touch()
    error = message(call("check", '[model]\nsource = "./made"\n'), 2)
    assert f"./made is an exported bundle, not a model\nHint: Set source to {tmp_path / 'made' / 'model.pt2'}." in error


def test_check_refuses_texts_for_a_file_without_a_tokenizer(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").touch()
    error = message(call("check", '[model]\nsource = "model.pt2"\n[inputs]\ntexts = ["a"]\n'), 2)
    assert error.startswith(f"{tmp_path / 'mine.toml'}: inputs.texts: a .pt2 or TorchScript file has no tokenizer")


def test_every_rule_is_listed_as_text_and_json() -> None:
    listed = CliRunner().invoke(cli, ["transformations"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(RULES)
    rows = json.loads(CliRunner().invoke(cli, ["transformations", "--json"]).stdout)
    assert list(rows) == list(RULES)
    for line, (name, info) in zip(listed, RULES.items(), strict=True):
        assert info.summary in line
        assert rows[name]["reversible"] is info.reversible
        assert ("not reversible" in line) is not info.reversible
        assert all(f"{key} = " in line and key in rows[name]["options"] for key in info.options)


def test_init_overwrites_a_config_only_if_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(cli, ["init", "org/name"]).exit_code == 0
    assert runner.invoke(cli, ["check", "optexport.toml"]).exit_code == 0
    written = Path("optexport.toml").read_text(encoding="utf-8")
    second = runner.invoke(cli, ["init", "org/other"])
    assert second.exit_code == 2
    assert "--force" in second.stderr
    assert Path("optexport.toml").read_text(encoding="utf-8") == written
    assert runner.invoke(cli, ["init", "org/other", "--force"]).exit_code == 0
    assert 'source = "org/other"' in Path("optexport.toml").read_text(encoding="utf-8")


def test_init_resolves_a_folder_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 9}', encoding="utf-8")
    for source in ("model", "./model", str(tmp_path / "model")):
        result = CliRunner().invoke(cli, ["init", source, "-o", "configs/mine.toml", "--force"])
        assert result.exit_code == 0, result.stderr
        assert "high = 9" in Path("configs/mine.toml").read_text(encoding="utf-8")
        assert CliRunner().invoke(cli, ["check", "configs/mine.toml"]).exit_code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["nowhere/mine.toml", "halves.py/mine.toml", "."])
def test_init_reports_an_unwritable_path(place: str, tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text("", encoding="utf-8")
    result = CliRunner().invoke(cli, ["init", "org/name", "-o", str(tmp_path / place)])
    assert result.exit_code == 2
    assert "This is a bug" not in result.stderr
    assert place.split("/")[0] in result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["", "my model", "./nowhere", "package:not_installed/x"])
def test_init_writes_no_config_that_check_would_refuse(source: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["init", source, "-o", str(tmp_path / "mine.toml")])
    message(result, 2)
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["chekc"],
        ["check"],
        ["check", "a.toml", "b.toml"],
        ["check", "."],
        ["check", "nowhere.toml"],
        ["check", "n" * 5000],
        ["run", "nowhere.toml"],
        ["run", "nowhere.toml", "--wihtout", "x"],
        ["verify", "nowhere"],
        ["verify", "."],
        ["verify", __file__],
        ["--verbose"],
        ["init", "--output"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_usage_error_exits_with_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message(CliRunner().invoke(cli, arguments), 2)


def test_check_prints_the_paths_of_configs_with_equal_names(tmp_path: Path) -> None:
    paths = [tmp_path / name / "config.toml" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('[model]\nsorce = "x"\n', encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", *map(str, paths)])
    assert done.exit_code == 2
    for path in paths:
        assert f"\n  {path}: 2 mistakes\n" in done.stderr


# Config, its key that needs an extra, and the name of that extra.
_NEEDS = {
    "task": ('[model]\nsource = "org/name"\ntask = "sentence-similarity"', "model.task", "sentence-transformers"),
    "modules": ('[model]\nsource = "sentences"', "model.source", "sentence-transformers"),
    "adapter": ('[model]\nsource = "org/name"\nadapter = "sentences"', "model.adapter", "adapters"),
    "images": ('[model]\nsource = "org/name"\n[inputs]\nimages = ["a.png"]', "inputs.images", "images"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("name", _NEEDS)
def test_missing_extra_is_reported_before_any_output(
    name: str, command: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, key, extra = _NEEDS[name]
    (tmp_path / "sentences").mkdir()
    (tmp_path / "sentences" / "modules.json").write_text("[]")
    (tmp_path / "a.png").touch()
    before = {*tmp_path.iterdir()}
    monkeypatch.setitem(sys.modules, {"adapters": "peft", "images": "PIL"}.get(extra, "sentence_transformers"), None)
    error = message(call(command, text), 2)
    assert f': {key}: the extra "{extra}" is not installed (' in error
    assert f"pip install -c constraints.txt -e '.[{extra}]'" in error
    assert {path.suffix for path in {*tmp_path.iterdir()} - before} == {".toml"}


def test_init_reports_the_extra_that_its_config_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``init`` recommended a run that ``check`` refused."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    bert = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 9, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(bert), encoding="utf-8")
    (tmp_path / "modules.json").write_text("[]")
    done = CliRunner().invoke(cli, ["init", str(tmp_path), "-o", str(tmp_path / "mine.toml")])
    assert done.exit_code == 0
    assert 'the extra "sentence-transformers" is not installed (' in done.stdout


def test_cross_encoder_or_plain_transformer_needs_no_extra(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sentences").mkdir()
    (tmp_path / "sentences" / "modules.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert call("check", '[model]\nsource = "sentences"\ntask = "feature-extraction"').exit_code == 0
    (tmp_path / "sentences" / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    assert call("check", '[model]\nsource = "sentences"').exit_code == 0


def test_check_continues_after_an_invalid_config(tmp_path: Path) -> None:
    for name, text in (("a", "[model]"), ("b", '[model]\nsource = "org/name"'), ("c", "x = 1")):
        (tmp_path / f"{name}.toml").write_text(text)
    done = CliRunner().invoke(cli, ["check", *(str(tmp_path / f"{name}.toml") for name in "abc")])
    assert done.exit_code == 2
    assert "b.toml: OK" in done.stdout
    assert "2 of 3 configs have errors" in done.stderr
    assert f"  {tmp_path / 'a.toml'}: model.source: this required key is missing" in done.stderr
    assert 'x: unknown key "x"' in done.stderr


def test_help_explains_the_exit_code_of_every_error() -> None:
    help_text = CliRunner().invoke(cli, ["--help"]).stdout
    explained = {line.split()[0] for line in help_text.partition("Exit codes:")[2].splitlines() if line.strip()}
    errors = {error.exit_code for error in OptexportError.__subclasses__()}
    assert {str(code) for code in errors} | {"0", "2", "6", "130"} <= explained
    assert all(isinstance(command, click.Command) and command.help for command in cli.commands.values())
    assert set(cli.commands) >= {"run", "check", "init", "transformations", "verify"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", cli.commands)
def test_every_option_has_help_and_no_command_is_truncated(name: str) -> None:
    options = [option for option in cli.commands[name].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []
    listed = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": "80"}).stdout.partition("Options:")[0]
    (summary,) = re.findall(rf"^  {name}  +(.*\S)", listed, re.MULTILINE)
    assert summary.endswith(".")
    assert not summary.endswith("...")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", cli.commands)
def test_examples_of_the_help_use_existing_options(name: str) -> None:
    command = cli.commands[name]
    assert isinstance(command, Command)
    assert command.examples
    for line in command.examples:
        program, shown, *arguments = shlex.split(line.partition(" >")[0])
        assert (program, shown) == ("optexport", name)
        context = click.Context(command, info_name=name)
        _, rest, _ = command.make_parser(context).parse_args(arguments)  # refuses unknown options
        assert rest == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("arguments", [[], *([name] for name in cli.commands)], ids=" ".join)
def test_help_is_plain_text_of_the_width_of_the_terminal(arguments: list[str], width: int) -> None:
    environment = {"COLUMNS": str(width), "GITHUB_ACTIONS": "true"}
    shown = CliRunner().invoke(cli, [*arguments, "--help"], env=environment).stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) in range(width // 2, width + 1)
    assert shown.isascii()
    assert "\x1b" not in shown
    assert all(f"$ {line}" in lines for name in arguments for line in cli.commands[name].examples)  # type: ignore[attr-defined]


def test_help_has_sections_in_order() -> None:
    lines = CliRunner().invoke(cli, ["--help"]).stdout.splitlines()
    titles = [line.rstrip() for line in lines if re.match(r"[A-Z][a-z ]+:", line) and not line.startswith("Start")]
    assert [title for title in titles if not title.startswith("Usage")] == [
        "Export:",
        "Inspect:",
        "Deploy:",
        "Extend:",
        "Options:",
        "Exit codes:",
    ]
    export = CliRunner().invoke(cli, ["export", "--help"]).stdout
    assert re.search(r"^Model and inputs:.*?--input .*?^Bundle:.*?--output ", export, re.MULTILINE | re.DOTALL)


def test_init_help_names_every_kind_of_source() -> None:
    help_text = " ".join(CliRunner().invoke(cli, ["init", "--help"]).stdout.split())
    for kind in ("a folder", "a hub id", "package:", "python:", "mlflow:", ".pt2", "TorchScript"):
        assert kind in help_text
    assert len(SourceKind) == 7


# Commands in a new process


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=600, **options)


LIGHT = """
import json, sys
from optexport.cli.main import cli

found = {}
for arguments in json.loads(sys.argv[1]):
    try:
        cli(arguments)
    except SystemExit as end:
        loaded = {"torch", "transformers", "mlflow", "onnx", "onnxruntime", "numpy", "rich"} & set(sys.modules)
        found[" ".join(arguments)] = [end.code, sorted(loaded)]
print(json.dumps(found), file=sys.stderr)
"""


def test_commands_without_a_model_import_no_large_package(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MODEL + '[[transformations]]\nuse = "merge-linears"\n', encoding="utf-8")
    (tmp_path / "bad.toml").write_text(MISTAKES["unknown rule"][0], encoding="utf-8")
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "architectures": ["BertForMaskedLM"]}', encoding="utf-8")
    calls = {
        "--version": 0,
        "transformations": 0,
        "transformations --json": 0,
        "init .": 0,
        "check optexport.toml": 0,
        "check mine.toml": 0,
        "check bad.toml": 2,
        "run bad.toml": 2,
        "run nowhere.toml": 2,
        "run .": 2,
        "export ./nowhere": 2,
        "export . --task nothing": 2,
    }
    # Only the help and usage errors import rich, so they come last.
    calls_with_rich = {"--help": 0, "run --help": 0, "bench --help": 0, "export --help": 0, "bench nowhere.onnx": 2}
    done = python("-c", LIGHT, json.dumps([call.split() for call in [*calls, *calls_with_rich]]), cwd=tmp_path)
    assert json.loads(done.stderr.splitlines()[-1]) == {
        **{call: [code, []] for call, code in calls.items()},
        **{call: [code, ["rich"]] for call, code in calls_with_rich.items()},
    }


@pytest.mark.slow
def test_package_does_not_import_torch() -> None:
    code = "import optexport, sys; assert 'torch' not in sys.modules; print(optexport.__version__)"
    assert python("-c", code).stdout.strip() == __version__


def test_module_runs_the_program(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MISTAKES["unknown task"][0], encoding="utf-8")
    version = python("-m", "optexport", "--version")
    assert (version.returncode, version.stdout) == (0, f"optexport, version {__version__}\n")
    bad = python("-m", "optexport", "check", "mine.toml", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        'Error: mine.toml: model.task: unknown task "feature-extractoin"\nHint: Did you mean "feature-extraction"?\n'
    )
    shown = python("-m", "optexport", "--debug", "check", "mine.toml", cwd=tmp_path)
    assert shown.returncode == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.endswith(bad.stderr)
