"""Tests that a config with too many layers, labels or weights is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch

from optexport.config.schema import ModelConfig
from optexport.errors import SourceError
from optexport.loading import config_limits, loader
from tests._helpers import models
from tests._helpers.exports import edit_json


def test_too_many_layers_are_refused(tmp_path: Path) -> None:
    models.model("bert").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda settings: settings.update(num_hidden_layers=10**8))
    with pytest.raises(SourceError, match=r"expected at most 4,096 layers, found num_hidden_layers = 100,000,000"):
        loader.load(ModelConfig(source=str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"depths": [2, 10**5]}, {"text_config": {"n_layer": 10**5}}, {"encoder_layers": 1e9}, {"num_labels": 10**8}],
    ids=str,
)
def test_layers_of_every_part_are_counted(tmp_path: Path, settings: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SourceError, match="expected at most"):
        config_limits.check_counts(str(tmp_path), {})


def test_layers_of_a_part_in_its_own_folder_are_counted(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "config.json").write_text('{"num_hidden_layers": 100000}')
    with pytest.raises(SourceError, match="0_Transformer"):
        config_limits.check_counts(str(tmp_path), {})


def test_other_large_numbers_pass(tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 126, "vocab_size": 10**6, "depth_multiplier": 1e9, "layer_types": ["full"] * 126}
    settings |= {"num_labels": 10**6}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config_limits.check_counts(str(tmp_path), {})


@pytest.mark.parametrize("task", [None, "fill-mask"])
def test_too_many_weights_are_refused(tmp_path: Path, task: str | None) -> None:
    """transformers filled the memory with random weights before it reported them missing."""
    models.model("bert").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda settings: settings.update(vocab_size=10**11))
    with pytest.raises(
        SourceError, match=r"needs [\d,]{15,} weights, but the files of the folder have only [\d,]+ bytes"
    ):
        loader.load(ModelConfig(source=str(tmp_path), task=task), tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    models.model("bert").save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="weights are missing in the checkpoint, such as cls.predictions"):
        loader.load(ModelConfig(source=str(tmp_path), task="fill-mask"), tmp_path)


@pytest.mark.parametrize("part", ["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors"])
def test_index_with_weights_outside_the_folder_is_refused(tmp_path: Path, part: str) -> None:
    """An untrusted folder could otherwise export weights of this machine as its own."""
    folder = tmp_path / "model"
    models.model("bert").save_pretrained(folder)
    keys = safetensors.torch.load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(SourceError, match="is outside of the model's folder"):
        loader.load(ModelConfig(source=str(folder)), tmp_path)
