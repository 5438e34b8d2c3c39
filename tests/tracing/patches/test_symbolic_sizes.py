"""Functions of torch that a trace replaces take their arguments by the names that torch gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from optexport.api import symbolic_trace
from optexport.signature.signature import Dim, Dynamic
from optexport.testing import outputs
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program

Function = Callable[[object, torch.Tensor], torch.Tensor]


def window(m: object, x: torch.Tensor) -> torch.Tensor:
    return x * torch.hann_window(window_length=4)


def distances(m: object, x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x1=x, x2=x)


def converted(m: object, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(data=x) * 2


def signal(m: object, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.stft(x.flatten(), n_fft=4, window=torch.ones(4), return_complex=True)
    return torch.istft(input=spectrum, n_fft=4, window=torch.ones(4), length=x.numel())


def spaced(m: object, x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] + torch.linspace(start=0, end=1, steps=x.shape[0])


@pytest.mark.parametrize("function", [window, distances, converted, signal, spaced])
def test_arguments_may_be_named(function: Function) -> None:
    model = Program(function).eval()
    traced = trace(model, {"x": torch.randn(6, 4)}, {"x": {0: "rows"}})
    assert not traced.is_strict
    x = torch.randn(9, 4)
    torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.parametrize(
    "take",
    [
        lambda m, x: torch.take_along_dim(x, x.argsort(2), dim=2),
        lambda m, x: x.take_along_dim(indices=x.argmax(-1, keepdim=True), dim=-1),
        lambda m, x: x.take_along_dim(x.reshape(-1).argsort()),
        lambda m, x: torch.take_along_dim(x[:1], x.argsort(1), 1),
    ],
)
def test_values_are_taken_along_axes_of_any_size(take: Function) -> None:
    model = Program(take).eval()
    traced = trace(model, {"x": torch.randn(2, 5, 4)}, {"x": {0: "batch", 1: "rows", 2: "columns"}})
    for sizes in ((3, 7, 5), (1, 2, 9)):
        x = torch.randn(sizes)
        torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("sizes", [[(2, 3, 8, 9), (1, 3, 6, 20), (3, 3, 1, 2)], [(2, 3, 4, 5, 6), (1, 3, 6, 3, 8)]])
def test_grids_have_any_size(sizes: list[tuple[int, ...]], align_corners: bool) -> None:
    axes = len(sizes[0]) - 2

    def warp(m: object, x: torch.Tensor) -> torch.Tensor:
        theta = 0.5 * torch.eye(axes, axes + 1) + 0.1 * x.flatten(2).mean(2).repeat(1, axes + 1)[:, None, : axes + 1]
        grid = functional.affine_grid(theta, list(x.shape), align_corners=align_corners)
        return functional.grid_sample(x, grid, align_corners=align_corners)

    model = Program(warp).eval()
    dynamic: Dynamic = {"x": {0: "batch", **{axis: Dim(f"size_{axis}", 1, 64) for axis in range(2, axes + 2)}}}
    traced = trace(model, {"x": torch.randn(sizes[0])}, dynamic)
    for shape in sizes:
        x = torch.randn(shape)
        torch.testing.assert_close(traced.graph_module(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "pool",
    [
        lambda m, x: functional.adaptive_max_pool2d(x, (x.shape[2] // 2, x.shape[3] // 3)),
        lambda m, x: functional.adaptive_max_pool2d(x, (None, x.shape[2]), return_indices=True),
        lambda m, x: functional.adaptive_max_pool1d(x[0], (x.shape[3] + 1) // 2),
    ],
)
def test_maxima_are_pooled_to_computed_sizes(pool: Function) -> None:
    model = Program(pool).eval()
    dynamic: Dynamic = {"x": {2: Dim("height", 4, 64), 3: Dim("width", 4, 64)}}
    graph_module = symbolic_trace(model, example_inputs={"x": torch.randn(2, 3, 12, 18)}, dynamic=dynamic)
    for height, width in ((12, 18), (4, 5), (13, 7), (31, 20)):
        x = torch.randn(2, 3, height, width)
        for actual, expected in zip(outputs(graph_module, x), outputs(model, x), strict=True):
            assert torch.equal(actual, expected)
