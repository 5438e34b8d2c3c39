"""Tests of the ONNX exporter: names, dynamic axes, metadata and numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from optexport.errors import ExportError, SourceError
from optexport.exporters.onnx.crash_check import check_no_crash
from optexport.exporters.onnx.opsets import ATTENTION_OPSET
from optexport.runtime import runners
from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files

X = torch.linspace(-2, 2, 12).reshape(3, 4)
BATCH = {"x": {0: Dim("batch", 1, 32)}}


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def saved(model: nn.Module, place: Path, dynamic: Any = BATCH, **options: Any) -> tuple[files.Prepared, Path]:
    subject = files.prepare(model, {"x": X}, dynamic)
    path = place / "model.onnx"
    files.save_onnx(subject, path, **options)
    return subject, path


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize("optimized", [False, True], ids=["as written", "optimized"])
@pytest.mark.parametrize("name", files.NAMES)
def test_file_gives_the_outputs_of_the_model_at_any_size(name: str, optimized: bool) -> None:
    outputs = files.prepared(name).signature.output_names
    files.assert_agrees(name, runners.open_onnx(files.onnx_file(name), outputs, optimized=optimized), 5e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", files.NAMES)
def test_inputs_outputs_and_axes_are_named_as_in_the_signature(name: str) -> None:
    signature = files.prepared(name).signature
    graph = onnx.load(files.onnx_file(name)).graph
    assert [(value.name, shape(value)) for value in graph.input] == [(s.name, list(s.shape)) for s in signature.inputs]
    assert [value.name for value in graph.output] == signature.output_names
    for value, spec in zip(graph.output, signature.outputs, strict=True):
        assert [isinstance(size, str) for size in shape(value)] == [isinstance(size, str) for size in spec.shape]
        assert shape(value)[0] == spec.shape[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", files.NAMES)
def test_file_is_valid_and_holds_no_paths_of_the_machine(name: str) -> None:
    path = files.onnx_file(name)
    onnx.checker.check_model(str(path), full_check=True)
    content = path.read_bytes()
    for text in (sys.prefix, str(Path(__file__).parent), str(Path.home()) + "/", "site-packages", "stack_trace"):
        assert text.encode() not in content


def test_metadata_is_stored_as_json() -> None:
    model = onnx.load(files.onnx_file("albert"))
    metadata = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert metadata == {"optexport.transformations": ["one", "two"]}


@pytest.mark.slow
def test_repeated_and_passed_through_outputs_have_unique_names(tmp_path: Path) -> None:
    model = randomise(Program(lambda m, x: (y := m.a(x), y, x, x, m.a.weight, y + 1), a=nn.Linear(4, 4)))
    subject, path = saved(model, tmp_path)
    names = [value.name for value in onnx.load(path).graph.output]
    assert names == subject.signature.output_names
    assert len(set(names)) == 6
    files.assert_outputs(subject, path, {"x": torch.randn(1, 4)}, {"x": torch.randn(7, 4)})


@pytest.mark.slow
def test_output_with_the_name_of_an_input_is_renamed(tmp_path: Path) -> None:
    subject, path = saved(Program(lambda m, x: {"x": x * 2, "y": x + 1}), tmp_path)
    assert [value.name for value in onnx.load(path).graph.output] == ["x_out", "y"]
    files.assert_outputs(subject, path, {"x": torch.randn(5, 4)})


class InPlace(nn.Module):
    """Writes into slices, into masked elements and into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 0] = 7.0
        y[x > 1] = 0.0
        x.mul_(2.0)
        return y + x


@pytest.mark.slow
def test_in_place_writes_are_exported(tmp_path: Path) -> None:
    subject, path = saved(InPlace(), tmp_path)
    files.assert_outputs(subject, path, {"x": torch.randn(1, 4)}, {"x": torch.randn(9, 4)})


