"""A config that asks for more weights than its files can hold is refused before they are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch

from optexport.config.schema import ModelConfig
from optexport.errors import SourceError
from optexport.loading import loader
from tests._helpers import models
from tests._helpers.exports import edit_json


@pytest.mark.parametrize("task", [None, "fill-mask"])
def test_a_config_of_more_weights_than_fit_into_memory_is_refused_at_once(tmp_path: Path, task: str | None) -> None:
    """The missing ones were filled with random numbers until no memory was left, and only then found missing."""
    models.model("bert").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda settings: settings.update(vocab_size=10**11))
    with pytest.raises(SourceError, match=r"asks for [\d,]{15,} weights, and all files beside it are [\d,]+ bytes"):
        loader.load(ModelConfig(source=str(tmp_path), task=task), tmp_path)


def test_a_few_weights_that_are_missing_are_told_by_name(tmp_path: Path) -> None:
    models.model("bert").save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="weights are not in the checkpoint, cls.predictions"):
        loader.load(ModelConfig(source=str(tmp_path), task="fill-mask"), tmp_path)


@pytest.mark.parametrize("part", ["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors"])
def test_weights_that_an_index_has_lie_outside_of_the_folder_are_refused(tmp_path: Path, part: str) -> None:
    """A folder of somebody else's had weights of this machine exported as its own."""
    folder = tmp_path / "model"
    models.model("bert").save_pretrained(folder)
    keys = safetensors.torch.load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(SourceError, match="lies outside of the model's folder"):
        loader.load(ModelConfig(source=str(folder)), tmp_path)
