"""A reproduced bundle is the same to the byte, or the differences are named."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optexport._utils import custom_code
from optexport.bundle.digests import read_manifest
from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.bundle.measurements import read_measured
from optexport.bundle.signing.folder_signature import sign
from optexport.errors import ConfigError, SourceError
from optexport.pipeline import reproduce as pipeline_reproduce
from tests._helpers import exports, signed
from tests._helpers.cli import CliRunner, cli, message

MODULE = """
import torch
from torch import nn
from tests._helpers.exports import block

def load(scale=1.0):
    model = block()
    with torch.no_grad():
        model.down.weight.mul_(SCALE)
    return model

SCALE = 1.0
"""
CONFIG = (
    """
[model]
source = "python:reproduced:load"
"""
    + exports.INPUTS
    + """
[[transformations]]
use = "merge-linears"
formats = ["onnx"]
[export]
output = "build/model"
formats = ["torchscript", "onnx", "pt2"]
[export.passes]
torchscript = ["freeze"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a config and of its bundle."""
    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "reproduced.py").write_text(MODULE)
    (folder / "config.toml").write_text(CONFIG)
    sys.modules.pop("reproduced", None)
    done = CliRunner().invoke(cli, ["run", str(folder / "config.toml")])
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may change."""
    sys.modules.pop("reproduced", None)
    return Path(shutil.copytree(original, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


def reproduce(project: Path) -> Any:
    return CliRunner().invoke(cli, ["reproduce", str(project / "build" / "model"), "--folder", str(project)])


def test_reproduction_in_another_folder_is_equal_to_the_byte(project: Path) -> None:
    before = {path: path.read_bytes() for path in (project / "build" / "model").rglob("*") if path.is_file()}
    done = reproduce(project)
    assert done.exit_code == 0, done.stderr
    assert "every file of the manifest is identical" in done.stdout
    assert {path: path.read_bytes() for path in before} == before


def test_bundle_with_custom_code_is_refused_if_that_is_forbidden(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config was not checked before the run, so the module was imported."""
    monkeypatch.setenv(custom_code.VARIABLE, "1")
    (project / "reproduced.py").write_text(f"open({str(project / 'ran')!r}, 'w').close()\n{MODULE}")
    assert "forbids custom code" in message(reproduce(project), 2)
    assert not (project / "ran").exists()


FORGED: dict[str, dict[str, Any]] = {
    "a function of C as the model": {"model": {"source": "python:os:system", "arguments": {"command": "touch RAN"}}},
    "a class as the model": {
        "model": {"source": "python:subprocess:Popen", "arguments": {"args": ["touch", "RAN"]}},
    },
    "a function of C as a rule": {"transformations": [{"use": "python:os:system", "command": "touch RAN"}]},
}


@pytest.mark.parametrize("forged", FORGED)
def test_callable_that_makes_no_model_or_rule_is_not_called(project: Path, forged: str) -> None:
    def forge(manifest: dict[str, Any]) -> None:
        for key, value in json.loads(json.dumps(FORGED[forged]).replace("RAN", str(project / "ran"))).items():
            manifest["config"][key] = {**manifest["config"][key], **value} if isinstance(value, dict) else value

    exports.edit_json(project / "build" / "model" / MANIFEST, forge)
    assert "so it is not called" in message(reproduce(project), 2)
    assert not (project / "ran").exists()


@pytest.mark.parametrize("inputs", [None, [1], {"tensors": [1]}, {"tensors": 5}], ids=str)
def test_forged_inputs_are_one_clear_error(project: Path, inputs: Any) -> None:
    def forge(manifest: dict[str, Any]) -> None:
        tables = {key: value for key, value in manifest["config"].items() if key != "inputs"}
        manifest["config"] = tables if inputs is None else {**tables, "inputs": inputs}

    exports.edit_json(project / "build" / "model" / MANIFEST, forge)
    assert "inputs" in message(reproduce(project), 2)


def test_forged_empty_config_is_one_clear_error(project: Path) -> None:
    exports.edit_json(project / "build" / "model" / MANIFEST, lambda manifest: manifest.update(config={}))
    assert "model" in message(reproduce(project), 2)


@pytest.mark.slow
def test_signature_is_checked_before_anything_runs(project: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    bundle = project / "build" / "model"
    (project / "reproduced.py").write_text(f"open({str(project / 'ran')!r}, 'w').close()\n{MODULE}")
    arguments = ["reproduce", str(bundle), "--folder", str(project), "--key", str(public)]
    assert "the signature is missing" in message(CliRunner().invoke(cli, arguments), 4)
    assert not (project / "ran").exists()
    sign(bundle, private)
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.stderr
    assert (project / "ran").exists()


@pytest.mark.slow
def test_changed_model_is_named_with_its_weights_in_every_file(project: Path) -> None:
    (project / "reproduced.py").write_text(MODULE.replace("SCALE = 1.0", "SCALE = 1.25"))
    error = message(reproduce(project), 4)
    assert "the digest of the model's weights was" in error
    for name in ("model.onnx", "model.torchscript.pt", "model.pt2", "reference.safetensors"):
        assert f"{name} differs" in error
    assert error.count("down.weight") >= 2
    assert "differs by at most" in error


@pytest.mark.slow
def test_changed_graph_is_named_by_its_node(project: Path) -> None:
    (project / "reproduced.py").write_text(
        MODULE.replace("        model.down", "        model.act = nn.ReLU()\n        model.down")
    )
    error = message(reproduce(project), 4)
    assert "graph_before.txt differs" in error
    assert "gelu" in error
    assert "relu" in error


def test_changed_versions_are_named(project: Path) -> None:
    later = read_manifest(project / "build" / "model")
    earlier = later.model_copy(update={"versions": {**later.versions, "torch": "2.11.0"}})
    assert list(pipeline_reproduce._list_input_differences(later, later)) == []
    (difference,) = pipeline_reproduce._list_input_differences(earlier, later)
    assert difference.startswith("torch: 2.11.0 before, 2")


def test_other_machine_and_other_threads_are_named(project: Path) -> None:
    measured = read_measured(project / "build" / "model")
    assert list(pipeline_reproduce._list_machine_differences(measured)) == []
    changed = measured.model_copy(update={"threads": torch.get_num_threads() + 1, "processor": "i8080"})
    threads, processor = pipeline_reproduce._list_machine_differences(changed)
    assert threads.startswith(f"the number of threads (OMP_NUM_THREADS) was {torch.get_num_threads() + 1}, and is ")
    assert processor.startswith("the processor was i8080, and is ")


def test_hint_has_the_number_of_threads_of_the_bundle(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    assert pipeline_reproduce.find_hint(project / "build" / "model") is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    hint = pipeline_reproduce.find_hint(project / "build" / "model")
    assert hint == f"Run again with OMP_NUM_THREADS={threads}"


@pytest.mark.slow
def test_reasons_come_before_a_difference_of_the_results(project: Path) -> None:
    """Only the verification result in the manifest differed, without a reason."""
    manifest, measured = (project / "build" / "model" / name for name in (MANIFEST, MEASUREMENTS))
    exports.edit_json(manifest, lambda document: document["parity"].update(ways=["with one thread"]))
    exports.edit_json(manifest, lambda document: document["versions"].update(torch="2.11.0"))
    resealed = json.loads(manifest.read_bytes())["digest"]
    exports.edit_json(measured, lambda document: document.update(processor="i8080", manifest=resealed))
    error = message(reproduce(project), 4)
    assert "torch: 2.11.0 before, 2" in error
    assert "the processor was i8080, and is " in error
    assert "manifest.json differs: parity" in error


def test_bundle_of_a_python_model_cannot_be_reproduced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the bundle has no config, because it was exported from Python"):
        pipeline_reproduce.reproduce(exports.exported().output, tmp_path)


def test_bundle_without_its_source_is_one_clear_error(project: Path) -> None:
    (project / "reproduced.py").unlink()
    sys.modules.pop("reproduced", None)
    assert "reproduced" in message(reproduce(project), 2)


def test_error_in_another_folder_suggests_the_folder_option(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint asked for a file in the config's folder, where it was. The search was in the working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    bundle = project / "build" / "model"
    error = message(CliRunner().invoke(cli, ["reproduce", str(bundle)]), 2)
    assert f"{bundle}: model.source: the module reproduced does not exist\n" in error
    assert f"Set --folder to the folder of the config (searched: {tmp_path / 'elsewhere'})" in error
    assert error.count("Hint:") == 1


@pytest.mark.parametrize("damage", [lambda folder: (folder / "model.onnx").write_bytes(b"x"), shutil.rmtree])
def test_damaged_bundle_is_not_reproduced(project: Path, damage: Callable[[Path], object]) -> None:
    damage(project / "build" / "model")
    assert reproduce(project).exit_code in (2, 4)


def test_part_of_a_generative_model_is_not_reproduced_alone(project: Path) -> None:
    manifest = project / "build" / "model" / MANIFEST
    exports.edit_json(manifest, lambda document: document["config"].update(generation={"new_tokens": 4}))
    assert "parts cannot be reproduced separately" in message(reproduce(project), 2)


def test_parts_with_other_shapes_and_names_are_reported() -> None:
    earlier = {"a": torch.zeros(2), "b": "x\ny", "c": torch.zeros(1)}
    later = {"a": torch.zeros(3), "b": "x\nz", "d": torch.zeros(1)}
    assert list(pipeline_reproduce._list_part_differences(earlier, later)) == [
        "a was torch.float32 [2], and is torch.float32 [3]",
        "b, line 2: was y, is z",
        "c is missing",
        "d is new",
    ]


@pytest.mark.parametrize(
    ("earlier", "later", "lines"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], []),
        ([math.inf, 1.0], [math.inf, 3.5], ["a differs by at most 2.5"]),
        ([math.nan], [1.0], ["a differs"]),
        ([0.0], [-0.0], ["a differs"]),
        ([1j], [3j], ["a differs by at most 2"]),
    ],
)
def test_special_values_are_compared_by_their_bits(earlier: list[Any], later: list[Any], lines: list[str]) -> None:
    parts = ({"a": torch.tensor(values)} for values in (earlier, later))
    assert list(pipeline_reproduce._list_part_differences(*parts)) == lines


def test_other_line_ending_is_named() -> None:
    """It ended in StopIteration."""
    differences = list(pipeline_reproduce._list_part_differences({"text": "a\nb\n"}, {"text": "a\nb"}))
    assert differences == ["text, line 2: the line endings differ"]


def _from_mlflow(project: Path, folder: Path, uri: str) -> Path:
    """Returns a bundle whose manifest names an MLflow model as its source."""
    bundle = folder / "forged"
    shutil.copytree(project / "build" / "model", bundle, dirs_exist_ok=True)
    document = json.loads((bundle / MANIFEST).read_text())
    document["config"]["model"]["source"] = "mlflow:models:/name/1"
    document["config"]["model"]["arguments"] = {}
    document["config"]["tracking"]["uri"] = uri
    (bundle / MANIFEST).write_text(json.dumps(document))
    exports.reseal(bundle)
    return bundle


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:///{folder}/mine.db"])
def test_store_named_by_a_bundle_is_not_asked_for_a_model(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    """A server received the credentials of the machine, and MLflow created its tables in any database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # mlflow sets this if it has a store
    bundle = _from_mlflow(original, tmp_path, uri.format(folder=tmp_path))
    with pytest.raises(ConfigError, match="the environment does not set an MLflow server for it"):
        pipeline_reproduce.reproduce(bundle, tmp_path)
    assert not (tmp_path / "mine.db").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(SourceError, match="model.source: mlflow:models:/name/1"):
        pipeline_reproduce.reproduce(bundle, tmp_path)
