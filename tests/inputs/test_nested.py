"""Tests of nested inputs and constants with flat names in a config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from optexport.bundle import digests
from optexport.cli.main import cli
from optexport.errors import ConfigError
from optexport.signature.arguments import find_arguments, flat_inputs
from optexport.signature.signature import as_arguments
from tests._helpers.models import randomise
from tests.tracing.test_any_module import Features, called, features


def test_flat_names_are_mapped_to_nested_arguments() -> None:
    model = randomise(Features())
    arguments = find_arguments(model, ["features.image.x", "features.bias", "weights.0", "weights.1"], {})
    assert arguments is not None
    tensors, _ = flat_inputs(Features(), features(2))
    args, kwargs = arguments.fill(as_arguments(tensors))
    want, got = (
        called(model, features(2)),
        called(model, {**dict(zip(("features", "weights"), args, strict=False)), **kwargs}),
    )
    assert all(torch.equal(got[name], value) for name, value in want.items())
    for names, message in [
        (["weights.0", "weights.2"], r"weights\.1 is missing"),
        (["weights", "weights.0"], "the name conflicts with another input"),
        (["weights"], "inputs: features: the input is missing"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_arguments(Features(), ["x.0", *names] if names == ["weights"] else ["features.bias", *names], {})


FACTORY = """
from torch import nn

class States(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x, states, features=None, double=False):
        h, c = self.cell(x, states)
        return {"h": h * 2 if double else h, "c": c + features["bias"]}
"""


@pytest.mark.slow
def test_config_gives_nested_inputs_and_constants_by_flat_names(tmp_path: Path) -> None:
    (tmp_path / "nested_factory.py").write_text(FACTORY)
    config = tmp_path / "mine.toml"
    config.write_text(
        '[model]\nsource = "python:nested_factory:States"\n[export]\nformats = ["onnx", "pt2"]\noutput = "out"\n'
        '[inputs.tensors.x]\nshape = ["batch", 4]\n[inputs.tensors."features.bias"]\nshape = [3]\n'
        '[inputs.tensors."states.0"]\nshape = ["batch", 3]\n[inputs.tensors."states.1"]\nshape = ["batch", 3]\n'
        "[inputs.constants]\ndouble = true\n[inputs.dynamic]\nbatch = [1, 9]\n[tracking]\nenabled = false\n"
    )
    try:
        result = CliRunner().invoke(cli, ["run", str(config)])
    finally:
        sys.modules.pop("nested_factory", None)
    assert result.exit_code == 0, result.output
    manifest = digests.read_manifest(tmp_path / "out")
    assert {spec.name: spec.shape for spec in manifest.inputs} == {
        "x": ["batch", 4], "features.bias": [3], "states.0": ["batch", 3], "states.1": ["batch", 3],
    }  # fmt: skip
    assert manifest.constants == {"double": True}
    assert manifest.dims["batch"].max == 9
