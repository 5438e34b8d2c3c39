"""Exports of models that call ``torch.cond``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport import Bundle, export


class Conditional(nn.Module):
    """Calls ``torch.cond``, which compiles itself outside of an export."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: self.right(y), (x,))
        return result


@pytest.mark.slow
def test_model_with_a_conditional_operator_is_exported(tmp_path: Path) -> None:
    model, x = Conditional().eval(), torch.randn(3, 4)
    result = export(model, {"x": x}, tmp_path / "out", dynamic={"x": {0: "batch"}})
    for file_format in result.files:
        bundle = Bundle.load(result.output, file_format)
        for other in (torch.rand(5, 4), -torch.rand(2, 4)):
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                expected = model(other)
            torch.testing.assert_close(torch.from_numpy(bundle(x=other)["output"]), expected)
