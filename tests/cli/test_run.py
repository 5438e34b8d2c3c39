"""``run``: exit codes, error messages, and bundles that pass parity."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import load_model

from optexport.cli.main import cli
from optexport.transformations.registry import RULES
from tests._helpers.cli import Caller, config, message


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


# Errors that only a run can find: config, exit code, and a part of the message.
BY_RUNNING: dict[str, tuple[str, int, str]] = {
    "no such factory": (config("halves:laod"), 2, 'halves has no laod\nHint: Did you mean "load"?'),
    "factory that is no function": (config("halves:nn"), 2, "halves"),
    "factory that fails": (config("halves:fails"), 3, "the factory raised KeyError: 'no weights'"),
    "factory that leaves": (config("halves:leaves"), 3, "SystemExit"),
    "factory that is cancelled": (config("halves:cancelled"), 1, "which is not an Exception"),
    "factory that lacks an argument": (config("halves:takes"), 3, "argument: 'size'"),
    "factory of no model": (config("halves:number"), 3, "expected a torch.nn.Module from the factory, found int"),
    "model that cannot be traced": (config("halves:Forks"), 3, "two ways of the branch at halves.py"),
    "no folder of a model": (config().replace("python:halves:load", "."), 3, "has no config.json"),
    "inputs unknown": (config(inputs='tensors.y.shape = ["batch", 4]'), 2, "Halves has no input of this name"),
    "inputs of wrong shape": (
        config(inputs='tensors.x.shape = ["batch", 5]'),
        3,
        "the model itself fails on the inputs x [2, 5]",
    ),
    "inputs of wrong dtype": (
        config(inputs='tensors.x = { shape = ["batch", 4], dtype = "int64" }'),
        3,
        "the original model fails on case traced",
    ),
    "inputs of nothing": (config(inputs=""), 2, "nothing describes the model's inputs"),
    "dimension of no input": (
        config(inputs='tensors.x.shape = ["batch", 4]\ndynamic.bach = [1, 8]'),
        2,
        'inputs.dynamic.bach: no input has a dimension "bach"\nHint: Did you mean "batch"?',
    ),
    "dimension that the model fixes": (
        config(inputs='data = "x.npz"\naxes.x = ["batch", "width"]\ndynamic.width = [4, 8]'),
        3,
        "width",
    ),
    "range wider than the model takes": (
        config("halves:Places", inputs='tensors.x.shape = ["batch", "length"]\ndynamic.length = [2, 64]'),
        3,
        "length 64",
    ),
    "too many names of axes": (config(inputs='data = "x.npz"\naxes.x = ["a", "b", "c"]'), 2, "inputs.axes.x"),
    "axes of no input": (config(inputs='data = "x.npz"\naxes.z = ["a", "b"]'), 2, "inputs.axes.z"),
    "data of another precision": (config(inputs='data = "double.npz"'), 3, "dtype"),
    "damaged data": (config(inputs='data = "halves.npz"'), 2, "inputs.data: halves.npz: the file cannot be read"),
    "data of unknown kind": (
        config(inputs='data = "halves.py"'),
        2,
        "Write the name of a .safetensors, .npz or .jsonl file.",
    ),
    "texts without a tokenizer": (config(inputs='texts = ["a"]'), 2, "inputs.texts: the model has no tokenizer"),
    "images without a processor": (config(inputs='images = ["halves.py"]'), 2, "inputs.images"),
    "lines with other keys": (config(inputs='data = "mixed.jsonl"'), 2, "the keys differ from the keys of other lines"),
    "plugin that is nowhere": (
        config(more='transformations = [{ use = "python:nowhere:Mine" }]'),
        2,
        "the module nowhere does not exist",
    ),
    "plugin of another name": (
        config(more='transformations = [{ use = "python:halves:Double" }]'),
        2,
        'Did you mean "Doubles"?',
    ),
    "plugin that is no rule": (
        config(more='transformations = [{ use = "python:halves:Halves" }]'),
        2,
        "not a subclass of Transformation",
    ),
    "plugin with an unknown option": (
        config(more='transformations = [{ use = "python:halves:Doubles", times = 3 }]'),
        2,
        "transformations[0]",
    ),
    "plugin that breaks the model": (
        config(more='transformations = [{ use = "python:halves:Doubles" }]'),
        4,
        "Doubles",
    ),
    "plugin that fails": (config(more='transformations = [{ use = "python:halves:Fails" }]'), 5, "no such thing"),
    "plugin that never has enough": (
        config(more='transformations = [{ use = "python:halves:Forever" }]'),
        5,
        "python:halves:Forever: match returns the same Match for linear after rewrite",
    ),
    "output that is a file": (
        config().replace("build/model", "halves.py"),
        2,
        "the path exists and is not a bundle",
    ),
    "output that is a folder": (
        config().replace("build/model", "."),
        2,
        "the path exists and is not a bundle",
    ),
    "output below a file": (
        config().replace("build/model", "halves.py/x"),
        2,
        "the output cannot be written",
    ),
    "output of too long a name": (config().replace("build/model", "n" * 3000), 2, "export.output"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", BY_RUNNING)
def test_error_during_a_run_gives_an_exit_code_and_one_message(name: str, call: Caller, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), "float32"))
    np.savez(tmp_path / "double.npz", x=np.ones((2, 4)))
    (tmp_path / "halves.npz").write_bytes(b"x")
    (tmp_path / "mixed.jsonl").write_text('{"x": [1.0]}\n{"y": [1.0]}\n', encoding="utf-8")
    text, code, words = BY_RUNNING[name]
    before = sorted(path.name for path in tmp_path.iterdir())
    error = message(call("run", text), code)
    assert words in error
    left = {path.name for path in tmp_path.rglob("*") if path.is_dir()} - {"__pycache__", "build", "model-failure"}
    assert left <= set(before), "nothing is left of a run that failed"


# Successful runs


def test_successful_run_exits_with_0_and_its_bundle_verifies(call: Caller, tmp_path: Path) -> None:
    result = call("run", config(inputs='tensors.x.shape = ["batch", 4]\ndynamic.batch = [1, 8]'))
    assert result.exit_code == 0, result.output
    assert "PASSED  1 file, " in result.stdout
    bundle = tmp_path / "build" / "model"
    assert f"{bundle}" in result.stdout
    verified = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert (verified.exit_code, verified.stderr) == (0, "")
    program = bundle / "model.pt2"
    content = bytearray(program.read_bytes())
    content[len(content) // 2] ^= 1
    program.write_bytes(content)
    assert "model.pt2: the file was changed" in message(CliRunner().invoke(cli, ["verify", str(bundle)]), 4)


def test_second_run_replaces_the_bundle_unless_it_fails(call: Caller, tmp_path: Path) -> None:
    manifest = tmp_path / "build" / "model" / "manifest.json"
    assert call("run", config()).exit_code == 0
    first = manifest.read_bytes()
    assert call("run", config(more='transformations = [{ use = "python:halves:Doubles" }]')).exit_code == 4
    assert manifest.read_bytes() == first
    assert call("run", config()).exit_code == 0
    assert manifest.read_bytes() == first
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["model"]


def test_json_output_is_one_document(call: Caller) -> None:
    result = call("run", config(), "--json")
    assert (result.exit_code, "export pt2" in result.stderr) == (0, True)
    read = json.loads(result.stdout)
    assert read["passed"] is True
    assert set(read["files"]) == {"pt2"}
    assert set(read["transformed_nodes"]) == {name for name, info in RULES.items() if info.in_preset}


FAILURES = {
    "refused": (config(inputs=""), 2),
    "not loaded": (config("halves:fails"), 3),
    "left": (config("halves:leaves"), 3),
    "not proven": (config(more='transformations = [{ use = "python:halves:Doubles" }]'), 4),
    "not transformed": (config(more='transformations = [{ use = "python:halves:Fails" }]'), 5),
    "without work": (config(more='transformations = [{ use = "merge-linears", min_matches = 1 }]'), 6),
    "interrupted": (config("halves:interrupted"), 130),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAILURES)
def test_json_output_of_a_failure_is_one_document(name: str, call: Caller) -> None:
    text, code = FAILURES[name]
    result = call("run", text, "--json")
    read = json.loads(result.stdout)
    assert (read["passed"], read["exit_code"], result.exit_code) == (False, code, code)
    label = "FAILED  " if read["parity"] else "Error: "
    assert result.stderr.endswith(f"{label}{read['error']}\n")
    if code == 4:
        assert {place["target"] for place in read["parity"]["targets"]} == {"original", "graph"}
    else:
        assert read["parity"] is None


@pytest.mark.slow
def test_json_output_of_a_tracking_failure_is_one_document(call: Caller) -> None:
    result = call("run", config().replace("enabled = false", 'uri = "databricks://nowhere"'), "--json")
    read = json.loads(result.stdout)
    assert (read["passed"], read["exit_code"], result.exit_code) == (True, 7, 7)
    assert "databricks" in read["tracking_failure"]
    assert read["error"] == read["tracking_failure"]


def test_rule_can_be_excluded_and_an_unknown_one_is_reported(call: Caller) -> None:
    result = call("run", config(), "--json", "--without", "MergeLinears")
    assert "merge-linears" not in json.loads(result.stdout)["transformed_nodes"]
    assert 'Did you mean "merge-linears"?' in message(call("run", config(), "--without", "merge-linear"), 2)


def test_excluded_rule_needs_no_tolerance(call: Caller) -> None:
    text = config(more='transformations = [{ use = "cast-precision" }]')
    assert "Set parity.atol or parity.rtol" in message(call("run", text), 2)
    assert call("run", text, "--without", "CastPrecision").exit_code == 0


def test_baseline_is_written_next_to_the_bundle(call: Caller, tmp_path: Path) -> None:
    result = call("run", config(), "--baseline")
    assert result.exit_code == 0
    progress = re.findall(r"^ *\d+/\d+ (.+?) +\d+\.\d s$", result.stderr, re.MULTILINE)
    assert {"baseline: trace", "baseline: check pt2", "trace", "check pt2", "load"} <= set(progress)
    assert progress.count("trace") == 1
    plain = json.loads((tmp_path / "build" / "model-baseline" / "manifest.json").read_text())
    assert plain["transformations"] == []


def test_graphs_are_dumped_or_the_folder_is_refused(call: Caller, tmp_path: Path) -> None:
    assert call("run", config(), "--dump", str(tmp_path / "graphs")).exit_code == 0
    assert any((tmp_path / "graphs").iterdir())
    assert "dump" in message(call("run", config(), "--dump", str(tmp_path / "halves.py" / "graphs")), 2)


@pytest.mark.slow
def test_dump_folder_is_resolved_before_model_code_runs(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model code that changed the working directory led to a FileNotFoundError, reported as a defect."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moves.py").write_text(
        "import os, halves\n\ndef load():\n    os.chdir('elsewhere')\n    return halves.load()\n"
    )
    assert call("run", config("moves:load"), "--dump", "graphs").exit_code == 0
    assert any((tmp_path / "graphs").iterdir())


@pytest.mark.slow
def test_paths_expand_home_and_are_relative_to_the_config(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir("/")
    (tmp_path / "home").mkdir()
    np.savez(tmp_path / "home" / "x.npz", x=np.ones((2, 4), "float32"))
    text = config(inputs='data = "~/x.npz"').replace("build/model", "~/bundle")
    result = call("run", text)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "home" / "bundle" / "manifest.json").is_file()
    assert call("run", config(inputs='data = "home/x.npz"')).exit_code == 0
    assert (tmp_path / "build" / "model" / "manifest.json").is_file()


def test_requested_opset_is_used_or_refused(call: Caller, tmp_path: Path) -> None:
    onnx = config().replace('formats = ["pt2"]', 'formats = ["onnx"]\nopset = OPSET')
    assert call("run", onnx.replace("OPSET", "19")).exit_code == 0
    written = load_model(tmp_path / "build" / "model" / "model.onnx", load_external_data=False)
    assert [opset.version for opset in written.opset_import if not opset.domain] == [19]
    result = call("run", onnx.replace("OPSET", "99"))
    assert "opset" in message(result, 5 if result.exit_code == 5 else 2)


def test_interrupted_run_exits_with_130(call: Caller) -> None:
    assert message(call("run", config("halves:interrupted")), 130) == "interrupted\n"


def test_tracking_failure_exits_with_7_and_a_valid_bundle(call: Caller, tmp_path: Path) -> None:
    result = call("run", config().replace("enabled = false", 'uri = "databricks://nowhere"'))
    assert result.exit_code == 7, result.stderr
    assert "Error: tracking.uri: databricks://nowhere" in result.stderr
    assert "Traceback" not in result.stderr
    assert CliRunner().invoke(cli, ["verify", str(tmp_path / "build" / "model")]).exit_code == 0


def test_a_named_axis_without_a_range_is_mentioned(tmp_path: Path) -> None:
    inputs = 'tensors.x.shape = ["batch", "columns", 4]\ndynamic.columns = [2, 9]'
    done = Caller(tmp_path)("run", config(inputs=inputs))
    assert done.exit_code == 0, done.stderr
    assert "Dynamic axes columns 2 to 9\n  batch is fixed at 2: it has no range in inputs.dynamic\n" in done.stdout