class Rows(nn.Module):
    """Attention with a boolean mask, or with a mask of minus infinity or the smallest number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask[:, None, None, :] > 0
        low = {"infinite": float("-inf"), "smallest": torch.finfo(x.dtype).min, "large": -1e4}
        attend = keep if self.kind == "boolean" else torch.zeros_like(x[:, None, :1, :1]).masked_fill(
            ~keep, low[self.kind]
        )  # fmt: skip
        y = x[:, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=attend.expand(-1, 1, x.shape[1], -1))


@pytest.mark.slow
@pytest.mark.parametrize("opset", [None, ATTENTION_OPSET])
@pytest.mark.parametrize("kind", ["boolean", "infinite", "smallest", "large"])
def test_fully_masked_rows_give_the_numbers_of_torch(kind: str, opset: int | None, tmp_path: Path) -> None:
    axes = {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 32)}
    example = {"x": torch.randn(3, 5, 4), "mask": torch.ones(3, 5)}
    subject = files.prepare(Rows(kind), example, {"x": axes, "mask": axes})
    files.save_onnx(subject, tmp_path / "model.onnx", example=example, opset=opset)
    mask = torch.ones(4, 7)
    mask[1] = 0
    mask[2, 3:] = 0
    mask[3, :5] = 0
    files.assert_outputs(subject, tmp_path / "model.onnx", {"x": torch.randn(4, 7, 4), "mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize("opset", [None, ATTENTION_OPSET])
def test_fully_masked_rows_are_zeros_in_half_precision(opset: int | None, tmp_path: Path) -> None:
    example = {"x": 40 * torch.randn(3, 5, 4).half(), "mask": torch.ones(3, 5).half()}
    axes = {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 32)}
    subject = files.prepare(Rows("boolean"), example, {"x": axes, "mask": axes})
    files.save_onnx(subject, tmp_path / "model.onnx", example=example, opset=opset)
    x, mask = 40 * torch.randn(2, 7, 4), torch.ones(2, 7)
    mask[1] = 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x.half().numpy(), "mask": mask.half().numpy()})
    assert (result[1] == 0).all()
    assert (result[0] != 0).any()


class Attention(nn.Module):
    """Calls scaled_dot_product_attention with the given arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, 2 * k, **self.arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}],
    ids=["plain", "causal", "scale", "grouped queries"],
)
def test_every_kind_of_attention_gives_the_numbers_of_torch(arguments: dict[str, Any], tmp_path: Path) -> None:
    heads = 4 if "enable_gqa" in arguments else 2
    example = {"q": torch.randn(3, heads, 5, 4), "k": torch.randn(3, 2, 6, 4)}
    axes = {
        "q": {0: Dim("batch", 1, 16), 2: Dim("rows", 2, 32)},
        "k": {0: Dim("batch", 1, 16), 2: Dim("columns", 2, 32)},
    }
    model = Attention(**arguments)
    files.assert_onnx(model, example, axes, tmp_path, {"q": torch.randn(2, heads, 7, 4), "k": torch.randn(2, 2, 9, 4)})


@pytest.mark.slow
def test_a_convolution_over_volumes_without_a_bias_is_written(tmp_path: Path) -> None:
    model = Program(lambda m, x: m.conv(x), conv=nn.Conv3d(2, 3, 2, bias=False))
    x = torch.randn(5, 2, 3, 4, 5)
    files.assert_onnx(model, {"x": x[:2]}, BATCH, tmp_path, {"x": x})


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.cummax((x > 0).long(), 1)[1],
        lambda m, x: torch.cummin(x, 0)[0],
        lambda m, x: torch.searchsorted(torch.linspace(-1, 1, 5), x, right=True),
        lambda m, x: torch.bucketize(x, torch.linspace(-1, 1, 5)),
        lambda m, x: torch.histc(x, 4, -1, 2),
        lambda m, x: torch.histc(x, 4) + torch.histc(x * 0, 4),
        lambda m, x: torch.histc(torch.arange(22) / 7 + x.sum() * 0, 7, 0, 3) + torch.histc(x, 7, 1, 1),
    ],
    ids=["running maximum", "running minimum", "places among others", "buckets", "counts", "counts of all", "edges"],
)
def test_functions_without_an_onnx_operator_are_decomposed(forward: Any, tmp_path: Path) -> None:
    x = torch.tensor([[0.5, -1.0, 2.0, 2.0], [0.5, 3.0, -0.25, 1.0]])
    model, example, dynamic = Program(forward), {"x": x}, {"x": {0: "rows", 1: "columns"}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": x}, {"x": x.T.contiguous()}, {"x": torch.randn(5, 7)})


@pytest.mark.slow
def test_attention_keys_are_not_copied_for_a_transpose(tmp_path: Path) -> None:
    example = {"x": torch.randn(3, 5, 4), "mask": torch.ones(3, 5)}
    axes = {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 32)}
    subject = files.prepare(Rows("boolean"), example, {"x": axes, "mask": axes})
    files.save_onnx(subject, tmp_path / "model.onnx", example=example)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    types = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "FusedMatMul" in types
    assert not types & {"Transpose", "Where", "Attention"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("opset", [18, 20, 23, 26])
def test_file_has_the_requested_opset(opset: int, tmp_path: Path) -> None:
    subject, path = saved(randomise(Program(lambda m, x: m.a(x).softmax(-1), a=nn.Linear(4, 4))), tmp_path, opset=opset)
    assert {entry.domain: entry.version for entry in onnx.load(path).opset_import}[""] == opset
    files.assert_outputs(subject, path, {"x": torch.randn(6, 4)})


def test_large_weights_go_to_an_external_file(tmp_path: Path) -> None:
    model = randomise(Program(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 64), b=nn.Linear(64, 4)))
    subject, path = saved(model, tmp_path, external_data_above=100, metadata={"key": "value"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx.data").stat().st_size > 4 * 64 * 4
    stored = onnx.load(path, load_external_data=False)
    places = {e.value for t in stored.graph.initializer for e in t.external_data if e.key == "location"}
    assert places == {"model.onnx.data"}
    assert [entry.key for entry in stored.metadata_props] == ["key"]
    onnx.checker.check_model(str(path))
    files.assert_outputs(subject, path, {"x": torch.randn(5, 4)})


@pytest.mark.slow
def test_small_weights_stay_in_the_model_file(tmp_path: Path) -> None:
    saved(randomise(Program(lambda m, x: m.a(x), a=nn.Linear(4, 64))), tmp_path, external_data_above=4 * 64 * 4 + 256)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_a_file_moves_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    subject, path = saved(
        randomise(Program(lambda m, x: m.a(x), a=nn.Linear(4, 64))), tmp_path / "one", external_data_above=100
    )
    moved = (tmp_path / "one").rename(tmp_path / "two")
    files.assert_outputs(subject, moved / path.name, {"x": torch.randn(5, 4)})


def test_operator_without_translation_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="_linalg_eigh") as caught:
        saved(Program(lambda m, x: torch.linalg.eigvalsh(x.T @ x)), tmp_path)
    assert caught.value.exit_code == 5
    assert 'leave "onnx" out of export.formats' in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_unsupported_opset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="999"):
        saved(Program(lambda m, x: x.relu()), tmp_path, opset=999)


