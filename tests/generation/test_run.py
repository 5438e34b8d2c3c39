"""Tests of ``[generation]`` in a config."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from mlflow import MlflowClient

from optexport import verify
from optexport.bundle.signing.folder_signature import check, sign
from optexport.config.load import parse_config
from optexport.errors import ConfigError, ParityError
from optexport.generation.export import check_output
from optexport.generation.run import _prompt, run_generation
from optexport.generation.runtime import Generator
from optexport.loading.loader import Loaded
from optexport.pipeline.run import run
from tests._helpers import signed
from tests._helpers.cli import CliRunner, cli
from tests._helpers.stores import store
from tests.generation import models

_CONFIG = """
[model]
source = "python:tests.generation.models:make"
arguments = { family = "gpt2" }
[inputs]
data = "prompts.jsonl"
[generation]
new_tokens = 8
[parity]
effort = "quick"
[export]
formats = ["onnx"]
output = "out"
[tracking]
enabled = false
"""


def _write(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}\n{"input_ids": [9, 10, 11, 12]}\n')
    (folder / "config.toml").write_text(_CONFIG)
    return folder / "config.toml"


@pytest.mark.slow
def test_run_writes_the_parts_and_reports_the_tokens(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", "--json", str(_write(tmp_path))])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["passed"]
    assert (document["error"], document["mlflow_run_id"]) == (None, None)
    assert [(row["format"], row["rows"], row["compared"]) for row in document["tokens"]] == [
        ("onnx", 2, 16),
        ("onnx", 1, 8),
    ]
    ids = torch.tensor([[5, 6, 7, 8]])
    actual = Generator.load(tmp_path / "out").generate(ids.numpy(), max_new_tokens=8)
    own = models.make("gpt2").generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    assert actual.tolist() == own.tolist()
    private, public = signed.pair(tmp_path)
    sign(tmp_path / "out", private)
    assert list(check(tmp_path / "out", public)) == [tmp_path / "out" / "decoder"]
    Generator.load(tmp_path / "out")
    check_output(tmp_path / "out")  # a later run may replace this folder


@pytest.mark.slow
def test_each_part_has_its_own_mlflow_run_and_all_steps_are_counted(tmp_path: Path) -> None:
    uri = store(tmp_path)
    text = _CONFIG.replace('"gpt2"', '"t5"').replace("enabled = false", f'uri = "{uri}"\nexperiment = "generation"')
    _write(tmp_path).write_text(text)
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "config.toml")])
    assert done.exit_code == 0, done.output
    steps = re.findall(r"^ *(\d+)(?:/\d+)? (\S.*?) +\d+\.\d s$", done.stderr, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert [steps[index][1] for index in (0, 2, -1)] == ["load", "encoder: trace", "track"]
    assert f"{len(steps)}/{len(steps)} track" in done.stderr
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("generation")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.data.tags["part"]: run.info.status for run in runs} == {"encoder": "FINISHED", "decoder": "FINISHED"}
    assert all(any(key.startswith("parity") for key in run.data.metrics) for run in runs)


@pytest.mark.slow
def test_a_failed_check_of_a_part_has_one_mlflow_run(tmp_path: Path) -> None:
    uri = store(tmp_path)
    tracking = f'uri = "{uri}"\nexperiment = "generation"'
    text = _CONFIG.replace("enabled = false", tracking).replace("[parity]", "[parity]\natol = 1e-30")
    _write(tmp_path).write_text(text)
    failed = CliRunner().invoke(cli, ["run", str(tmp_path / "config.toml")])
    assert failed.exit_code == 4, failed.output
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("generation")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.metrics["parity/passed"]) == ("FAILED", 0.0)
    paths = {file.path for file in client.list_artifacts(run.info.run_id, "bundle-failure")}
    assert "bundle-failure/diagnosis.txt" in paths


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("[bench]\nenabled = true", "bench"),
        ("[tune]", "tune"),
        ("[gate]\nmax_size_mb = 5.0", "gate"),
        ("[parity.metrics]\nargmax_agreement = 0.9", "parity.metrics"),
        ("[inputs.tensors.input_ids]\nshape = [2, 3]\ndtype = 'int64'", "inputs.tensors"),
        ("[inputs]\ntexts = ['a']\n[inputs.dynamic]\nbatch = [1, 4]", "inputs.dynamic"),
    ],
)
def test_conflicting_config_keys_are_refused_before_any_work(table: str, place: str, tmp_path: Path) -> None:
    text = f'[model]\nsource = "python:tests.generation.models:make"\n[generation]\n{table}\n'
    with pytest.raises(ConfigError, match="cannot be combined with") as raised:
        parse_config(text, tmp_path / "config.toml")
    assert raised.value.location == f"{tmp_path / 'config.toml'}: {place}"


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--tune"], ["--baseline"], ["--dump", "graphs"], ["--junit", "proof.xml"]])
def test_conflicting_options_are_refused(option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _write(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["run", *option, str(config)])
    assert done.exit_code == 2
    assert option[0] in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_run_refuses_the_table_and_names_run_generation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_generation"):
        run(_write(tmp_path))


def test_right_padded_prompts_become_left_padded() -> None:
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 10], [0, 3, 4, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
    actual = _prompt({"input_ids": ids, "attention_mask": mask}, Loaded(models.make("gpt2")))
    assert actual["input_ids"].tolist() == [[0, 0, 5, 6], [7, 8, 9, 10], [0, 0, 3, 4]]
    assert actual["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_decoder_in_lower_precision_is_gated_on_its_tokens(family: str, tmp_path: Path) -> None:
    lowered = '[precision]\nonnx = "int4-blocks"\n[parity.metrics]\nargmax_agreement = 0.5\n'
    _write(tmp_path).write_text(_CONFIG.replace('"gpt2"', f'"{family}"') + lowered)
    result = run_generation(tmp_path / "config.toml")
    for name, part in result.parts.items():
        (artifact,) = part.manifest.artifacts
        nodes = {node.op_type for node in onnx.load(part.files["onnx"]).graph.node}
        assert ("MatMulNBits" in nodes, artifact.precision is not None) == ((name == "decoder",) * 2)
    (decoder,) = result.parts["decoder"].manifest.artifacts
    assert decoder.precision is not None
    assert decoder.precision.precision == "int4-blocks"
    assert {(gate.measure, gate.output) for gate in decoder.precision.chosen} == {("argmax_agreement", "logits")}
    agreeing = [comparison.agreeing or 0 for comparison in result.tokens]
    compared = [comparison.compared for comparison in result.tokens]
    assert compared == [16]
    assert sum(agreeing) >= 0.5 * sum(compared)
    assert f"{agreeing[0]} of 16 predicted, each after the model's earlier tokens" in result.summary()
    assert verify(result.output / "decoder").passed
    prompt = np.array([[5, 6, 7, 8]])
    assert Generator.load(result.output).generate(prompt, max_new_tokens=3, eos_token_id=()).shape[1] in (4, 7)


@pytest.mark.slow
def test_decoder_whose_tokens_miss_the_gate_fails(tmp_path: Path) -> None:
    lowered = '[precision]\nonnx = "int4-blocks"\n[parity.metrics]\nargmax_agreement = 0.5\ncosine = 0.9999999\n'
    _write(tmp_path).write_text(_CONFIG + lowered)
    with pytest.raises(ParityError, match="no choice of layers in int4-blocks passes") as raised:
        run_generation(tmp_path / "config.toml")
    assert raised.value.exit_code == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "place", "message"),
    [
        ('onnx = "int8"\n[parity.metrics]\nargmax_agreement = 0.9', "precision.onnx", "cannot be exported in int8"),
        (
            'torchscript = "bfloat16"\n[parity.metrics]\nargmax_agreement = 0.9',
            "precision.torchscript",
            "cannot be exported in bfloat16",
        ),
        ('onnx = "int4-blocks"\n[parity.metrics]\ncosine = 0.9', "parity.metrics", "needs a gate on its tokens"),
        (
            'onnx = "int4-blocks"\n[parity.metrics]\nargmax_agreement = { min = 0.9, output = "present_0_key" }',
            "parity.metrics.argmax_agreement",
            "apply to its logits, found present_0_key",
        ),
    ],
)
def test_unsuitable_precision_of_a_decoder_is_refused(table: str, place: str, message: str, tmp_path: Path) -> None:
    text = f'[model]\nsource = "python:tests.generation.models:make"\n[generation]\n[precision]\n{table}\n'
    with pytest.raises(ConfigError, match=message) as raised:
        parse_config(text, tmp_path / "config.toml")
    assert raised.value.location == f"{tmp_path / 'config.toml'}: {place}"
