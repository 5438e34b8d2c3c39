"""Simplified sizes are equal to the original ones, and let models that pad be traced at every size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._sympy.functions import CeilToInt, FloorDiv, FloorToInt, IntTrueDiv, Max, Min, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from optexport.signature.signature import Dim
from optexport.tracing.size_simplification import simplify
from optexport.tracing.trace import trace

N, M = sympy.symbols("s0 s1", integer=True, positive=True)
RELATIONS = (sympy.Eq, sympy.Ne, sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


def _function(expression: Any) -> Callable[..., Any]:
    text = PythonPrinter().doprint(expression)
    function: Callable[..., Any] = eval(f"lambda s0, s1: {text}", {"math": math})
    return function


def _draw(generator: random.Random, depth: int) -> Any:
    """Returns a random size of two others."""
    if depth == 0 or generator.random() < 0.1:
        return generator.choice([N, M, sympy.Integer(generator.randint(-5, 9))])
    inner, number = _draw(generator, depth - 1), sympy.Integer(generator.randint(2, 6))
    return generator.choice(
        [
            lambda: inner + _draw(generator, depth - 1),
            lambda: inner - _draw(generator, depth - 1),
            lambda: inner * generator.randint(-3, 4),
            lambda: FloorDiv(inner, number),
            lambda: PythonMod(inner, number),
            lambda: CeilToInt(IntTrueDiv(inner, number)),
            lambda: FloorToInt(IntTrueDiv(inner, number)),
            lambda: Max(inner, _draw(generator, depth - 1)),
            lambda: Min(inner, _draw(generator, depth - 1)),
        ]
    )()


@pytest.mark.parametrize("seed", range(3))
def test_simplified_sizes_and_comparisons_are_equal_at_random_sizes(seed: int) -> None:
    generator, changed = random.Random(seed), 0
    for _ in range(150):
        expression = _draw(generator, generator.randint(1, 4))
        if generator.random() < 0.4:
            expression = generator.choice(RELATIONS)(expression, _draw(generator, 2))
        simplified = simplify(expression)
        changed += simplified != expression
        before, after = _function(expression), _function(simplified)
        sizes = [(generator.randint(1, 40), generator.randint(1, 40)) for _ in range(20)]
        assert [before(*pair) for pair in sizes] == [after(*pair) for pair in sizes], (expression, simplified)
    assert changed > 10


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (N + PythonMod(-N, 4), -4 * FloorDiv(-N, 4)),
        (N + PythonMod(4 - PythonMod(N, 4), 4), -4 * FloorDiv(-N, 4)),
        (FloorDiv(N + Max(0, 1 - N - 2 * FloorDiv(-N, 2)) - 3, 2) + 1, -FloorDiv(-N, 2)),
        (-FloorDiv(FloorDiv(-N, 2), 2), -FloorDiv(-N, 4)),
        (Min(N, N + PythonMod(-N, 4)), N),
        (N + PythonMod(-N, 4) >= N, sympy.true),
        (sympy.Eq(FloorDiv(N + PythonMod(-N, 4), 4) * 4, N + PythonMod(-N, 4)), sympy.true),
        (PythonMod(N, 8), PythonMod(N, 8)),
    ],
)
def test_simplification_of(expression: Any, expected: Any) -> None:
    assert simplify(expression) == expected


class SamePadding(nn.Module):
    """Pads before every stride as EfficientNet does."""

    def __init__(self, ceil: Callable[[Any, int], Any], kernels: tuple[int, ...] = (3, 5, 1)) -> None:
        super().__init__()
        self.ceil = ceil
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, kernel, stride=2) for kernel in kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            (kernel, _), pads = conv.kernel_size, []
            for size in reversed(x.shape[-2:]):
                pad = max((self.ceil(size, 2) - 1) * 2 + kernel - size, 0)
                pads += [pad // 2, pad - pad // 2]
            x = conv(F.pad(x, pads)).relu()
        return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("ceil", [lambda n, by: -(-n // by), lambda n, by: math.ceil(n / by)], ids=["floor", "float"])
def test_same_padding_in_three_stages_is_traced_at_every_size(ceil: Callable[[Any, int], Any]) -> None:
    torch.manual_seed(0)
    model = SamePadding(ceil).eval()
    traced = trace(model, {"x": torch.randn(2, 2, 30, 40)}, {"x": {0: "batch", 2: "height", 3: "width"}})
    assert traced.signature.outputs[0].shape == ("batch", 2, "((height + 7)//8)", "((width + 7)//8)")
    for height, width in ((30, 40), (47, 33), (64, 95)):
        batch = torch.randn(1, 2, height, width)
        torch.testing.assert_close(traced.graph_module(batch), model(batch))


class PadAndCut(nn.Module):
    """Pads a text to whole windows, works on these, and cuts the padding."""

    def __init__(self, pad: Callable[[Any], Any], window: int = 4) -> None:
        super().__init__()
        self.pad, self.window, self.linear = pad, window, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        windows = F.pad(x, (0, 0, 0, self.pad(length))).view(batch, -1, self.window, 3)
        windows = self.linear(windows) + windows.mean(2, keepdim=True)
        return windows.reshape(batch, -1, 3)[:, :length]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "pad",
    [lambda n: -n % 4, lambda n: (4 - n % 4) % 4, lambda n: math.ceil(n / 4) * 4 - n, lambda n: -(-n // 4) * 4 - n],
    ids=["negative", "twice", "float", "floor"],
)
@pytest.mark.parametrize("minimum", [1, 5])
def test_padding_to_a_multiple_and_cutting_back(pad: Callable[[Any], Any], minimum: int) -> None:
    torch.manual_seed(0)
    model = PadAndCut(pad).eval()
    dynamic = {"x": {0: "batch", 1: Dim("length", minimum, 40)}}
    traced = trace(model, {"x": torch.randn(2, 10, 3)}, dynamic)
    assert traced.signature.outputs[0].shape == ("batch", "length", 3)
    for length in (5, 8, 11, 40):
        batch = torch.randn(3, length, 3)
        torch.testing.assert_close(traced.graph_module(batch), model(batch))
