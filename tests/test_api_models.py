"""Models of many kinds in the Python API: exported or refused."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import fx, nn
from torch.fx import GraphModule
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from optexport import export
from optexport.errors import ExportError, OptexportError, ParityError, TraceError
from optexport.exporters import targets
from optexport.parity.verify import verify
from optexport.report import json_document
from optexport.signature.signature import Dim
from optexport.tracking import tables
from optexport.transformations import (
    MergeLinears,
    RemoveNoOps,
    Transformation,
)
from tests._helpers import exports
from tests._helpers.exports import BATCH, X, quick, run
from tests._helpers.graphs import Program
from tests._helpers.models import randomise


@pytest.mark.slow
def test_train_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the model is in train mode") as caught:
        export(exports.block().train(), exports.batch(), tmp_path / "bundle")
    assert "model.eval()" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_one_module_in_train_mode_is_refused(tmp_path: Path) -> None:
    """The running statistics of the batch norm changed, and a row's result depended on the other rows."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
    model[1].train()
    with pytest.raises(TraceError, match="the module 1 of the model is in train mode"):
        export(model, torch.randn(5, 4), tmp_path / "bundle")
    model.eval()[2].train()  # an activation computes the same in both modes
    assert export(model, torch.randn(5, 4), tmp_path / "bundle", formats="pt2", effort="quick").passed


@pytest.mark.slow
def test_hook_that_needs_positional_inputs_gets_a_hint(tmp_path: Path) -> None:
    """The error blamed the inputs."""
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(TraceError, match="Register its hooks with with_kwargs=True: all inputs are passed by name"):
        quick(model, {"input": torch.randn(2, 4)}, tmp_path / "bundle")


@pytest.mark.slow
def test_outputs_as_large_as_float64_allows_are_recorded(tmp_path: Path) -> None:
    masked = Program(lambda m, x: x.masked_fill(x > 0, torch.finfo(x.dtype).min)).eval()
    result = export(masked, {"x": torch.randn(3, 4).double()}, tmp_path / "b", formats=["torchscript"], effort="quick")
    assert result.manifest.parity.bounds["output"].largest == torch.finfo(torch.float64).max
    verify(tmp_path / "b")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dropout(self.layer(x))
        return y


@pytest.mark.slow
def test_submodule_in_train_mode_is_refused_too(tmp_path: Path) -> None:
    model = Dropping().eval()
    model.dropout.train()
    with pytest.raises(OptexportError):
        export(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rule_that_only_removes_nodes_names_them(tmp_path: Path) -> None:
    model = Program(lambda m, x: m.drop(m.a(x)), a=nn.Linear(4, 4), drop=nn.Dropout())
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH, transformations=RemoveNoOps())
    (change,) = result.manifest.transformations[0].changes
    document = json_document.as_json(result)
    assert document["transformed_nodes"] == {"remove-no-ops": []}
    assert document["removed_nodes"] == {"remove-no-ops": change.replaced} != {"remove-no-ops": []}
    _, rows = tables._change_table(result.manifest)
    assert rows == [["remove-no-ops", "", "", ", ".join(change.replaced), ""]]


