"""A config that asks for more weights than its files can hold is refused before they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.file import ModelConfig
from optexport.errors import SourceError
from optexport.sources import loading
from tests import models
from tests.exports import edit_json


@pytest.mark.parametrize("task", [None, "fill-mask"])
def test_a_config_of_more_weights_than_fit_into_memory_is_refused_at_once(tmp_path: Path, task: str | None) -> None:
    """The missing ones were filled with random numbers until no memory was left, and only then found missing."""
    models.model("bert").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda settings: settings.update(vocab_size=10**11))
    with pytest.raises(SourceError, match=r"asks for [\d,]{15,} weights, and all files beside it are [\d,]+ bytes"):
        loading.load(ModelConfig(source=str(tmp_path), task=task), tmp_path)


def test_a_few_weights_that_are_missing_are_told_by_name(tmp_path: Path) -> None:
    models.model("bert").save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="weights are not in the checkpoint, cls.predictions"):
        loading.load(ModelConfig(source=str(tmp_path), task="fill-mask"), tmp_path)
