"""Grad mode and autocast within a model: their regions become part of the graph, with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from optexport.exporters import torchscript
from optexport.runtime import runners
from optexport.tracing.trace import trace
from tests._helpers.models import randomise
from tests.exporters import files

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

BATCH = {"x": {0: "batch"}}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)


class Disabled(Base):
    """Computes a part in its own precision, as rotary embeddings and norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float().reshape(x.shape[0], 2, 2).softmax(-1)
        return y.flatten(1)


class Nested(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.l(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = y.view(-1, 2, 2) @ y.view(-1, 2, 2)
                with torch.enable_grad():
                    y = y @ x.view(-1, 2, 2)
                    with torch.autocast("cpu", enabled=False):
                        z = y.float() @ x.reshape(x.shape[0], 2, 2)
        return y.flatten(1) + z.flatten(1)


class LowPrecision(Base):
    """Calls each kind of operator of autocast: of lower precision, of float32, of the widest dtype, and others."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.l(x)
            pairs = torch.einsum("bi,bj->bij", y, x)
            both = torch.cat([y, x])
            loss = functional.mse_loss(y, x)
            attended = functional.scaled_dot_product_attention(y[None], x[None], y[None])
            y = y.relu_()
        return y, pairs, both, loss, attended


class Loop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(3):
            with torch.set_grad_enabled(step == 1), torch.autocast("cpu", enabled=False):
                x = self.l(x).reshape(-1, 4)
        return x


def _inner_graphs(graph_module: fx.GraphModule) -> list[str]:
    return [
        str(node.target) for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)
    ]


@pytest.mark.parametrize("make", [Disabled, Nested, LowPrecision, Loop])
def test_regions_are_inlined_with_equal_bits(make: type[nn.Module]) -> None:
    model = randomise(make())
    traced = trace(model, {"x": torch.randn(3, 4)}, BATCH)
    assert not _inner_graphs(traced.graph_module)
    for size in (1, 2, 5):
        x = torch.randn(size, 4)
        with torch.no_grad():
            want, got = model(x), traced.graph_module(x)
        for w, g in zip(torch.utils._pytree.tree_leaves(want), torch.utils._pytree.tree_leaves(got), strict=True):
            assert w.dtype == g.dtype
            assert torch.equal(w, g)


@pytest.mark.parametrize("make", [Disabled, Nested, LowPrecision, Loop])
def test_torchscript_of_regions_takes_any_size(make: type[nn.Module], tmp_path: Path) -> None:
    model = randomise(make())
    subject = files.prepare(model, {"x": torch.randn(3, 4)}, BATCH)
    path = tmp_path / "model.pt"
    assert torchscript.save(subject.program, subject.signature, subject.example, path) is None
    run = runners.open_torchscript(path, subject.signature.output_names)
    for size in (1, 2, 5):
        batch = {"x": torch.randn(size, 4)}
        for name, value in files.eager(subject, batch).items():
            torch.testing.assert_close(run(batch)[name], value)


class Attention(Base):
    """Attends in three axes, where ``torch.onnx`` supports only four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        with torch.autocast("cpu", enabled=False):
            causal = functional.scaled_dot_product_attention(y, y, y, is_causal=True)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()
            return causal + functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [None, 23])
def test_onnx_file_of_attention_with_three_axes_in_a_region_is_right(opset: int | None, tmp_path: Path) -> None:
    model = randomise(Attention())
    subject = files.prepare(model, {"x": torch.randn(2, 5, 4)}, {"x": {0: "batch", 1: "steps"}})
    files.save_onnx(subject, tmp_path / "model.onnx", opset=opset)
    files.assert_outputs(subject, tmp_path / "model.onnx", {"x": torch.randn(1, 2, 4)}, {"x": torch.randn(3, 9, 4)})
