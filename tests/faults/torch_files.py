"""Mistakes of the exporters for TorchScript and ``.pt2``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests._helpers import exports
from tests.faults.catalogue import exporter
from tests.faults.subjects import subject

# --- TorchScript ---


class _Tuple(nn.Module):
    """A block with the tuple outputs of a TorchScript file."""

    def __init__(self, block: nn.Module, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.block, self.change = block, change

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.block(x, mask)
        hidden = outputs["hidden"] if self.change is None else self.change(outputs["hidden"])
        return hidden, outputs["longest"]


def _write(path: Path, change: Callable[[torch.jit.ScriptModule], None]) -> None:
    module = torch.jit.load(path)
    with torch.no_grad():
        change(module)
    module.save(path)


def _weight(module: torch.jit.ScriptModule, name: str) -> torch.Tensor:
    return dict(module.state_dict())[name]


@exporter("torchscript", by=1e-2)
@exporter("torchscript", by=1e-4)
def one_number_of_the_script_is_edited(path: Path, by: float) -> None:
    def change(module: torch.jit.ScriptModule) -> None:
        _weight(module, "up.weight")[0, 0] += by

    _write(path, change)


@exporter("torchscript")
def the_script_is_of_another_model(path: Path) -> None:
    """The architecture is the same, so all shapes fit."""

    def change(module: torch.jit.ScriptModule) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    _write(path, change)


@exporter("torchscript")
def the_script_holds_a_checkpoint_of_one_step_earlier(path: Path) -> None:
    def change(module: torch.jit.ScriptModule) -> None:
        for parameter in module.parameters():
            parameter.mul_(1 - 1e-4)

    _write(path, change)


@exporter("torchscript", "bert", name="encoder.layer.1.output.dense.weight")
def a_weight_of_the_script_is_rounded_to_half(path: Path, name: str) -> None:
    _write(path, lambda module: _weight(module, name).copy_(_weight(module, name).half()))


@exporter("torchscript", size="batch")
@exporter("torchscript", size="sequence")
def the_script_is_a_trace_that_holds_a_size(path: Path, size: str) -> None:
    """``torch.jit.trace`` gives such files for many models. They are right at one size only."""
    length = {"batch": (2, 1, 1), "sequence": (1, 5, 1)}[size]
    inputs = subject("block").inputs
    module = _Tuple(exports.block(), lambda hidden: hidden * torch.ones(length))
    torch.jit.trace(module, example_kwarg_inputs=inputs, check_trace=False).save(path)


@exporter("torchscript")
def the_script_returns_its_outputs_in_another_order(path: Path) -> None:
    class Swapped(_Tuple):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, longest = super().forward(x, mask)
            return longest, hidden

    module = Swapped(exports.block())
    torch.jit.trace(module, example_kwarg_inputs=subject("block").inputs, check_trace=False).save(path)


# --- .pt2 ---


@exporter("pt2", index=0)
@exporter("pt2", index=4)
def a_weight_of_the_program_is_zero(path: Path, index: int) -> None:
    """The weights of queries and values. The bias of the keys would have no effect."""
    exports.rezip(path, lambda name, old: bytes(len(old)) if name.endswith(f"data/weights/weight_{index}") else old)


def _weights(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    def part(name: str, old: bytes) -> bytes:
        if not name.rpartition("/")[2].startswith("weight_"):
            return old
        return change(np.frombuffer(old, np.float32).copy()).astype(np.float32).tobytes()

    exports.rezip(path, part)


@exporter("pt2")
def the_program_is_rounded_to_half(path: Path) -> None:
    _weights(path, lambda values: values.astype(np.float16))


@exporter("pt2")
def one_number_of_the_program_is_edited(path: Path) -> None:
    def change(values: np.ndarray) -> np.ndarray:
        values[-1] += 1e-4
        return values

    _weights(path, change)


@exporter("pt2", size="batch")
@exporter("pt2", size="sequence")
def the_program_takes_the_traced_size_only(path: Path, size: str) -> None:
    dynamic = {"batch": {1: "sequence"}, "sequence": {0: "batch"}}[size]
    shapes = {name: dict.fromkeys(dynamic, torch.export.Dim.AUTO) for name in ("x", "mask")}
    inputs = subject("block").inputs
    program = torch.export.export(_Tuple(exports.block()), (), kwargs=inputs, dynamic_shapes=shapes)
    torch.export.save(program, path)


@exporter("pt2")
def the_program_is_of_the_model_before_it_was_trained(path: Path) -> None:
    before = exports.block()
    with torch.no_grad():
        before.get_parameter("up.weight").add_(0.01)
    shapes = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in ("x", "mask")}
    program = torch.export.export(_Tuple(before), (), kwargs=subject("block").inputs, dynamic_shapes=shapes)
    torch.export.save(program, path)
