"""Tests of inputs that are generated from a ``.pt2`` program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from optexport.cli.main import cli
from optexport.inputs.random_inputs import program_inputs
from optexport.runtime.untrusted.archives import load_pt2
from tests._helpers.models import randomise


class Looks(nn.Module):
    """Adds two embeddings, applies a mask and adds a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.linear = nn.Embedding(30, 4), nn.Embedding(1, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total = (self.words(ids) + self.kinds(kinds)) * mask[..., None]
        return self.linear(total.sum(1) / mask.sum(1, keepdim=True)) + x


def batch(size: int, sequence: int = 7) -> dict[str, torch.Tensor]:
    ones = torch.ones(size, sequence, dtype=torch.int64)
    return {"ids": 3 * ones, "kinds": 0 * ones, "mask": ones, "x": torch.full((size, 4), 0.5)}


def saved(
    path: Path, size: int = 3, *, dynamic: bool = True, by_name: bool = True, examples: bool = False
) -> nn.Module:
    """Saves a program, with or without its example inputs, and returns its model."""
    model, inputs = randomise(Looks()), batch(size)
    axes: Any = {"x": {0: torch.export.Dim("rows", max=9)}} if dynamic else {"x": None}
    first = axes["x"] and {**axes["x"], 1: torch.export.Dim("words", min=2, max=40)}
    shapes = {**dict.fromkeys(("ids", "kinds", "mask"), first), **axes}
    arguments = {"args": (), "kwargs": inputs} if by_name else {"args": tuple(inputs.values())}
    program = torch.export.export(model, dynamic_shapes=shapes, **arguments)
    if not examples:
        program._example_inputs = None
    torch.export.save(program, path)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("examples", [False, True])
def test_inputs_match_the_program_and_fit_its_embeddings(by_name: bool, examples: bool, tmp_path: Path) -> None:
    model = saved(tmp_path / "model.pt2", by_name=by_name, examples=examples)
    inputs = program_inputs(load_pt2(tmp_path / "model.pt2"), 0)
    expected = batch(3)
    assert {k: (v.dtype, v.shape) for k, v in inputs.items()} == {k: (v.dtype, v.shape) for k, v in expected.items()}
    assert all(torch.equal(inputs[name], expected[name]) for name in expected) is examples
    assert model(**inputs).isfinite().all()
    if not examples:
        assert 1 < inputs["ids"].max() < 30
        assert not inputs["kinds"].any()
        assert set(inputs["mask"].unique().tolist()) == {0, 1}
        assert inputs["mask"].any(1).all()


def test_seed_determines_the_inputs(tmp_path: Path) -> None:
    saved(tmp_path / "model.pt2")
    program = load_pt2(tmp_path / "model.pt2")
    first, same, other_seed = (program_inputs(program, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["ids"], other_seed["ids"])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_run_on_a_pt2_file_needs_no_inputs_in_the_config(dynamic: bool, tmp_path: Path) -> None:
    """A static program with a batch of one is accepted too."""
    saved(tmp_path / "model.pt2", 3 if dynamic else 1, dynamic=dynamic)
    config = tmp_path / "mine.toml"
    config.write_text('[model]\nsource = "model.pt2"\n[export]\nformats = ["pt2"]\n[tracking]\nenabled = false\n')
    result = CliRunner().invoke(cli, ["run", str(config)])
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "build" / "model" / "manifest.json").read_bytes())
    shapes = {spec["name"]: spec["shape"] for spec in manifest["inputs"]}
    assert shapes["x"] == (["batch", 4] if dynamic else [1, 4])
    assert isinstance(shapes["ids"][1], str) is dynamic
    assert [dim["max"] for dim in manifest["dims"].values()] == ([9, 40] if dynamic else [])
