"""Axes whose sizes must be multiples: declared, or found by the trace, and correct at other multiples."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._sympy.functions import Mod

from optexport.errors import TraceError
from optexport.signature.signature import Dim
from optexport.tracing.shapes.range_limits import find_multiples
from optexport.tracing.trace import Traced, trace


class UNet(nn.Module):
    """Halves an image twice, and concatenates the halves with what it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(4, 2, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for conv in self.down[:-1]:
            x = conv(x).relu()
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for conv in self.up:
            x = conv(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x


class Windows(nn.Module):
    """Attends inside windows of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.linear(x).view(batch, length // 8, 8, 3 * width).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value).reshape(batch, length, width)


class Blocks(nn.Module):
    """Reads blocks of 2 by 4 pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        return x.reshape(batch, channels, height // 2, 2, width // 4, 4).amax((3, 5))


class Patches(nn.Module):
    """Reads whole patches and ignores the rest of an image, so that every size is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(2).mean(2)


class PadsIfNecessary(nn.Module):
    """Takes another branch at sizes that are not multiples of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 4:
            x = F.pad(x, (0, 4 - x.shape[1] % 4), value=1.0)
        return x.view(x.shape[0], -1, 4).sum(2)


def multiples(traced: Traced) -> dict[str, int]:
    return {name: dim.multiple_of for name, dim in traced.signature.dims.items()}


def check(model: nn.Module, traced: Traced, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        batch = torch.randn(shape)
        torch.testing.assert_close(traced.graph_module(batch), model(batch))


CASES: dict[str, tuple[nn.Module, tuple[int, ...], dict[int, str], dict[str, int], list[tuple[int, ...]]]] = {
    "U-Net": (
        UNet(),
        (2, 2, 16, 24),
        {0: "batch", 2: "height", 3: "width"},
        {"batch": 1, "height": 4, "width": 4},
        [(1, 2, 36, 20), (3, 2, 8, 64)],
    ),
    "windows": (Windows(), (2, 24, 2), {0: "batch", 1: "length"}, {"batch": 1, "length": 8}, [(1, 40, 2), (2, 16, 2)]),
    "two multiples": (
        Blocks(),
        (2, 2, 8, 16),
        {0: "batch", 2: "height", 3: "width"},
        {"batch": 1, "height": 2, "width": 4},
        [(1, 2, 10, 12), (2, 2, 6, 28)],
    ),
    "patches": (
        Patches(),
        (2, 2, 16, 24),
        {0: "batch", 2: "height", 3: "width"},
        {"batch": 1, "height": 1, "width": 1},
        [(1, 2, 17, 33)],
    ),
    "branch": (PadsIfNecessary(), (2, 8), {0: "batch", 1: "length"}, {"batch": 1, "length": 4}, [(1, 12), (3, 20)]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_multiple_is_found_if_no_range_is_declared(name: str) -> None:
    torch.manual_seed(0)
    model, shape, axes, expected, other_shapes = CASES[name]
    traced = trace(model.eval(), {"x": torch.randn(shape)}, {"x": axes})
    assert multiples(traced) == expected
    for sizes in traced.suspect_sizes:
        assert all(size in traced.signature.dims[name] for name, size in sizes.items())
    check(model, traced, *other_shapes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in CASES if name != "patches"])
def test_declared_multiple_leaves_no_suspect_size_between(name: str) -> None:
    torch.manual_seed(0)
    model, shape, axes, expected, other_shapes = CASES[name]
    dynamic: dict[int, Any] = {
        axis: Dim(name, expected[name], 32 * expected[name], expected[name]) for axis, name in axes.items()
    }
    traced = trace(model.eval(), {"x": torch.randn(shape)}, {"x": dynamic})
    assert traced.signature.dims == {dim.name: dim for dim in dynamic.values()}
    for sizes in traced.suspect_sizes:
        assert all(size in traced.signature.dims[name] for name, size in sizes.items())
    check(model, traced, *other_shapes)


class AddsToOthers(nn.Module):
    """Computes something else at sizes that are no multiples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[1] % 4 else x


def test_branch_on_a_multiple_in_a_declared_range_is_refused_with_the_multiple() -> None:
    with pytest.raises(TraceError, match=r"is valid only if Eq\(Mod\(n, 4\), 0\)") as caught:
        trace(AddsToOthers(), {"x": torch.randn(2, 8)}, {"x": {0: "batch", 1: Dim("n", 4, 40)}})
    assert caught.value.hint == "Declare multiple_of = 4 for n, or trace with another size."


class BranchesOnArea(nn.Module):
    """Takes another branch at images that no run can try."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.shape[2] * x.shape[3] < 40_000_000 else x.amax((2, 3))


def test_undeclared_range_ends_at_a_size_that_can_be_tried() -> None:
    traced = trace(BranchesOnArea(), {"x": torch.randn(2, 3, 16, 16)})
    height, width = (traced.signature.dims[name].max for name in ("x_2", "x_3"))
    assert height is not None
    assert width is not None
    assert height * width < 40_000_000
    assert min(height, width) >= 1024
    assert traced.signature.dims["x_2"].has_assumed_max
    assert traced.suspect_sizes == ()


class TwoGrids(nn.Module):
    """Reads a text in groups of 4, and of 6 by a branch that is found later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.shape[0], -1, 4).flatten(1)
        if x.shape[1] % 6 != 0:
            return x.sum(1)
        return x.view(x.shape[0], -1, 6).amax((1, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [24, 36])
def test_multiples_that_are_found_one_after_the_other_are_combined(size: int) -> None:
    model = TwoGrids()
    traced = trace(model, {"x": torch.randn(2, size)})
    assert traced.signature.dims["x_1"].multiple_of == 12
    check(model, traced, (3, 48), (2, 60))


def test_multiple_is_combined_with_the_one_known_before() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    dims = {"n": Dim("n", 4, None, 4)}
    for needed, size, combined in ((6, 24, 12), (9, 36, 36)):
        assert find_multiples([sympy.Eq(Mod(n, needed), 0)], dims, {"n": size}) == {"n": combined}
