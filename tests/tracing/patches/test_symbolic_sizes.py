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


def halves(m: object, x: torch.Tensor) -> list[torch.Tensor]:
    height, width = x.shape[2:]
    return [
        functional.adaptive_avg_pool2d(x, (height // 2, width // 3)),
        functional.adaptive_avg_pool2d(x, [None, height]),
        functional.adaptive_avg_pool1d(x[0], (width + 1) // 2),
        functional.adaptive_avg_pool3d(x[None], (1, height // 2, 2)),
        functional.adaptive_max_pool2d(x, (height // 2, width // 3)),
        functional.adaptive_max_pool1d(x[0], (width + 1) // 2),
        functional.adaptive_max_pool2d(x, (None, 3)),
        *functional.adaptive_max_pool2d(x, (None, height), return_indices=True),
    ]


def whole_axes(m: object, x: torch.Tensor) -> list[torch.Tensor]:
    return [
        functional.max_pool1d(x[0], x.size(3)).squeeze(2),
        functional.avg_pool1d(x[0], x.size(3)),
        functional.max_pool2d(x, kernel_size=x.size()[2:]),
        functional.avg_pool2d(x, (x.shape[2], 1)),
        functional.avg_pool3d(x, x.shape[1:]),
    ]


def quarters(m: object, x: torch.Tensor) -> list[torch.Tensor]:
    height, width = x.shape[2:]
    return [
        functional.max_pool1d(x[0], -(-width // 4), ceil_mode=True),
        functional.avg_pool1d(x[0], -(-width // 4), ceil_mode=True),
        functional.max_pool2d(x, (height // 2, 3), stride=2),
        functional.avg_pool2d(x, width // 4, stride=(1, 3), ceil_mode=True),
        functional.max_pool3d(x, (1, height // 4, width // 4)),
    ]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("pool", [whole_axes, halves, quarters])
def test_windows_of_pooling_are_computed_from_sizes(pool: Function) -> None:
    model = Program(pool).eval()
    dynamic: Dynamic = {"x": {2: Dim("height", 4, 64), 3: Dim("width", 4, 64)}}
    graph_module = symbolic_trace(model, example_inputs={"x": torch.randn(2, 3, 12, 18)}, dynamic=dynamic)
    for height, width in ((12, 18), (5, 7), (13, 8), (31, 20)):
        x = torch.randn(2, 3, height, width)
        for actual, expected in zip(outputs(graph_module, x), outputs(model, x), strict=True):
            torch.testing.assert_close(actual, expected)


def end(m: object, x: torch.Tensor) -> torch.Tensor:
    width = x.shape[2]
    if width % 4:
        x = functional.pad(x, (0, 4 - width % 4))
    return x


def both_ends(m: object, x: torch.Tensor) -> torch.Tensor:
    if x.shape[2] % 4 != 0:
        missing = 4 - x.shape[2] % 4
        x = functional.pad(x, (missing // 2, missing - missing // 2), mode="replicate")
    return x


def zeros(m: object, x: torch.Tensor) -> torch.Tensor:
    rest = x.shape[2] % 4
    if rest > 0:
        x = torch.cat([x, x.new_zeros(x.shape[0], x.shape[1], 4 - rest)], 2)
    return x


def missing_first(m: object, x: torch.Tensor) -> torch.Tensor:
    missing = 4 - x.shape[2] % 4
    return x if missing == 4 else functional.pad(x, (0, missing))


def always(m: object, x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 4 - x.shape[2] % 4))


def rest(m: object, x: torch.Tensor) -> torch.Tensor:
    if x.shape[2] % 4:
        x = functional.pad(x, (0, x.shape[2] % 4))
    return x


@pytest.mark.parametrize("pad", [end, both_ends, zeros, missing_first, always, rest])
@pytest.mark.parametrize("traced_width", [8, 9])
def test_padding_to_a_multiple_is_right_at_multiples(pad: Function, traced_width: int) -> None:
    dynamic: Dynamic = {"x": {2: Dim("width", 4, 40)}}
    traced = trace(Program(pad), {"x": torch.randn(2, 3, traced_width)}, dynamic)
    for width in (4, 7, 8, 9, 10, 12, 39, 40):
        x = torch.randn(2, 3, width)
        assert torch.equal(traced.graph_module(x), pad(None, x))
