"""Tests that errors of a run name the config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.error_locations import naming_config
from optexport.errors import SourceError


@pytest.mark.parametrize(
    ("location", "is_key"),
    [
        ("model.source: python:nets:load", True),
        ("inputs: y", True),
        ("inputs", True),
        ("transformations[0]", True),
        ("parity.metrics.argmax_agreement", True),
        ("model.onnx", False),
        ("export.toml: model.source", False),
        ("inputs/data.npz", False),
        ("model-a/config.json", False),
        ("Net", False),
        (None, False),
    ],
)
def test_a_key_is_located_in_the_config(location: str | None, is_key: bool) -> None:
    with pytest.raises(SourceError) as caught, naming_config(Path("export.toml")):
        raise SourceError("wrong", location=location)
    assert caught.value.location == (f"export.toml: {location}" if is_key else location)
    assert str(caught.value) == (f"{caught.value.location}: wrong" if location else "wrong")
