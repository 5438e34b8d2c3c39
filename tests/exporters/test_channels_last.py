"""Tests of the format pass that makes convolutions use oneDNN with channels last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.exporters import torch_passes
from optexport.exporters.channels_last import CONVOLUTION
from optexport.runtime import runners
from optexport.runtime.untrusted import archives
from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files
from tests.exporters.pass_files import assert_files_agree, save, write_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"),
]

X = torch.linspace(-2, 2, 2 * 4 * 6 * 5).reshape(2, 4, 6, 5)
SIZES = ((1, 4, 6, 5), (7, 4, 6, 5), (0, 4, 6, 5))


def convolution(*sizes: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(*sizes, **options)


def images(body: Any, **children: Any) -> files.Prepared:
    return files.prepare(randomise(Program(body, **children)), {"x": X}, {"x": {0: Dim("batch", 0, 16)}})


def moved(subject: files.Prepared, place: Path) -> int:
    """Returns the number of oneDNN convolutions in a ``.pt2`` file. Asserts that files agree."""
    batches = [{"x": torch.randn(size)} for size in SIZES]
    batches += [{"x": torch.randn(2, 6, 5, 4).permute(0, 3, 1, 2)}]
    return assert_same(subject, place, batches)


def assert_same(subject: files.Prepared, place: Path, batches: Sequence[dict[str, torch.Tensor]]) -> int:
    """Returns the number of oneDNN convolutions in a ``.pt2`` file, after asserting that files agree on batches."""
    for file_format in ("torchscript", "pt2"):
        plain, lowered = write_both(subject, file_format, "channels-last", place)
        assert_files_agree(lowered, plain, file_format, subject, batches)
    return len(torch.export.load(lowered).graph.find_nodes(op="call_function", target=CONVOLUTION))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"groups": 4}, {"bias": False}],
    ids=str,
)
def test_a_convolution_becomes_one_of_onednn(options: dict[str, Any], tmp_path: Path) -> None:
    assert moved(images(lambda m, x: m.a(x), a=convolution(4, 8, 3, **options)), tmp_path) == 1


@pytest.mark.slow
def test_a_kernel_of_one_becomes_one_of_onednn(tmp_path: Path) -> None:
    assert moved(images(lambda m, x: m.b(m.a(x).relu()), a=convolution(4, 8, 1), b=convolution(8, 2, 1)), tmp_path) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "after",
    [
        lambda m, y: y.view(y.shape[0], 8, -1),
        lambda m, y: y.flatten(1),
        lambda m, y: y.reshape(-1, 4),
        lambda m, y: y.permute(0, 2, 3, 1).flatten(2),
        lambda m, y: (y.permute(0, 2, 3, 1).softmax(-1), y.transpose(1, 3) + 1, y.permute(0, 2, 3, 1)),
        lambda m, y: y.permute(0, 2, 3, 1).contiguous().view(y.shape[0], -1, 4),  # of object detectors
        lambda m, y: (
            y.permute(0, 2, 3, 1).relu().contiguous(),
            y.transpose(2, 3).contiguous(),
            y.permute(0, 2, 3, 1).contiguous(memory_format=torch.channels_last),
        ),
        lambda m, y: (y.flatten(1), y, y[:, :2]),
        lambda m, y: (y + 1).softmax(1),
        lambda m, y: (nn.functional.pad(y, (1, 1)), nn.functional.max_pool2d(y, 2), y.mean((2, 3))),
        lambda m, y: torch.cat([y, y], 1).view(-1),
        lambda m, y: nn.functional.hardtanh(y, inplace=True) + y.shape[2],
        lambda m, y: nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear"),
    ],
    ids=[
        "view",
        "flatten",
        "reshape",
        "permute",
        "views",
        "copy of a view",
        "copies of views",
        "several",
        "softmax",
        "pool",
        "cat",
        "in place",
        "larger",
    ],
)
def test_readers_of_a_convolution_get_the_same_numbers(after: Any, tmp_path: Path) -> None:
    subject = files.prepare(
        randomise(Program(lambda m, x: after(m, m.a(x)), a=convolution(4, 8, 3))),
        {"x": X},
        {"x": {0: Dim("batch", 1, 16)}},
    )
    assert assert_same(subject, tmp_path, [{"x": torch.randn(size)} for size in SIZES[:2]]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(x).contiguous().view(x.shape[0], -1),
        lambda m, x: m.a(x).relu().contiguous(),
        lambda m, x: (m.a(x).contiguous(memory_format=torch.channels_last), m.a(x).reshape(-1)),
    ],
    ids=["copy", "copy of relu", "both"],
)
def test_a_model_in_channels_last_is_the_same(body: Any, tmp_path: Path) -> None:
    model = randomise(Program(body, a=convolution(4, 8, 3))).to(memory_format=torch.channels_last)
    subject = files.prepare(model, {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    assert assert_same(subject, tmp_path, [{"x": X}, {"x": torch.randn(5, 4, 6, 5)}]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(x).as_strided((2, 3), (3, 1)),
        lambda m, x: m.a(x).permute(0, 2, 3, 1).transpose(1, 2).as_strided((2, 3), (3, 1)),
        lambda m, x: torch.as_strided_copy(m.a(x).permute(0, 2, 3, 1), (2, 3), (3, 1)),
        lambda m, x: torch.cond(
            x.sum() > 0,
            lambda y: y.as_strided((2, 3), (3, 1)) + 1,
            lambda y: y.as_strided((2, 3), (3, 1)) * 2,
            (m.a(x).permute(0, 2, 3, 1),),
        ),
    ],
    ids=["strides", "strides of views", "copy", "branch"],
)
def test_a_model_that_reads_strides_is_unchanged(body: Any, tmp_path: Path) -> None:
    subject = files.prepare(randomise(Program(body, a=convolution(4, 8, 3))), {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    plain, lowered = write_both(subject, "pt2", "channels-last", tmp_path)
    assert lowered.read_bytes() == plain.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (m.a(x), nn.functional.conv2d(x, m.a.weight, m.a.bias * 2).view(x.shape[0], -1)),
        lambda m, x: (m.a(x), m.a(x[0]).view(-1)),
    ],
    ids=["computed bias", "no batch"],
)
def test_a_weight_of_an_unsupported_convolution_keeps_its_layout(body: Any, tmp_path: Path) -> None:
    subject = files.prepare(randomise(Program(body, a=convolution(4, 8, 3))), {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    assert assert_same(subject, tmp_path, [{"x": X}, {"x": torch.randn(5, 4, 6, 5)}]) == 0


@pytest.mark.slow
def test_padding_between_convolutions_keeps_the_layout(tmp_path: Path) -> None:
    """EfficientNet pads before each convolution. Copies there took longer than oneDNN saved."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(nn.functional.pad(m.a(x), (0, 1, 0, 1)))  # type: ignore[no-any-return]

    subject = images(body, a=convolution(4, 8, 3), b=convolution(8, 2, 3))
    assert moved(subject, tmp_path) == 2
    graph = torch.export.load(save(subject, "pt2", tmp_path, ("channels-last",))).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)) == 1  # of the result


