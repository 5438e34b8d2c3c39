"""``export``: the same runs as with a config file, and errors that name its options."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optexport.cli.main import cli
from tests._helpers import exports, folders, models
from tests._helpers.cli import MODULE, config, message
from tests._helpers.inputs import bert

# A model that needs inputs, and the shortest way to export it.
SOURCE = "python:halves:load"
HALVES = [SOURCE, "--input", "x=batch,4", "--format", "pt2", "--no-tracking"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Result:
    sys.modules.pop("halves", None)  # imported by another test
    return CliRunner().invoke(cli, arguments)


def settings(bundle: str) -> dict[str, Any]:
    return tomllib.loads(Path(bundle, "config.toml").read_text(encoding="utf-8"))


def contents(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bundle.iterdir() if path.name not in exports.UNEQUAL}


def test_saved_config_gives_the_same_bundle(tmp_path: Path) -> None:
    assert call("export", *HALVES).exit_code == 0
    without_file = contents(tmp_path / "build" / "halves")
    saved = call("export", *HALVES, "--save-config", "mine.toml")
    assert (saved.exit_code, contents(tmp_path / "build" / "halves")) == (0, without_file)
    assert "Wrote mine.toml. To repeat this export: optexport run mine.toml\n" in saved.stderr
    assert call("run", "mine.toml").exit_code == 0
    assert contents(tmp_path / "build" / "halves") == without_file
    assert {"config.toml", "manifest.json", "model.pt2"} <= {*without_file}


def test_options_are_written_to_the_config() -> None:
    done = call(
        *("export", *HALVES, "-o", "out", "--dynamic", "batch=2:8", "--experiment", "mine", "--uri", "sqlite:///a.db"),
        *("--transform", "MergeLinears", "--transform", "fuse-bias", "--without", "merge-linears"),
    )
    assert done.exit_code == 0, done.stderr
    written = settings("out")
    assert written["inputs"] == {
        "tensors": {"x": {"shape": ["batch", 4], "dtype": "float32"}},
        "dynamic": {"batch": [2, 8]},
    }
    assert written["transformations"] == [{"use": "fuse-bias"}]
    assert (written["export"]["formats"], written["export"]["output"]) == (["pt2"], "out")
    assert written["tracking"] == {"enabled": False, "uri": "sqlite:///a.db", "experiment": "mine"}
    assert "Dynamic axes batch 2 to 8\n" in done.stdout


def test_every_rule_can_be_left_out() -> None:
    done = call("export", *HALVES, "--transform", "fuse-bias", "--without", "fuse-bias")
    assert done.exit_code == 0, done.stderr
    assert settings("build/halves")["transformations"] == []


@pytest.mark.nightly
def test_config_in_another_folder_has_paths_from_there(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "model").mkdir()
    program = exports.exported().output / "model.pt2"
    (tmp_path / "model" / "block.pt2").write_bytes(program.read_bytes())
    options = ["--format", "pt2", "--save-config", "configs/mine.toml"]
    assert call("export", "model/block.pt2", *options).exit_code == 0
    assert call("check", "configs/mine.toml").exit_code == 0
    written = tomllib.loads((tmp_path / "configs" / "mine.toml").read_text(encoding="utf-8"))
    assert written["model"]["source"] == "../model/block.pt2"
    assert written["export"]["output"] == "../build/block"
    assert (tmp_path / "build" / "block" / "model.pt2").is_file()
    assert (tmp_path / "mlflow.db").is_file()


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", ["bert", "resnet", pytest.param("t5", marks=pytest.mark.nightly)])
def test_folder_of_a_model_needs_no_options(name: str, tmp_path: Path) -> None:
    """``resnet`` has no image size, so its inputs are those of a run without ``[inputs]``."""
    models.model(name).save_pretrained(tmp_path / "my-model")  # type: ignore[operator]
    done = call("export", "./my-model", "--format", "onnx", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["passed"], result["output"]) == (True, str(tmp_path / "build" / "my-model"))
    assert result["mlflow_run_id"]
    assert settings("build/my-model")["tracking"]["experiment"] == "my-model"
    assert "guessed" not in Path("build/my-model/config.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_factory_of_a_transformers_model_needs_no_inputs(tmp_path: Path) -> None:
    factory = "from tests._helpers import models\ndef make(): return models.model('vit')\n"
    (tmp_path / "made.py").write_text(factory, encoding="utf-8")
    done = call("export", "python:made:make", "--format", "pt2", "--no-tracking")
    assert done.exit_code == 0, done.stderr
    assert "Dynamic axes batch" in done.stdout


@pytest.mark.nightly
def test_tuned_export_has_the_search_in_its_config() -> None:
    done = call("export", *HALVES, "--tune", "--without", "merge-linears", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert settings("build/halves")["tune"] == {"budget": "5m"}
    assert done.stderr == ""


def test_made_up_inputs_are_named(tmp_path: Path) -> None:
    folders.save(bert(), tmp_path / "bert")
    done = call("export", "bert", "--format", "pt2", "--no-tracking")
    assert "The inputs were two example sentences. To check with your own: --data FILE\n" in done.stderr, done.stderr


@pytest.mark.slow
def test_budget_is_the_time_of_tuning() -> None:
    done = call("export", *HALVES[:3], "--format", "torchscript", "--no-tracking", "--tune", "--budget", "20s")
    assert done.exit_code == 0, done.stderr
    assert settings("build/halves")["tune"] == {"budget": "20s"}


@pytest.mark.slow
def test_lost_server_is_reported_with_the_command_that_uploads() -> None:
    done = call("export", *HALVES[:-1], "--uri", "http://127.0.0.1:9")
    assert done.exit_code == 7
    assert f"run: optexport upload {Path('build/halves').resolve()} --uri http://127.0.0.1:9\n" in done.stderr
    refused = "cannot connect to the server: connection refused"
    assert f"MLflow failed: {refused}. The export continues.\n" in done.stderr
    assert done.stderr.count(refused) == 2


def test_data_junit_and_baseline_are_those_of_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": [1.0, 2.0, 3.0, 4.0]}\n{"x": [0.5, 0.0, 1.0, 2.0]}\n')
    options = ["--data", "rows.jsonl", "--format", "pt2", "--no-tracking", "--baseline", "--dump", "graphs"]
    done = call("export", SOURCE, *options, "--junit", "parity.xml")
    assert done.exit_code == 0, done.stderr
    assert settings("build/halves")["inputs"] == {"data": "rows.jsonl"}
    assert (tmp_path / "build" / "halves-baseline" / "model.pt2").is_file()
    assert 'failures="0"' in Path("parity.xml").read_text(encoding="utf-8")
    assert any((tmp_path / "graphs").iterdir())


# Arguments, the location in the error, and a part of the message.
MISTAKES: dict[str, tuple[list[str], str, str]] = {
    "no such folder": (["./nowhere"], "SOURCE", "the folder ./nowhere does not exist"),
    "no such module": (["python:halve:load"], "SOURCE", "put halve.py in the working directory"),
    "folder without a model": (["."], "SOURCE", "has no config.json"),
    "task": ([SOURCE, "--task", "feature-extractoin"], "--task", 'Did you mean "feature-extraction"?'),
    "rule": ([SOURCE, "--transform", "merge-linear"], "--transform", 'Did you mean "merge-linears"?'),
    "no such rule": ([SOURCE, "--without", "merge-linear"], "--without merge-linear", 'Did you mean "merge-linears"?'),
    "data": ([SOURCE, "--data", "nowhere.npz"], "--data", "the file nowhere.npz does not exist"),
    "inputs": ([SOURCE, "--no-tracking"], "SOURCE", "Hint: Add --input NAME=batch,3,224,224 for each input, or"),
    "input": ([*HALVES, "--input", "y=batch"], "--input y", "Halves has no input of this name"),
    "axis": ([*HALVES, "--dynamic", "bach=1:8"], "--dynamic bach", 'Did you mean "batch"?'),
    "size": ([*HALVES, "--input", "y=0"], "--input y.shape[0]", "expected a size from 1"),
    "uri": ([SOURCE, "--uri", "htp://host"], "--uri", 'MLflow has no tracking store "htp"'),
    "budget": ([*HALVES, "--tune", "--budget", "3x"], "--budget", "such as"),
    "code": ([SOURCE, "--no-custom-code"], "SOURCE", "then run again without --no-custom-code"),
    "saved config": ([*HALVES, "--save-config", "halves.py"], "--save-config halves.py", "has other content"),
    "folder of a config": (
        [*HALVES, "--save-config", "a/b.toml"],
        "--save-config a/b.toml",
        "put halves.py in the folder of",
    ),
    "output": ([*HALVES, "-o", "."], "--output", "the path exists and is not a bundle"),
    "two": ([SOURCE, "--task", "x", "--uri", "a://b"], "optexport export", "\n  --uri: MLflow has no tracking"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_the_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_NO_CUSTOM_CODE", "")  # --no-custom-code sets it
    arguments, location, part = MISTAKES[name]
    error = message(call("export", *arguments), 2)
    assert error.startswith(f"{location}: "), error
    assert part in error
    assert not Path("build", "halves").exists()


@pytest.mark.parametrize(
    "option",
    [
        ["--dynamic", "batch"],
        ["--dynamic", "batch=8:2"],
        ["--dynamic", "batch=0:2"],
        ["--input", "x"],
        ["--input", "x=batch,4:int65"],
        ["--format", "tflite"],
        ["--data", "x.npz", "--input", "x=batch,4"],
        ["--budget", "60s"],
    ],
    ids=" ".join,
)
def test_malformed_options_are_usage_errors(option: list[str]) -> None:
    assert option[0] in message(call("export", SOURCE, *option), 2)


@pytest.mark.parametrize(
    "source", [".", "./folder", "python:halves:load", "package:x/y", "mlflow:models:/a@b", "m.pt2", "org/name", "name"]
)
def test_run_of_a_source_names_the_export_command(source: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "m.pt2").touch()
    error = message(call("run", source), 2)
    assert error == (
        f"{Path(source)}: this is the source of a model, not a config\n"
        f"Hint: To export it without a config, run: optexport export {Path(source)}\n"
    )


def test_run_of_a_weights_file_gives_the_hint_of_export(tmp_path: Path) -> None:
    """It was read as a config, and the hint named no command."""
    (tmp_path / "resnet.pth").write_bytes(bytes(1 << 21))
    hints = {message(call(command, "resnet.pth"), 2).partition(": ")[2] for command in ("run", "check", "export")}
    (hint,) = hints
    assert hint.startswith("resnet.pth is a weights file, not a model\nHint: Write a function that builds the model")


def test_check_names_the_config_of_an_unusable_output(tmp_path: Path) -> None:
    (tmp_path / "build").touch()
    (tmp_path / "a.toml").write_text(config(), encoding="utf-8")
    assert message(call("check", "a.toml"), 2).startswith("a.toml: export.output: ")


def test_missing_config_is_no_source(tmp_path: Path) -> None:
    assert "the config file does not exist" in message(call("run", "nowhere.toml"), 2)
    (tmp_path / "config").write_text(config("halves:laod"), encoding="utf-8")
    assert 'Did you mean "load"?' in message(call("run", "config"), 2)


def test_saved_config_of_a_mistake_is_removed_so_that_the_corrected_command_works() -> None:
    wrong = call(
        "export", SOURCE, "--input", "y=batch,4", "--format", "pt2", "--no-tracking", "--save-config", "a.toml"
    )
    assert wrong.exit_code == 2
    assert "--input y" in wrong.stderr
    assert not Path("a.toml").exists()
    assert call("export", *HALVES, "--save-config", "a.toml").exit_code == 0
    assert Path("a.toml").is_file()


@pytest.mark.slow
def test_saved_config_in_another_folder_keeps_the_store_and_needs_its_module() -> None:
    Path("sub").mkdir()
    refused = call("export", *HALVES, "--save-config", "sub/a.toml")
    assert refused.exit_code == 2
    assert "--save-config sub/a.toml: the module halves does not exist" in refused.stderr
    Path("sub/halves.py").write_text(MODULE, encoding="utf-8")
    options = ["--input", "x=batch,4", "--format", "pt2", "--uri", "sqlite:///my.db"]
    assert call("export", SOURCE, *options, "--save-config", "sub/a.toml").exit_code == 0
    assert Path("my.db").is_file()
    assert not Path("sub/my.db").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", f"x=batch,{'9' * 5000}"], "does not have the form"),
        (["--input", "x=batch,4", "--input", "x=batch,4"], "the input x is given twice"),
        (["--input", "x=batch,4", "--uri", ""], "--uri"),
        (["--input", "x=batch,4", "--experiment", ""], "--experiment"),
    ],
)
def test_wrong_values_of_options_are_named(options: list[str], message: str) -> None:
    done = call("export", SOURCE, *options)
    assert done.exit_code == 2
    assert message in done.stderr
