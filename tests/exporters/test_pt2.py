"""Tests of ``.pt2`` files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from optexport.exporters import pt2
from optexport.runtime import runners
from optexport.signature.signature import Dim
from tests._helpers.exports import quick
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files

X = torch.linspace(-2, 2, 12).reshape(3, 4)
BATCH = {"x": {0: Dim("batch", 1, 32)}}


class Nothing(nn.Module):
    """Takes an input that it does not read."""

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", files.NAMES)
def test_file_gives_the_outputs_of_the_model_at_any_size(name: str) -> None:
    run = runners.open_pt2(files.pt2_file(name), files.prepared(name).signature.output_names)
    files.assert_agrees(name, run, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5"])
def test_file_loads_without_transformers_and_gives_a_tuple(name: str, tmp_path: Path) -> None:
    subject = files.prepared(name)
    batch = dict(list(files.batches(name))[-1][1])
    got = files.run_without_transformers(files.pt2_file(name), batch, "torch.export.load(path).module()", tmp_path)
    for value, want in zip(got, files.eager(subject, batch).values(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["albert", "t5", "resnet"])
def test_inputs_and_dimensions_keep_their_names(name: str) -> None:
    subject = files.prepared(name)
    loaded = torch.export.load(files.pt2_file(name))
    _, keywords = pytree.tree_unflatten(list(range(loaded.call_spec.in_spec.num_leaves)), loaded.call_spec.in_spec)
    assert list(keywords) == [spec.name for spec in subject.signature.inputs]
    dynamic = sum(isinstance(size, str) for spec in subject.signature.inputs for size in spec.shape)
    free = [
        size
        for node in loaded.graph.find_nodes(op="placeholder")
        if node.name in loaded.graph_signature.user_inputs
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    ]
    assert len(free) == dynamic


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["albert", "resnet"])
def test_file_refuses_a_size_outside_the_declared_range(name: str) -> None:
    module = torch.export.load(files.pt2_file(name)).module()
    _, batch = next(iter(files.batches(name)))
    large = {key: value.repeat(17, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    with pytest.raises((RuntimeError, AssertionError)):
        module(**large)


@pytest.mark.slow
def test_unread_input_stays_in_the_signature(tmp_path: Path) -> None:
    both = {"x": X, "unread": torch.ones(3, 2)}
    subject = files.prepare(Nothing(), both, {"x": {0: "batch"}, "unread": {0: "batch"}})
    pt2.save(subject.program, tmp_path / "model.pt2")
    run = runners.open_pt2(tmp_path / "model.pt2", ["output"])
    assert torch.equal(run({"x": X + 1, "unread": torch.zeros(3, 2)})["output"], (X + 1).relu())


@pytest.mark.slow
def test_the_file_holds_no_sample_inputs(tmp_path: Path) -> None:
    subject = files.prepare(randomise(nn.Linear(4, 4)), {"input": torch.full((3, 4), 1234.5)}, {"input": BATCH["x"]})
    pt2.save(subject.program, tmp_path / "model.pt2")
    sample = torch.full((3, 4), 1234.5).numpy().tobytes()
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        assert all(sample not in archive.read(info) for info in archive.infolist())
    assert torch.export.load(tmp_path / "model.pt2").example_inputs is None
    assert subject.program.example_inputs is not None


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    subject = files.prepare(randomise(Tied()), {"x": torch.randn(3, 64)}, BATCH)
    pt2.save(subject.program, tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        weights = [info for info in archive.infolist() if "/weight_" in info.filename]
    assert [info.file_size for info in weights] == [64 * 64 * 4]


@pytest.mark.slow
def test_weight_names_may_contain_special_characters(tmp_path: Path) -> None:
    """Graph networks name edges like this, and such a file could not be opened."""
    kinds = nn.ModuleDict({"<author___writes>": nn.Linear(4, 4), "für": nn.BatchNorm1d(4)})
    model = Program(lambda m, x: m.kinds["für"](m.kinds["<author___writes>"](x)), kinds=kinds)
    result = quick(model, {"x": torch.randn(3, 4)}, tmp_path / "out")
    assert result.passed