@pytest.mark.slow
def test_saving_does_not_change_the_graph_or_the_inputs(tmp_path: Path) -> None:
    subject = files.prepare(Rows("boolean"), {"x": torch.randn(3, 5, 4), "mask": torch.ones(3, 5)}, None)
    before, code = str(subject.flat.graph), subject.flat.code
    example = {name: value.clone() for name, value in subject.example.items()}
    files.save_onnx(subject, tmp_path / "model.onnx")
    assert (str(subject.flat.graph), subject.flat.code) == (before, code)
    assert all(torch.equal(subject.example[name], value) for name, value in example.items())


@pytest.mark.slow
def test_unread_input_is_accepted(tmp_path: Path) -> None:
    both = {"x": X, "unread": torch.ones(3, 2)}
    dynamic = {"x": {0: Dim("batch", 1, 32)}, "unread": {0: Dim("batch", 1, 32)}}
    files.assert_onnx(Unread(), both, dynamic, tmp_path, {"x": torch.randn(5, 4), "unread": torch.zeros(5, 2)})


class Unread(nn.Module):
    """Takes an input that it does not read."""

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool])
def test_inputs_and_outputs_may_have_any_supported_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Program(lambda m, x: (x[:, :2], x.flip(0)))
    files.assert_onnx(model, {"x": (X > 0).to(dtype)}, BATCH, tmp_path, {"x": (torch.randn(5, 4) > 0).to(dtype)})


@pytest.mark.parametrize("content", [b"", b"hello", b"\x08\x0a"])
def test_a_damaged_file_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    message = r"model\.onnx: ONNX Runtime rejects the file"
    with pytest.raises((ExportError, SourceError), match=message):
        runners.open_onnx(tmp_path / "model.onnx", ["output"], optimized=False)


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-8, 1e-10, 1e-12])
def test_small_addends_are_not_removed(eps: float, tmp_path: Path) -> None:
    model = Program(lambda m, x: (x / (x.norm(dim=-1, keepdim=True) + eps), torch.log(x.relu() + eps)))
    subject, path = saved(model, tmp_path)
    files.assert_outputs(subject, path, {"x": torch.cat([torch.zeros(1, 4), torch.randn(2, 4)])})


class Tagger(nn.Module):
    """An embedding and a bidirectional LSTM. ONNX Runtime crashes when it opens it in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.lstm = nn.LSTM(12, 10, batch_first=True, bidirectional=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.embed(ids))[0]


def tagger(dtype: torch.dtype) -> files.Prepared:
    return files.prepare(Tagger().to(dtype).eval(), {"ids": torch.arange(10).reshape(2, 5)}, {"ids": {0: "batch"}})


@pytest.mark.slow
def test_file_that_crashes_onnx_runtime_is_an_error(tmp_path: Path) -> None:
    subject, path, message = tagger(torch.float16), tmp_path / "model.onnx", ""
    try:
        files.save_onnx(subject, path)
    except ExportError as error:
        message = str(error)
    if message:
        assert re.match(r"model.onnx: ONNX Runtime crashed when it opened the file \(SIG[A-Z]+, signal \d+\)", message)
    else:  # a version of ONNX Runtime without the bug
        runners.open_onnx(path, subject.signature.output_names, optimized=True)


@pytest.mark.slow
def test_recurrent_file_without_a_crash_is_written(tmp_path: Path) -> None:
    subject, path = tagger(torch.float32), tmp_path / "model.onnx"
    files.save_onnx(subject, path)
    files.assert_outputs(subject, path, subject.example)


@pytest.mark.slow
@pytest.mark.parametrize("operators", [{"LSTM"}, {"Gemm", "GRU"}])
def test_refused_file_is_not_reported_as_a_crash(operators: set[str], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"x" * 999)
    check_no_crash(path, operators)
    with pytest.raises(ExportError, match="ONNX Runtime rejects the file"):
        runners.open_onnx(path, [], optimized=False)
