"""The line that fixes a dynamic size decides what a refusal advises."""

from __future__ import annotations

import pytest

from optexport.tracing.shapes.fixed_sizes import choose_hint


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("model.py:7: rows = int(x.shape[0])", "Use the size itself instead of int(size)"),
        ("einx.py:60: return tuple(int(n) for n in x.shape)", "einops instead of einx"),
        ("model.py:7: for step in x.unbind(1):", "nn.LSTM for nn.LSTMCell"),
        ("model.py:7: return x * max(1.0, math.log(n))", "torch.clamp for max"),
        ("model.py:7: return x + self.table", "Narrow the range."),
        (None, "Narrow the range."),
    ],
)
def test_hint_follows_the_line(line: str | None, advice: str) -> None:
    assert advice in choose_hint(line, "Narrow the range.")
