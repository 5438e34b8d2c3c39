"""Options of `optexport.export` beyond the model and its inputs: what the command line can do, Python can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import onnx
import pytest
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import optexport
from optexport.pipeline.api_arguments import name_rules
from optexport.transformations.registry import PRESET
from tests._helpers import exports, inputs, models, stores


def _export(folder: Path, **options: Any) -> optexport.Result:
    options = {"formats": "onnx", "effort": "quick", **options}
    model = options.pop("model", None) or exports.block()
    return optexport.export(model, exports.batch(), folder / "bundle", **options)


def test_one_format_and_one_rule_may_be_names(tmp_path: Path) -> None:
    result = _export(tmp_path, transformations="merge-linears")
    assert list(result.files) == ["onnx"]
    assert [rule.rule for rule in result.manifest.transformations] == ["merge-linears"]


def test_names_and_instances_of_rules_may_be_mixed(tmp_path: Path) -> None:
    result = _export(tmp_path, transformations=["MergeLinears", optexport.transformations.FuseBias()])
    assert [rule.rule for rule in result.manifest.transformations] == ["merge-linears", "fuse-bias"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformations": "merge-linear"}, 'unknown rule "merge-linear".*Did you mean "merge-linears"'),
        ({"formats": "onx"}, 'unknown format "onx"'),
        ({"model": {"w": 1}}, "model: the model is not an nn.Module.*load_state_dict"),
        ({"providers": 5}, "providers: expected a list, found 5"),
        ({"passes": {"onnx": "sum"}}, 'unknown format pass "sum"'),
        ({"bench": 3}, "bench: 3 is not a mapping"),
        ({"tokenizer": "bert-base"}, "tokenizer: 'bert-base' is not a tokenizer of transformers"),
        ({"tune": "soon"}, 'tune.budget: "soon" is not a duration'),
        ({"tracking": {"ur": "x"}}, 'tracking.ur: unknown key "ur".*Did you mean "uri"'),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(optexport.ConfigError, match=f"(?s){message}"):
        _export(tmp_path, **options)
    assert not (tmp_path / "bundle").exists()


def test_names_of_outputs_may_be_left_out_of_keep_outputs(tmp_path: Path) -> None:
    """Without names, the rule keeps all outputs. Together with another one, it ended in a ParityError."""
    rules = [optexport.transformations.KeepOutputs(), optexport.transformations.KeepOutputs(("hidden",))]
    result = _export(tmp_path, transformations=rules)
    assert [spec.name for spec in result.manifest.outputs] == ["hidden"]


def test_providers_are_recorded_in_the_file(tmp_path: Path) -> None:
    result = _export(tmp_path, providers="CPUExecutionProvider")
    metadata = {entry.key: entry.value for entry in onnx.load(result.files["onnx"]).metadata_props}
    assert metadata["optexport.providers"] == '["CPUExecutionProvider"]'
    assert optexport.verify(result.output).passed


def test_a_provider_that_is_not_installed_is_named_before_the_trace(tmp_path: Path) -> None:
    with pytest.raises(optexport.DeviceError) as raised:
        _export(tmp_path, providers=["XnnpackExecutionProvider"])
    assert str(raised.value).startswith(
        "providers: the installed ONNX Runtime has no XnnpackExecutionProvider (it has "
    )
    assert not (tmp_path / "bundle").exists()


def test_an_export_is_tracked_on_request(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    result = _export(tmp_path, tracking={"uri": uri, "experiment": "mine"})
    client = mlflow.MlflowClient(uri)
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert "model.onnx" in {Path(file.path).name for file in client.list_artifacts(result.run_id, "bundle")}


def test_an_unreachable_store_does_not_lose_the_bundle(tmp_path: Path) -> None:
    result = _export(tmp_path, tracking="http://127.0.0.1:1")
    assert result.passed
    assert result.files["onnx"].is_file()
    assert isinstance(result.tracking_failure, optexport.TrackingError)
    assert f"optexport upload {result.output}" in result.summary()
    assert f"optexport upload {result.output} --uri http://127.0.0.1:1" in str(result.tracking_failure)


@pytest.mark.parametrize("progress", [True, None])
def test_steps_are_printed_on_request_and_in_notebooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, progress: bool | None
) -> None:
    _export(tmp_path)
    assert capsys.readouterr().err == ""
    if progress is None:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        _export(tmp_path, progress=False)
        assert capsys.readouterr().err == ""
    _export(tmp_path, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    numbers = [line.split(" s")[0].strip().split("/")[0] for line in lines]
    assert [int(number) for number in numbers] == list(range(1, len(lines) + 1))
    assert any("export onnx" in line for line in lines)


@pytest.mark.slow
def test_files_are_measured_on_request(tmp_path: Path) -> None:
    report = _export(tmp_path, bench={"rounds": 2}).bench
    assert report is not None
    assert {figures.artifact.name for figures in report.figures} == {"PyTorch", "onnx"}
    assert repr(report).startswith("Report(PyTorch, onnx; 1 ")
    assert "p50 ms" in report.summary()
    assert "p50 ms" in report._repr_html_()
    assert _export(tmp_path).bench is None


@pytest.mark.slow
def test_rules_and_passes_are_searched_on_request(tmp_path: Path) -> None:
    (outcome,) = _export(tmp_path, tune="20s").tuned
    assert outcome.format == "onnx"
    assert outcome.trials


@pytest.mark.slow
def test_a_tokenizer_goes_into_the_bundle_unchanged(tmp_path: Path) -> None:
    inputs.save_processors(tmp_path)
    tokenizer = BertTokenizerFast.from_pretrained(tmp_path)
    config = BertConfig(**inputs.TINY, num_labels=2, id2label={0: "bad", 1: "good"})
    model = models.randomise(BertForSequenceClassification(config).eval())
    texts = ["the cat sat", "a dog"]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    settings = tokenizer.backend_tokenizer.to_str()
    result = optexport.export(model, batch, tmp_path / "bundle", formats="onnx", effort="quick", tokenizer=tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == settings
    bundle = optexport.Bundle.load(result.output)
    assert bundle.application.labels == ["bad", "good"]
    for name, array in bundle.preprocess(texts).items():
        assert array.tolist() == batch[name].tolist()


def test_names_are_listed_for_completion_and_help_without_torch() -> None:
    code = "import sys, optexport; print(*dir(optexport)); print(optexport.__doc__); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names, *document, imports_torch = run.stdout.splitlines()
    assert {*optexport.__all__, "errors", "exporters", "testing", "transformations"} == set(names.split())
    assert ">>> result = optexport.export(" in "\n".join(document)
    assert imports_torch == "False"


def test_a_rule_may_be_added_to_the_preset() -> None:
    names = [rule.name for rule in name_rules(["preset", optexport.transformations.FuseAttention()])]
    assert names == [*PRESET, "fuse-attention"]
