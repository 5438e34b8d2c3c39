"""Models that enable gradients for a part of their computation, for example for forces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import export
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program


def _in_part(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        y = m.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            z = y + 1
        return y, z


def _for_all(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(True)
    return torch.relu(m.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_in_part, _for_all])
def test_values_computed_with_gradients_go_into_every_file(forward: Any, tmp_path: Path) -> None:
    """torch.onnx failed with an index that is out of range."""
    model, x = Program(forward, linear=nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    result = export(model, {"x": x}, tmp_path / "out", dynamic={"x": {0: Dim("batch", 1, 8)}})
    assert result.passed
    graph = trace(model, {"x": x}).graph_module.graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_module"] == ["linear"]
