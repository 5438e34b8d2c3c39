"""Tests a sample of the zoo, spread over families; `python -m tests.zoo` runs all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optexport.config.schema import FORMATS
from tests.zoo import runner, shrinking, stages, table

# Encoders, decoders, both; a state space; a mixture of experts; images, sounds, time series, and images in texts.
SMALL = ("bert", "llama", "vit", "patchtst")
SAMPLE = (
    *(
        "bailing_hybrid",
        "focalnet",
        "mimi_encoder",
        "sew",
        "bart",
        "clip",
        "convnext",
        "deberta-v2",
        "detr",
        "dinov2",
        "funnel",
        "gemma3",
        "gpt2",
        "jamba",
        "llava",
        "mamba",
    ),
    *("mixtral", "mobilevit", "paligemma", "qwen2_vl", "resnet", "segformer", "swin", "t5", "wav2vec2", "whisper"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", SMALL)
def test_type_is_built_traced_and_its_graph_verified(model_type: str) -> None:
    outcome = stages.judge(model_type, effort="quick", formats=())
    assert set(outcome.stages.values()) == {"done"}, outcome.reasons
    assert outcome.stages.keys() >= {"built", "eager", "traced", "graph"}


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [*SMALL, *SAMPLE])
def test_type_is_verified_in_every_format(model_type: str) -> None:
    outcome = stages.judge(model_type)
    assert table.passed(outcome.as_json()), outcome.reasons
    assert outcome.stages.keys() >= set(FORMATS)


def test_type_is_built_reproducibly_with_random_weights() -> None:
    one, second = (next(shrinking.candidates("bert"))[1]() for _ in range(2))
    assert not one.training
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), second.parameters(), strict=True))
    assert all(len(parameter.unique()) > 1 for parameter in one.parameters())


def test_series_is_short_and_no_noise_is_drawn() -> None:
    assert shrinking.shrunk_config("timesfm2_5", shrinking.SETTINGS[0]).context_length == 512
    vits = shrinking.shrunk_config("vits", shrinking.SETTINGS[0])
    assert (vits.noise_scale, vits.noise_scale_duration) == (0, 0)


def test_spread_order_contains_every_type_once() -> None:
    names = shrinking.model_types()
    assert sorted(runner.spread(names)) == names
    assert len(names) > 600


def test_results_are_read_up_to_a_truncated_line(tmp_path: Path) -> None:
    record = {"model_type": "bert", "stages": {"built": "done"}}
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(record)}\n{json.dumps(record)[:20]}", encoding="utf-8")
    assert runner.read(path) == {"bert": record}
    assert runner.read(tmp_path / "none.jsonl") == {}


def test_table_counts_untried_types_and_shows_failures() -> None:
    done = dict.fromkeys(table.STAGES, "done")
    shared = {"cls": "Net", "nodes": 5, "linears": 1, "rules": {}, "seconds": {}}
    results = {
        "good": {**shared, "model_type": "good", "stages": done, "reasons": {}},
        "bad": {**shared, "model_type": "bad", "stages": {**done, "onnx": "wrong"}, "reasons": {"onnx": "0.3 away"}},
    }
    page = table.table(results, ["bad", "good", "untried"])
    assert "| verified in onnx | 1 | 50.0 % |" in page
    assert "| a result that is wrong | 1 | 50.0 % |" in page
    assert "0.3 away: bad (onnx)" in page
    assert "Not tried yet: 1" in page


@pytest.mark.nightly
def test_runner_ends_a_slow_type_keeps_its_stages_and_continues(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    runner.run(["bert"], results, jobs=1, timeout=0.1)
    (record,) = runner.read(results).values()
    assert "timeout" in record["stages"].values()
    runner.run(["timm_backbone"], results, jobs=1, timeout=100)
    assert runner.read(results)["timm_backbone"]["stages"]["built"] == "not built"
