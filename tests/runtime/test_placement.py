"""Moving to a device moves everything, and changes nothing if it is there already.

Tensors of the device "meta" have no numbers. It replaces a CUDA device on other machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from optexport.exporters import graph_export, pt2, torchscript
from optexport.runtime import placement, runners
from tests.exporters import files

META: Any = "meta"
aten = torch.ops.aten


def program(name: str) -> torch.export.ExportedProgram:
    """Returns a new program, because moving changes it."""
    subject = files.prepared(name)
    return graph_export.to_program(subject.flat, subject.signature, subject.example)


@pytest.mark.slow
def test_program_on_its_device_stays_the_same_to_the_byte(tmp_path: Path) -> None:
    name = "llama"
    subject, its = files.prepared(name), program(name)
    path, names = tmp_path / "model.pt2", subject.signature.output_names
    pt2.save(its, path)
    before = path.read_bytes()
    moved = placement.move_program(its, "cpu")
    pt2.save(moved, path)
    assert path.read_bytes() == before
    files.assert_agrees(name, runners.open_pt2(path, names), 5e-6)
    assert torchscript.save(moved, subject.signature, subject.example, tmp_path / "model.pt") is None
    files.assert_agrees(name, runners.open_torchscript(tmp_path / "model.pt", names), 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_weights_constants_and_graph_devices_are_moved(name: str) -> None:
    its = program(name)
    assert "cpu" in str(its.graph)
    weights = dict(its.state_dict)
    moved = placement.move_program(its, META)
    assert "cpu" not in str(moved.graph)
    assert {tensor.device.type for tensor in (*moved.state_dict.values(), *moved.constants.values())} == {"meta"}
    values = [node.meta.get("val") for node in moved.graph.nodes]
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"meta"}
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}


@pytest.mark.slow
def test_program_runs_on_the_new_device() -> None:
    subject, moved = files.prepared("llama"), placement.move_program(program("llama"), META)
    inputs = {name: tensor.to("meta") for name, tensor in subject.example.items()}
    (result, *_) = moved.module(check_guards=False)(**inputs)
    assert result.device.type == "meta"


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.targets = nn.Embedding(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., None] + self.targets(torch.arange(x.shape[1], device=x.device))


def test_copy_of_a_model_moves_and_the_model_stays() -> None:
    model = Places()
    moved = placement.move_model(model, META)
    assert moved(torch.zeros(2, 3, device="meta")).device.type == "meta"
    assert model(torch.zeros(2, 3)).device.type == "cpu"


@pytest.mark.slow
def test_graph_that_names_a_device_is_moved_too() -> None:
    graph_module = torch.export.export(Places(), (torch.zeros(2, 3),)).module()
    assert isinstance(graph_module, fx.GraphModule)
    assert "device(type='cpu')" in graph_module.code
    moved = placement.move_model(graph_module, META)
    assert moved(torch.zeros(2, 3, device="meta")).device.type == "meta"
    assert graph_module(torch.zeros(2, 3)).device.type == "cpu"
