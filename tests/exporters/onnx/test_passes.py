"""Tests of the ONNX format passes: the operators that each pass replaces."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files
from tests.exporters.pass_files import AXES, X, assert_files_agree, prepared, program, save, write_both


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def in_onnx(subject: files.Prepared, name: str, place: Path) -> tuple[Counter[str], Counter[str]]:
    """Returns the operators of a file without and with a format pass. Asserts that both files agree."""
    plain, lowered = write_both(subject, "onnx", name, place)
    assert_files_agree(
        lowered, plain, "onnx", subject, [{"x": torch.randn(*size, 4)} for size in ((1, 2), (7, 33), (0, 5))]
    )
    assert [value.name for value in onnx.load(lowered).graph.output] == subject.signature.output_names
    assert [value.name for value in onnx.load(lowered).graph.input] == ["x"]
    return operators(plain), operators(lowered)


def test_a_residual_before_a_layer_norm_becomes_a_sum(tmp_path: Path) -> None:
    subject = program(lambda m, x: m.n(x + m.a(x).sin()) + x, a=nn.Linear(4, 4), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(subject, "sum-residuals", tmp_path)
    assert lowered == plain - Counter(Add=1) + Counter(Sum=1)


def test_residual_with_several_readers_becomes_a_sum(tmp_path: Path) -> None:
    subject = program(lambda m, x: (y := x.sin() + x, m.n(y) + y), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(subject, "sum-residuals", tmp_path)
    assert lowered == plain - Counter(Add=1) + Counter(Sum=1)


def test_a_bias_before_a_layer_norm_stays_an_add(tmp_path: Path) -> None:
    subject = program(lambda m, x: m.n(m.a(x)) + m.n(x + 1.0), a=nn.Linear(4, 4), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(subject, "sum-residuals", tmp_path)
    assert lowered == plain


def test_onnx_runtime_does_not_fuse_a_sum_with_a_layer_norm(tmp_path: Path) -> None:
    """This is the reason for the format pass. Remove the pass if this test fails."""
    fusions = {}
    for names in ((), ("sum-residuals",)):
        path = save(prepared("masked"), "onnx", tmp_path, names)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        fusions[names] = operators(tmp_path / "optimized.onnx")["SkipLayerNormalization"]
    assert fusions[()] > 0
    assert fusions["sum-residuals",] == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [AXES, {0: Dim("batch", 0, 16)}, {1: Dim("sequence", 2, 40)}])
def test_a_linear_layer_on_three_dimensions_becomes_a_gemm(dynamic: Mapping[int, Dim], tmp_path: Path) -> None:
    subject = files.prepare(randomise(Program(lambda m, x: m.a(x), a=nn.Linear(4, 6))), {"x": X}, {"x": dict(dynamic)})
    plain, lowered = write_both(subject, "onnx", "gemm", tmp_path)
    sizes = itertools.product((0, 1, 7) if 0 in dynamic else (3,), (2, 33) if 1 in dynamic else (5,))
    assert_files_agree(lowered, plain, "onnx", subject, [{"x": torch.randn(*size, 4)} for size in sizes])
    counts = operators(lowered)
    assert (counts["Gemm"], counts["Reshape"], counts["MatMul"], counts["Add"]) == (1, 2, 0, 0)


def test_layer_called_twice_becomes_two_gemms(tmp_path: Path) -> None:
    """The file transposes a large weight before every product."""
    subject = program(lambda m, x: m.a(x).relu() * m.a(x.sin()), a=nn.Linear(4, 4096))
    plain, lowered = in_onnx(subject, "gemm", tmp_path)
    assert (plain["MatMul"], plain["Transpose"]) == (2, 2)
    assert (lowered["Gemm"], lowered["MatMul"], lowered["Transpose"]) == (2, 0, 0)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(x).sin(),
        lambda m, x: m.a(x) + x,
        lambda m, x: x @ x.mT @ x + m.v,
        lambda m, x: m.a(x) + m.w[0, 0],
        lambda m, x: m.b(x[:, 0]),
    ],
    ids=["no bias", "residual", "no weight", "bias of another shape", "two dimensions"],
)
def test_products_other_than_linear_layers_are_unchanged(body: Any, tmp_path: Path) -> None:
    subject = program(
        body,
        a=nn.Linear(4, 4, bias=False),
        b=nn.Linear(4, 2),
        w=nn.Parameter(torch.randn(1, 4)),
        v=nn.Parameter(torch.randn(4)),
    )
    plain, lowered = in_onnx(subject, "gemm", tmp_path)
    assert lowered == plain


def test_transformers_fusions_use_operators_of_onnx_runtime(tmp_path: Path) -> None:
    path = save(prepared("masked"), "onnx", tmp_path, ("transformers-fusions",))
    assert operators(path)["SkipLayerNormalization"] > 0
    path = save(prepared("masked"), "onnx", tmp_path, ("transformers-fusions", "sum-residuals"))
    assert operators(path)["SkipLayerNormalization"] == 0


def test_fusions_outside_the_onnx_standard_are_skipped(tmp_path: Path) -> None:
    """SimplifiedLayerNormalization has the domain of the standard, so onnx.checker rejects it."""
    subject = program(
        lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=nn.Parameter(torch.randn(4))
    )
    plain, lowered = in_onnx(subject, "transformers-fusions", tmp_path)
    assert lowered == plain


def test_fusions_are_skipped_if_they_would_drop_a_small_number(tmp_path: Path) -> None:
    subject = program(lambda m, x: (x.sin() * 0 + 4e-9 + 0) * 1e9 + m.n(x + x.cos()), n=nn.LayerNorm(4))
    plain, lowered = in_onnx(subject, "transformers-fusions", tmp_path)
    assert lowered == plain


def _attending(mask: float) -> files.Prepared:
    """Returns attention with one mask row for all queries. The second batch attends to no key."""

    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.q(x)[:, None]
        hidden = torch.zeros_like(x[:, 0, :1]).index_fill(0, torch.tensor([1]), mask)[:, None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=hidden.expand(-1, 1, 1, x.shape[1]))[:, 0]

    return program(body, q=nn.Linear(4, 4))


def test_attention_becomes_one_operator(tmp_path: Path) -> None:
    subject = _attending(float("-inf"))
    plain, lowered = write_both(subject, "onnx", "attention", tmp_path)
    assert_files_agree(lowered, plain, "onnx", subject, [{"x": torch.randn(*size, 4)} for size in ((2, 3), (7, 33))])
    assert operators(lowered)["Attention"] == 1
    assert operators(lowered)["Softmax"] == 0
    assert onnx.load(lowered).opset_import[0].version == 23


@pytest.mark.slow
def test_row_masked_by_the_smallest_number_attends_to_all_keys(tmp_path: Path) -> None:
    subject = _attending(torch.finfo(torch.float32).min)
    plain, lowered = write_both(subject, "onnx", "attention", tmp_path)
    assert_files_agree(lowered, plain, "onnx", subject, [{"x": torch.randn(2, 3, 4)}])
