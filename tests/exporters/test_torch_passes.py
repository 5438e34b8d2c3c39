"""Tests of the format passes for TorchScript and ``.pt2`` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.exporters import torch_passes
from optexport.runtime import runners
from optexport.runtime.untrusted import archives
from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files
from tests.exporters.pass_files import AXES, X, assert_files_agree, batches, prepared, program, save, write_both

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

LINEAR = torch.ops.mkldnn._linear_pointwise.default
LINEAR_AND_SUM = torch.ops.mkldnn._linear_pointwise.binary

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


def calls_of(target: Any, subject: files.Prepared, place: Path) -> list[Any]:
    """Returns the calls of an operator in a ``.pt2`` file, after checking that it and the TorchScript file agree."""
    inputs = [{"x": torch.randn(*size, 4)} for size in ((1, 2), (7, 33), (0, 5))]
    for file_format in ("torchscript", "pt2"):
        plain, lowered = write_both(subject, file_format, "onednn-linear", place)
        assert_files_agree(lowered, plain, file_format, subject, inputs)
    return list(torch.export.load(lowered).graph.find_nodes(op="call_function", target=target))


def linears(subject: files.Prepared, place: Path) -> list[list[Any]]:
    """Returns the non-tensor arguments of oneDNN calls for linear layers without a sum."""
    return [list(node.args[3:]) for node in calls_of(LINEAR, subject, place)]


@pytest.mark.sample(1)
@onednn
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_layer_and_gelu_become_one_call_of_onednn(approximate: str, tmp_path: Path) -> None:
    subject = program(
        lambda m, x: m.b(m.g(m.a(x))), a=nn.Linear(4, 8), g=nn.GELU(approximate), b=nn.Linear(8, 4, False)
    )
    calls = linears(subject, tmp_path)
    assert [(attr, algorithm) for attr, _, algorithm in calls] == [("gelu", approximate), ("none", "")]


@onednn
def test_gelu_of_a_value_with_other_readers_is_not_fused(tmp_path: Path) -> None:
    subject = program(lambda m, x: (y := m.a(x), nn.functional.gelu(y)), a=nn.Linear(4, 8))
    calls = linears(subject, tmp_path)
    assert [attr for attr, *_ in calls] == ["none"]


def _residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(m.a(x), 0.5, training=False) + x


@pytest.mark.sample(1)
@onednn
@pytest.mark.parametrize(
    "body",
    [_residual, lambda m, x: x + m.a(x), lambda m, x: m.a(x) + x.transpose(0, 1).contiguous().transpose(0, 1)],
    ids=["after a dropout", "other order", "other strides"],
)
def test_linear_layer_and_sum_become_one_call_of_onednn(body: Any, tmp_path: Path) -> None:
    assert len(calls_of(LINEAR_AND_SUM, program(body, a=nn.Linear(4, 4)), tmp_path)) == 1


@pytest.mark.slow
@onednn
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(x) + x[..., :1],
        lambda m, x: m.a(x[:, :1]) + x,
        lambda m, x: m.a(x) + x.sum(),
        lambda m, x: m.a(x) + 1.5,
        lambda m, x: m.a(x) + x.double(),
        lambda m, x: torch.add(m.a(x), x, alpha=2),
        lambda m, x: (y := m.a(x)) + y,
        lambda m, x: ((y := m.a(x)) + x, y),
    ],
    ids=["one column", "broadcast result", "number", "constant", "float64", "alpha", "itself", "other reader"],
)
def test_sums_that_onednn_computes_differently_are_not_fused(body: Any, tmp_path: Path) -> None:
    assert calls_of(LINEAR_AND_SUM, program(body, a=nn.Linear(4, 4)), tmp_path) == []


class Half(nn.Module):
    """Two layers in bfloat16, with a GELU and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8).bfloat16(), nn.Linear(8, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.bfloat16()
        return (self.b(nn.functional.gelu(self.a(half))) + half).float()


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor lacks AVX-512")
def test_layers_in_bfloat16_become_calls_of_onednn(tmp_path: Path) -> None:
    subject = files.prepare(randomise(Half()), {"x": X}, {"x": AXES})
    path = save(subject, "pt2", tmp_path, ("onednn-linear",))
    graph = torch.export.load(path).graph
    assert [len(graph.find_nodes(op="call_function", target=target)) for target in (LINEAR, LINEAR_AND_SUM)] == [1, 1]
    torch_file = save(subject, "torchscript", tmp_path, ("onednn-linear",))
    x = torch.randn(7, 33, 4)
    (want,) = subject.program.module()(x=x)
    for run_file in (runners.open_pt2(path, ["y"]), runners.open_torchscript(torch_file, ["y"])):
        torch.testing.assert_close(run_file({"x": x})["y"], want, atol=0.05, rtol=0.05)


class Overwritten(nn.Module):
    """Changes the input of a linear layer between the layer and the reader of its result."""

    def __init__(self, reader: Any) -> None:
        super().__init__()
        self.a, self.reader = nn.Linear(4, 4), reader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        y = self.a(z)
        z.mul_(2.0)
        return self.reader(y, z)


@pytest.mark.slow
@onednn
@pytest.mark.parametrize("reader", [lambda y, z: nn.functional.gelu(y) + z, lambda y, z: y + z], ids=["gelu", "sum"])
def test_nothing_is_fused_if_the_layer_input_changes_in_between(reader: Any, tmp_path: Path) -> None:
    subject = files.prepare(randomise(Overwritten(reader)), {"x": X}, {"x": AXES})
    assert [attr for attr, *_ in linears(subject, tmp_path)] == ["none"]


@pytest.mark.slow
@onednn
def test_inputs_may_have_one_dimension_and_any_strides(tmp_path: Path) -> None:
    model = Program(
        lambda m, x: (m.a(x[0, 0]), m.a(x.transpose(0, 1)), m.a(x[:, ::2]), m.a(x[:1, :1].expand(3, 5, 4))),
        a=nn.Linear(4, 6),
    )
    axes = {0: Dim("batch", 1, 16), 1: Dim("sequence", 3, 40)}
    subject = files.prepare(randomise(model), {"x": X}, {"x": axes})
    plain, lowered = write_both(subject, "pt2", "onednn-linear", tmp_path)
    assert_files_agree(lowered, plain, "pt2", subject, [{"x": torch.randn(*size, 4)} for size in ((1, 3), (7, 33))])
    assert len(torch.export.load(lowered).graph.find_nodes(op="call_function", target=LINEAR)) == 4


class Striding(nn.Module):
    """A linear layer with a bias of stride 2. oneDNN would ignore the stride."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("bias", torch.randn(12)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.slow
@onednn
@pytest.mark.parametrize(
    "make",
    [
        Striding,
        lambda: Program(lambda m, x: nn.functional.linear(x, x[0])),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w * 2), w=nn.Parameter(torch.randn(6, 4))),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w), w=nn.Parameter(torch.randn(4))),
        lambda: Program(lambda m, x: nn.functional.linear(x, m.w, x[0, 0, 0]), w=nn.Parameter(torch.randn(6, 4))),
        lambda: Program(lambda m, x: m.a(x.double()), a=nn.Linear(4, 2).double()),
        lambda: Program(lambda m, x: nn.functional.linear(x[..., :0], m.w), w=nn.Parameter(torch.empty(2, 0))),
    ],
    ids=["strided bias", "activation", "computed", "vector", "bias computed", "float64", "no features"],
)
def test_unsupported_linear_layers_are_unchanged(make: Any, tmp_path: Path) -> None:
    subject = files.prepare(make().eval(), {"x": X}, {"x": {0: Dim("batch", 1, 16)}})
    plain, lowered = write_both(subject, "pt2", "onednn-linear", tmp_path)
    assert_files_agree(lowered, plain, "pt2", subject, [{"x": torch.randn(size, 5, 4)} for size in (1, 7)])
    assert lowered.read_bytes() == plain.read_bytes()


@onednn
def test_nan_stays_nan(tmp_path: Path) -> None:
    subject = program(lambda m, x: (nn.functional.gelu(m.a(x)), m.a(x).relu()), a=nn.Linear(4, 4))
    path = save(subject, "pt2", tmp_path, ("onednn-linear",))
    got = runners.open_pt2(path, subject.signature.output_names)({"x": torch.full((2, 3, 4), torch.nan)})
    assert all(value.isnan().all() for value in got.values())


def test_a_frozen_file_holds_its_weights_as_constants(tmp_path: Path) -> None:
    path = save(prepared("masked"), "torchscript", tmp_path, ("freeze",))
    assert not list(torch.jit.load(path).parameters())
    _, *arguments = torch.jit.load(path).forward.schema.arguments
    assert [argument.name for argument in arguments] == [spec.name for spec in prepared("masked").signature.inputs]


@onednn
@pytest.mark.parametrize(("model", "linears", "sums"), [("mlp", 3, 0), ("masked", 2, 2)])
def test_file_with_onednn_layers_can_be_a_source(model: str, linears: int, sums: int, tmp_path: Path) -> None:
    loaded = archives.load_pt2(save(prepared(model), "pt2", tmp_path, ("onednn-linear",)))
    inputs = batches(model)
    want = [loaded.module()(**batch) for batch in inputs]
    targets = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert (targets.count(LINEAR), targets.count(LINEAR_AND_SUM)) == (linears, sums)
    torch_passes.restore_aten(loaded)
    targets = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.linear.default) == linears + sums
    assert LINEAR not in targets
    assert LINEAR_AND_SUM not in targets
    torch.testing.assert_close([loaded.module()(**batch) for batch in inputs], want)


class Masked(nn.Module):
    """Two attentions with one boolean mask, which hides everything from the last row of the batch."""

    def __init__(self, *, overwrites: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.overwrites = nn.Linear(4, 4), nn.Linear(4, 4), overwrites

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        allowed = (mask > 0)[:, None, :].expand(-1, x.shape[1], -1).contiguous()
        y = nn.functional.scaled_dot_product_attention(self.a(x), x, x, attn_mask=allowed)
        if self.overwrites:
            allowed.logical_not_()
        return nn.functional.scaled_dot_product_attention(self.b(x + y), y, y, attn_mask=allowed)


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("file_format", ["torchscript", "pt2"])
def test_mask_of_several_attentions_is_converted_once(file_format: str, overwrites: bool, tmp_path: Path) -> None:
    example = {"x": X, "mask": torch.ones(3, 5)}
    subject = files.prepare(randomise(Masked(overwrites=overwrites)), example, {"x": AXES, "mask": AXES})
    plain, shared = write_both(subject, file_format, "shared-masks", tmp_path)
    mask = torch.ones(4, 7)
    mask[1, 3:], mask[2, :5], mask[3] = 0, 0, 0
    inputs = [{"x": torch.randn(1, 9, 4), "mask": torch.ones(1, 9)}, {"x": torch.randn(4, 7, 4), "mask": mask}]
    assert_files_agree(shared, plain, file_format, subject, inputs)
    if file_format == "pt2":
        attentions = [n for n in torch.export.load(shared).graph.nodes if "attention" in str(n.target)]
        masks = [node.args[3] for node in attentions]
        assert {mask.meta["val"].dtype for mask in masks} == {torch.bool if overwrites else torch.float32}
        assert (len(set(masks)) == 1) != overwrites


@onednn
def test_input_with_the_name_of_a_function_keeps_it(tmp_path: Path) -> None:
    subject = files.prepare(randomise(nn.Linear(4, 4)), {"input": X}, {"input": AXES})
    for file_format in ("torchscript", "pt2"):
        plain, lowered = write_both(subject, file_format, "onednn-linear", tmp_path)
        assert_files_agree(lowered, plain, file_format, subject, [{"input": torch.randn(7, 33, 4)}])