@pytest.mark.slow
def test_a_block_with_channels_last_inside_has_no_copies(tmp_path: Path) -> None:
    """ConvNeXt normalizes over the channels after a permutation."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + m.linear(m.norm(m.a(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    layers = {"a": convolution(4, 4, 3, padding=1, groups=4), "norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4)}
    subject = images(body, **layers)
    assert moved(subject, tmp_path) == 1
    graph = torch.export.load(save(subject, "pt2", tmp_path, ("channels-last",))).graph
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)
    (source,) = copy.all_input_nodes
    assert source.target is torch.ops.aten.permute.default
    assert source.all_input_nodes[0].target is CONVOLUTION


@pytest.mark.slow
def test_outputs_of_the_graph_have_the_original_layout(tmp_path: Path) -> None:
    subject = images(lambda m, x: (m.a(x), m.a(x).relu()), a=convolution(4, 8, 3))
    path = save(subject, "pt2", tmp_path, ("channels-last",))
    got = runners.open_pt2(path, subject.signature.output_names)({"x": X})
    assert all(value.is_contiguous() for value in got.values())


@pytest.mark.slow
def test_in_place_residual_sum_is_the_same(tmp_path: Path) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.norm(m.b(m.a(x).relu_()))
        y += x
        return y.relu_()

    layers = {"a": convolution(4, 6, 3, padding=1), "b": convolution(6, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    assert moved(images(body, **layers), tmp_path) == 2


def _after_a_view(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    flat = y.flatten(1)
    y.relu_()
    return flat


def _of_a_view(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    y[:, :2].mul_(2.0)
    return y


@pytest.mark.slow
@pytest.mark.parametrize("body", [_after_a_view, _of_a_view])
def test_in_place_change_of_a_view_prevents_the_pass(body: Any, tmp_path: Path) -> None:
    assert moved(images(body, a=convolution(4, 8, 3)), tmp_path) == 0


def _of_images(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv2d(x, x[:1, :, :2, :2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "layer"),
    [
        (_of_images, nn.Identity()),
        (lambda m, x: nn.functional.conv2d(x, m.a.weight * 2), convolution(4, 2, 3)),
        (lambda m, x: (m.a(x), m.a.weight.flatten()), convolution(4, 2, 3)),
        (lambda m, x: m.a(x.double()), convolution(4, 2, 3).double()),
        (lambda m, x: m.a(x[0]), convolution(4, 2, 3)),
        (lambda m, x: m.a(x), convolution(4, 2, 3, padding="same")),
    ],
    ids=["activation", "computed", "read by others", "float64", "no batch", "padding by name"],
)
def test_unsupported_convolutions_are_unchanged(body: Any, layer: Any, tmp_path: Path) -> None:
    subject = files.prepare(randomise(Program(body, a=layer)), {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    for file_format in ("torchscript", "pt2"):
        plain, lowered = write_both(subject, file_format, "channels-last", tmp_path)
        assert lowered.read_bytes() == plain.read_bytes()


@pytest.mark.slow
def test_nan_stays_nan(tmp_path: Path) -> None:
    subject = images(lambda m, x: m.a(x).relu(), a=convolution(4, 8, 3))
    path = save(subject, "pt2", tmp_path, ("channels-last",))
    got = runners.open_pt2(path, subject.signature.output_names)({"x": torch.full((2, 4, 6, 5), torch.nan)})
    assert all(value.isnan().all() for value in got.values())


@pytest.mark.slow
def test_file_with_channels_last_can_be_a_source(tmp_path: Path) -> None:
    subject = images(lambda m, x: m.b(m.a(x).relu()), a=convolution(4, 8, 3), b=convolution(8, 2, 1, bias=False))
    loaded = archives.load_pt2(save(subject, "pt2", tmp_path, ("channels-last",)))
    want = loaded.module()(x=X)
    torch_passes.restore_aten(loaded)
    targets = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.conv2d.default) == 2
    assert CONVOLUTION not in targets
    torch.testing.assert_close(loaded.module()(x=X), want)
