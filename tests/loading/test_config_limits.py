"""A config that asks for more layers than can be made is refused before they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optexport.config.schema import ModelConfig
from optexport.errors import SourceError
from optexport.loading import config_limits, loader
from tests._helpers import models
from tests._helpers.exports import edit_json


def test_a_config_of_more_layers_than_can_be_made_is_refused_at_once(tmp_path: Path) -> None:
    models.model("bert").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda settings: settings.update(num_hidden_layers=10**8))
    with pytest.raises(SourceError, match=r"num_hidden_layers is 100,000,000, and no model has more than 4,096 layers"):
        loader.load(ModelConfig(source=str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"depths": [2, 10**5]}, {"text_config": {"n_layer": 10**5}}, {"encoder_layers": 1e9}, {"num_labels": 10**8}],
    ids=str,
)
def test_the_layers_of_each_part_are_counted(tmp_path: Path, settings: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SourceError, match="no model has more than"):
        config_limits.check(str(tmp_path), {})


def test_the_layers_of_a_part_in_a_folder_of_its_own_are_counted(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "config.json").write_text('{"num_hidden_layers": 100000}')
    with pytest.raises(SourceError, match="0_Transformer"):
        config_limits.check(str(tmp_path), {})


def test_numbers_of_other_things_may_be_as_large_as_they_are(tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 126, "vocab_size": 10**6, "depth_multiplier": 1e9, "layer_types": ["full"] * 126}
    settings |= {"num_labels": 10**6}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config_limits.check(str(tmp_path), {})
