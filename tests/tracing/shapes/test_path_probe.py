"""Assertions of the second export are removed if the program computes the same without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import export
from optexport.exporters import graph_export
from optexport.exporters.flat_graph import FlatGraph
from optexport.loading.loader import Loaded
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from optexport.transformations import CastPrecision
from tests._helpers.exports import quick, run
from tests._helpers.graphs import Program


def flat_graph(model: nn.Module, x: torch.Tensor, dynamic: Any = None) -> FlatGraph:
    traced = trace(model, {"x": x}, dynamic)
    return FlatGraph(traced.graph_module, traced.signature, {"x": x}, Loaded(model).weights_sha256, ())


def whole_parts(m: nn.Module, x: torch.Tensor) -> Any:
    """Convolves whole groups of four elements, so that the result may be shorter than the input."""
    return m.up(m.down(x))[..., : x.shape[-1]]


def test_export_holds_at_sizes_that_only_it_excludes() -> None:
    model = Program(whole_parts, down=nn.Conv1d(1, 1, 4, 4), up=nn.ConvTranspose1d(1, 1, 4, 4))
    written = flat_graph(model, torch.randn(2, 1, 10))
    program = graph_export.to_program(written.flat, written.signature, written.example)
    excluded = torch.randn(2, 1, 16)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program.module()(x=excluded)
    for x in (excluded, torch.randn(3, 1, 19)):
        torch.testing.assert_close(written.program.module()(x=x)[0], model(x))


def test_assertions_of_the_graph_stay() -> None:
    model = Program(lambda m, x: (torch._check(x.shape[1] % 4 != 0), x * 2)[1])
    module = flat_graph(model, torch.randn(2, 10)).program.module()
    module(x=torch.randn(2, 13))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        module(x=torch.randn(2, 12))


@pytest.mark.slow
def test_padding_to_a_multiple_is_exported_again() -> None:
    model = Program(lambda m, x: nn.functional.pad(x, (0, -x.shape[1] % 4)).reshape(x.shape[0], -1, 4).sum(1))
    written = flat_graph(model, torch.randn(2, 10))
    for x in (torch.randn(3, 11), torch.randn(1, 8)):
        torch.testing.assert_close(written.program.module()(x=x)[0], model(x))


@pytest.mark.slow
def test_size_excluded_by_torch_for_a_single_row_is_exported(tmp_path: Path) -> None:
    """The export of the cast graph failed with "Constraints violated (w)"."""
    model = Program(lambda m, x: m.conv(x).amax((2, 3)), conv=nn.Conv2d(3, 4, 3, stride=2))
    dynamic = {"x": {0: Dim("batch", 1, 8), 2: Dim("h", 4, 40), 3: Dim("w", 4, 40)}}
    x = torch.rand(2, 3, 8, 9)
    result = quick(model, {"x": x}, tmp_path / "out", dynamic=dynamic, transformations=[CastPrecision()], atol=1.0)
    for sizes in ((2, 3, 8, 9), (1, 3, 4, 4), (3, 3, 40, 4)):
        x = torch.rand(sizes)
        torch.testing.assert_close(run(result, x=x)["output"], model(x), atol=0.01, rtol=0.01)


def in_windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention within windows of 4 by 4, of an image that is padded to whole windows."""
    batch, height, width, channels = x.shape
    padded = nn.functional.pad(x, (0, 0, 0, -width % 4, 0, -height % 4))
    rows, columns = padded.shape[1] // 4, padded.shape[2] // 4
    windows = padded.view(batch, rows, 4, columns, 4, channels).transpose(2, 3).reshape(-1, 16, channels)
    query, key, value = m.qkv(windows).chunk(3, -1)
    made = (query @ key.mT / channels**0.5).softmax(-1) @ value
    image = made.view(batch, rows, columns, 4, 4, channels).transpose(2, 3).reshape(padded.shape)
    return x + image[:, :height, :width]


@pytest.mark.nightly
def test_attention_in_windows_of_two_axes_is_exported_quickly(tmp_path: Path) -> None:
    """It took more than five minutes: sympy searched every condition for symbols at every size."""
    model = Program(in_windows, qkv=nn.Linear(8, 24))
    dynamic = {"x": {0: Dim("batch", 1, 8), 1: Dim("h", 5, 64), 2: Dim("w", 5, 64)}}
    result = export(model.eval(), {"x": torch.randn(2, 8, 12, 8)}, tmp_path / "out", dynamic=dynamic, formats=["onnx"])
    for sizes in ((1, 5, 5, 8), (3, 16, 33, 8)):
        x = torch.randn(sizes)
        torch.testing.assert_close(run(result, x=x)["output"], model(x), atol=1e-5, rtol=1e-4)
