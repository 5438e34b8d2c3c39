"""Sizes that a model computes in tensors are traced as expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import TraceError
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program


class Chunks(nn.Module):
    """Computes the number of chunks in a tensor, from sizes alone, like Longformer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[1], 4, rounding_mode="trunc")
        return x[:, : count * 4].view(x.shape[0], count, 4).sum(-1)


class Padded(nn.Module):
    """Computes the padding from a stride in a buffer, like EnCodec's convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stride = nn.Buffer(torch.tensor(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.ceil((x.shape[-1] - self.stride) / self.stride + 1).to(torch.int64)
        extra = frames * self.stride - x.shape[-1]
        if x.shape[-1] <= max(extra, self.stride):
            raise ValueError
        return nn.functional.pad(x, (self.stride - 1, extra)).unfold(-1, 3, 3).amax(-1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", [Chunks, Padded])
def test_size_computed_in_tensors_stays_dynamic(module: type[nn.Module]) -> None:
    model = module().eval()
    traced = trace(model, {"x": torch.randn(3, 14)})
    assert traced.signature.inputs[0].shape[0] == "batch"
    assert isinstance(traced.signature.inputs[0].shape[1], str)
    assert not [
        n for n in traced.graph_module.graph.nodes if "_local_scalar_dense" in str(n.target) or "item" in n.name
    ]
    for length in (8, 13, 15, 16, 17, 40):
        batch = torch.randn(2, length)
        assert torch.equal(traced.graph_module(batch), model(batch)), length


@pytest.mark.slow
def test_buffer_changed_by_the_model_is_not_a_constant() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.tensor(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x[:, : int(self.count)] if self.count > 1 else x

    with pytest.raises(TraceError, match=r"test_scalar_tensors\.py:\d+: return x\[:, : int\(self\.count\)\]"):
        trace(Counting(), {"x": torch.randn(3, 14)})


def test_number_from_input_values_is_not_a_constant() -> None:
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum().long() > 3 else x

    graph_module = trace(Cut(), {"x": torch.randn(3, 14)}).graph_module
    for x in (torch.zeros(2, 14), torch.ones(2, 14)):
        assert torch.equal(graph_module(x), Cut()(x))


class Rounded(nn.Module):
    """Multiplies a fraction that float32 cannot represent: 31 / 7 * 7 is less than 31."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: (torch.tensor(x.shape[0]) / 7 * 7).floor().long().item()]


class Overflowing(nn.Module):
    """Computes a size in a dtype that is too small for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: torch.tensor(x.shape[0]).to(torch.uint8).item()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "size"), [(Rounded(), 31), (Overflowing(), 300)])
def test_overflowing_size_is_computed_as_the_tensor_does(model: nn.Module, size: int) -> None:
    traced = trace(model, {"x": torch.randn(20, 3)})
    x = torch.randn(size, 3)
    assert torch.equal(traced.graph_module(x), model(x))


class Replaced(nn.Module):
    """Overwrites a number that it stored before."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Buffer(torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = (x > 1e5).any().long() + 2
        return x * self.factor.item()


def test_overwritten_number_is_not_a_constant() -> None:
    traced = trace(Replaced(), {"x": torch.randn(3, 4)})
    x = torch.full((2, 4), 1e6)
    assert torch.equal(traced.graph_module(x), x * 3)


class Later(nn.Module):
    """Reads a number and changes it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.count > 10 else x
        self.count.add_(1)
        return x


@pytest.mark.slow
def test_number_changed_after_it_was_read_is_not_a_constant() -> None:
    with pytest.raises(TraceError, match=r"at test_scalar_tensors\.py:\d+: x = x \* 2 if self\.count.* state"):
        trace(Later(), {"x": torch.randn(3, 4)})


def _write_through_an_alias(count: torch.Tensor) -> None:
    count.detach().add_(1)


def _write_an_element(count: torch.Tensor) -> None:
    count[...] = 3


@pytest.mark.parametrize("write", [_write_through_an_alias, _write_an_element, lambda count: count.add_(1)])
def test_number_that_was_overwritten_is_read_again(write: Callable[[torch.Tensor], object]) -> None:
    """The stored value belongs to a version of the tensor, which a write through an alias changes too."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[1], 2, rounding_mode="trunc")
        write(count)
        return x[:, : count.item()]

    model = Program(forward).eval()
    traced = trace(model, {"x": torch.randn(3, 8)})
    x = torch.randn(2, 14)
    assert torch.equal(traced.graph_module(x), model(x))