@pytest.mark.slow
def test_size_among_the_outputs_does_not_prevent_undo(tmp_path: Path) -> None:
    model = Program(lambda m, x: (m.a(x) / 4 * m.b(x), x.shape[0]), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    result = quick(randomise(model), {"x": X}, tmp_path / "bundle", dynamic=BATCH, transformations=MergeLinears())
    assert result.manifest.undone == ["merge-linears"]


@pytest.mark.slow
def test_graph_module_of_torch_fx_is_exported(tmp_path: Path) -> None:
    block = randomise(Program(lambda m, x: m.a(x) / 4 * m.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    graph_module = fx.symbolic_trace(block)
    before = graph_module.code
    result = export(graph_module, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert result.transformed_nodes["merge-linears"]
    assert graph_module.code == before
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(result, x=x)["output"], block(x), rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("file_format", ["pt2", "onnx"])
def test_exported_program_is_exported(file_format: Any, tmp_path: Path) -> None:
    block = exports.block()
    dims = {name: torch.export.Dim(name, min=2, max=32) for name in ("batch", "sequence")}
    axes = {0: dims["batch"], 1: dims["sequence"]}
    program = torch.export.export(block, (), exports.batch(), dynamic_shapes={"x": axes, "mask": axes})
    result = export(program, exports.batch(), tmp_path / "bundle", formats=[file_format])
    assert result.transformed_nodes["merge-linears"]
    batch = exports.batch(4, 9)
    torch.testing.assert_close(run(result, **batch)["hidden"], block(**batch)["hidden"], rtol=1e-4, atol=1e-5)


def test_plain_network_needs_only_an_input(tmp_path: Path) -> None:
    model = randomise(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    result = export(model, X, tmp_path / "bundle")
    assert result.manifest.inputs[0].shape == ["batch", 4]
    assert result.manifest.fixed_axes == ["input[1] = 4"]
    x = torch.randn(9, 4)
    torch.testing.assert_close(run(result, input=x)["output"], model(x), rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied_in_effect(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = randomise(Tied())
    result = export(model, {"ids": torch.arange(6).reshape(2, 3)}, tmp_path / "bundle", dynamic={
        "ids": {0: "batch", 1: "sequence"},
    })  # fmt: skip
    assert model.head.weight is model.embed.weight
    ids = torch.randint(0, 10, (5, 7))
    torch.testing.assert_close(run(result, ids=ids)["output"], model(ids), rtol=1e-4, atol=1e-5)


class Kinds(nn.Module):
    """Outputs of every kind: booleans, integers, scalars, empty tensors, sizes, None, repeats and nested containers."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "positive": x > 0,
            "largest": x.argmax(-1),
            "sum": x.sum(),
            "empty": x[:, :0],
            "size": x.shape[0],
            "nothing": None,
            "nested": [x.abs(), {"again": x}],
            "infinite": x.masked_fill(x > 1, float("inf")),
        }


def test_outputs_of_every_kind_go_into_every_format(tmp_path: Path) -> None:
    result = export(Kinds().eval(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    names = [output.name for output in result.manifest.outputs]
    assert names == ["positive", "largest", "sum", "empty", "nested.0", "nested.1.again", "infinite"]
    x = torch.randn(7, 4)
    got = run(result, x=x)
    assert torch.equal(got["positive"], x > 0)
    assert torch.equal(got["largest"], x.argmax(-1))
    assert torch.equal(got["nested.1.again"], x)
    assert all(target.passed for target in verify(result.output).targets)


@pytest.mark.slow
def test_difference_from_an_exact_zero_can_be_recorded(tmp_path: Path) -> None:
    """The sum is exact in float64, so that every element is zero. In float32 it is not, for any candidate."""

    class Cancelling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((((x + 1e11) - 1e11) - x, x * 1e2))

    result = quick(Cancelling(), {"x": torch.full((3, 4), 100.0)}, tmp_path / "bundle", dynamic=BATCH)
    assert all(target.passed for target in verify(result.output).targets)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [  # ONNX Runtime lacks some operators in the other precisions
        (torch.float64, ["torchscript", "pt2"]),
        (torch.float16, ["torchscript", "onnx", "pt2"]),
        (torch.bfloat16, ["torchscript", "pt2"]),
    ],
)
def test_other_precisions_are_exported(dtype: torch.dtype, formats: list[str], tmp_path: Path) -> None:
    inputs = {**exports.batch(), "x": exports.batch()["x"].to(dtype)}
    block = exports.block().to(dtype)
    result = export(block, inputs, tmp_path / "bundle", dynamic=exports.DYNAMIC, formats=formats)
    assert all(target.passed for target in verify(result.output).targets)
    assert result.manifest.inputs[0].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.slow
def test_output_may_have_the_name_of_a_node_in_the_graph(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.a(x).relu()
            return {"linear": self.b(hidden), "a.weight": hidden, "relu": x + 1}

    result = export(Named().eval(), {"x": X}, tmp_path / "bundle", formats=["onnx"])
    outputs = [value.name for value in onnx.load(result.files["onnx"]).graph.output]
    assert outputs == ["linear", "a.weight", "relu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounding up a size", "a sparse weight"])
def test_unsupported_part_of_a_pt2_file_is_reported(name: str, tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.eye(4).to_sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.to_dense().sum()

    model = Sparse() if name == "a sparse weight" else Program(lambda m, x: x[:, : math.ceil(x.shape[1] / 3)])
    with pytest.raises(ExportError, match=r"export.formats: pt2: .*\nHint: Leave"):
        quick(
            model, {"x": torch.rand(3, 12)}, tmp_path / "bundle", dynamic={"x": {0: "batch", 1: "n"}}, formats=["pt2"]
        )


@pytest.mark.slow
def test_inputs_of_a_graph_module_are_matched_by_name(tmp_path: Path) -> None:
    """Inputs in any order become the graph's order. Equal values would hide a mistake."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y * 3

    inputs = {"y": torch.ones(3, 4), "x": torch.ones(3, 4)}
    dynamic = {name: {0: "batch"} for name in inputs}
    result = export(torch.fx.symbolic_trace(Two().eval()), inputs, tmp_path / "bundle", dynamic=dynamic)
    for name, path in result.files.items():
        ((_, run), *_) = targets.open_file(path, name, ["output"])
        assert torch.equal(run({"x": torch.ones(2, 4), "y": torch.zeros(2, 4)})["output"], torch.full((2, 4), 2.0))
    with pytest.raises(TraceError, match="expected x, y, found x"):
        export(torch.fx.symbolic_trace(Two().eval()), {"x": X}, tmp_path / "other", dynamic=BATCH)


class MaskedOut(nn.Module):
    """Adds -1e9 where the mask is zero.

    In a masked row, float32 keeps only this number; float64 keeps the scores too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.q, self.k, self.o = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        h = self.embed(input_ids)
        scores = self.q(h) @ self.k(h).transpose(1, 2) / 32**0.5
        scores = scores + (1.0 - attention_mask[:, None, :].to(h.dtype)) * -1e9
        return h + 0.1 * self.o(scores.softmax(-1) @ h)


class OnePercentMore(Transformation):
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        (output,) = graph_module.graph.find_nodes(op="output")
        (result,) = output.all_input_nodes
        with graph_module.graph.inserting_before(output):
            more = graph_module.graph.call_function(operator.mul, (result, 1.01))
        output.replace_input_with(result, more)
        return graph_module


@pytest.mark.slow
def test_masked_row_hides_no_fault_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MaskedOut().eval()
    inputs = {"input_ids": torch.randint(0, 99, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.int64)}
    dynamic = {name: {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 48)} for name in inputs}
    result = quick(model, inputs, tmp_path / "bundle", dynamic=dynamic)
    assert result.manifest.parity.unguided
    with pytest.raises(ParityError):
        quick(model, inputs, tmp_path / "other", dynamic=dynamic, transformations=[OnePercentMore()])


@pytest.mark.slow
def test_complex_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="complex"):
        quick(Program(lambda m, x: torch.fft.fft(x)), {"x": X}, tmp_path / "bundle", dynamic=BATCH)


def detections(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return x[x[:, 0] > threshold]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "is_proven"),
    [
        (Program(lambda m, x: detections(x, 1e3)), False),
        (Program(lambda m, x: detections(x, 0.0)), True),
        (Program(lambda m, x: (x * 2, x[:, :0])), True),
    ],
)
def test_output_that_is_always_empty_here_is_refused(model: nn.Module, is_proven: bool, tmp_path: Path) -> None:
    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0]])
    if is_proven:
        assert quick(model, {"x": x}, tmp_path / "b", effort="quick").passed
    else:
        with pytest.raises(ParityError, match="output: the output cannot be checked, because it has no elements"):
            quick(model, {"x": x}, tmp_path / "b", effort="quick")


class Masking(nn.Module):
    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = mask if mask.dtype is torch.bool else mask == 0
        return self.encoder(x, src_key_padding_mask=hidden)  # type: ignore[no-any-return]


# The second hides nothing, so that only another case shows the padding.
@pytest.mark.slow
@pytest.mark.parametrize("mask", [torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]), torch.zeros(2, 5, dtype=torch.bool)])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_with_zero_padding_outside_a_trace_gets_a_hint(mask: torch.Tensor, tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), "mask": mask}
    with pytest.raises(ParityError, match=r"Build the torch.nn.TransformerEncoder with enable_nested_tensor=False"):
        export(randomise(Masking(nested=True)).eval(), inputs, tmp_path / "nested", formats=["pt2"])
    assert export(randomise(Masking(nested=False)).eval(), inputs, tmp_path / "plain", formats=["pt2"]).passed


class _PackedTexts(nn.Module):
    """Counts the ids of each text, and packs the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 5, padding_idx=0)
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        lengths = (ids != 0).sum(1)
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        steps, states = self.gru(packed)
        return {"highest": pad_packed_sequence(steps, batch_first=True)[0].amax(1), "states": states}


@pytest.mark.slow
def test_texts_of_any_length_are_packed(tmp_path: Path) -> None:
    def texts(*lengths: int) -> torch.Tensor:
        return torch.randint(1, 30, (len(lengths), 9)) * (torch.arange(9) < torch.tensor(lengths)[:, None])

    model = _PackedTexts().eval()
    dynamic = {"ids": {0: Dim("batch", 1, 32), 1: Dim("time", 1, 60)}}
    formats = ["onnx", "torchscript", "pt2"]
    result = quick(model, {"ids": texts(4, 9, 2)}, tmp_path / "bundle", dynamic=dynamic, formats=formats)
    for ids in (texts(3, 1, 5, 9, 9), texts(6), texts(1)[:, :1]):
        outputs, expected = run(result, ids=ids), model(ids)
        for name, value in expected.items():
            torch.testing.assert_close(outputs[name], value.detach(), rtol=1e-4, atol=1e-5)
