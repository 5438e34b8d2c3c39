"""Exporting a model that is in memory: what comes back, and that the caller's model stays as it was."""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import fx, nn
from torch.fx import GraphModule

from optexport import export, runtimes
from optexport.errors import ConfigError, ExportError, OptexportError, ParityError, TraceError
from optexport.pipeline import Result
from optexport.registry import PRESET
from optexport.signature import Dim
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    KeepOutputs,
    MergeLinears,
    SinkSelect,
    Transformation,
)
from optexport.verification import verify
from tests import exports, models
from tests.models import randomise
from tests.transformations.programs import Program

X = torch.linspace(-2, 2, 12).reshape(3, 4)
BATCH = {"x": {0: "batch"}}


def quick(model: nn.Module, inputs: Any, output: Path, **options: Any) -> Result:
    """Exports to the format that is written fastest."""
    return export(model.eval(), inputs, output, **{"formats": ["pt2"], "transformations": [], **options})


def run(result: Result, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every file of a result gives, after checking that all give the same."""
    names = [output.name for output in result.manifest.outputs]
    found = [run(inputs) for name, path in result.files.items() for _, run in runtimes.open_file(path, name, names)]
    for one, other in itertools.pairwise(found):
        for name in names:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    return found[0]


def test_the_result_tells_what_was_proven_and_where_it_lies() -> None:
    result = exports.exported()
    assert result.passed is True
    assert [place.place for place in result.parity][:2] == ["original", "transformed graph"]
    assert all(place.passed for place in result.parity)
    assert list(result.files) == ["torchscript", "onnx", "pt2"]
    assert all(path.is_file() and path.parent == result.output for path in result.files.values())
    assert result.transformed_nodes["change-true-div-to-mul-by-inverse"] == ["div"]
    assert len(result.transformed_nodes["merge-linears"]) == 1
    assert result.manifest.artifacts[1].path == "model.onnx"
    assert result.run_id is None
    metadata = {entry.key for entry in onnx.load(result.files["onnx"]).metadata_props}
    assert {"optexport.version", "optexport.weights_sha256", "optexport.transformations"} <= metadata


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that can be seen of a model: values and identities of its weights, attributes, hooks, modes, configs."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                seen |= {f"{name}.{key}.{inner}": (id(v), getattr(v, "_version", 0)) for inner, v in value.items()}
            elif isinstance(value, bool | int | float | str | tuple | list | dict | set):
                seen[f"{name}.{key}"] = repr(value)
            else:
                seen[f"{name}.{key}"] = id(value)
        if hasattr(module, "config"):
            seen[f"{name} config"] = str(module.config)
    seen["requires_grad"] = [p.requires_grad for p in model.parameters()]
    seen["class"] = type(model)
    return seen


@pytest.mark.parametrize("name", ["block", "llama"])
def test_the_callers_model_and_inputs_stay_as_they_were(name: str, tmp_path: Path) -> None:
    model = exports.block() if name == "block" else models.model(name)
    inputs = exports.batch() if name == "block" else models.inputs(name, 2, 9)
    model.register_forward_hook(hook := lambda module, args, output: None)
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    given = {key: value.clone() for key, value in inputs.items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    export(model, inputs, tmp_path / "bundle", formats=["torchscript", "pt2"])
    assert torch.equal(torch.rand(3), expected)
    assert snapshot(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(inputs[key], value) for key, value in given.items())
    assert list(next(iter([model]))._forward_hooks.values()) == [hook]
    model._forward_hooks.clear()


class FoldingInPlace(Transformation):
    """Halves one weight and doubles the next, in the very modules that the graph shares with the model."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            graph_module.get_submodule("a").weight.mul_(0.5)
            graph_module.get_submodule("b").weight.mul_(2.0)
        return graph_module


def test_a_rule_that_works_in_place_does_not_change_the_callers_model(tmp_path: Path) -> None:
    model = randomise(Program(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4, False), b=nn.Linear(4, 2)))
    before = copy.deepcopy(model.state_dict())
    try:
        quick(model, {"x": X}, tmp_path / "bundle", transformations=FoldingInPlace(), dynamic=BATCH)
    except OptexportError:
        pass  # to refuse such a rule is as good
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_train_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it is in train mode") as caught:
        export(exports.block().train(), exports.batch(), tmp_path / "bundle")
    assert "model.eval()" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dropout(self.layer(x))
        return y


def test_a_part_in_train_mode_is_refused_too(tmp_path: Path) -> None:
    model = Dropping().eval()
    model.dropout.train()
    with pytest.raises(OptexportError):
        export(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert list(tmp_path.iterdir()) == []


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Counting(nn.Module):
    """Gives another result at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class Unsteady(nn.Module):
    """Whose float64 self computes something else: no distance from it means anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float32 else -x


@pytest.mark.parametrize("make", [Random, Counting, Unsteady])
def test_a_model_that_nothing_can_be_proven_of_is_refused(make: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(OptexportError) as caught:
        quick(make(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert caught.value.exit_code in (3, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_module_of_torch_fx_is_exported(tmp_path: Path) -> None:
    block = randomise(Program(lambda m, x: m.a(x) / 4 + m.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    graph_module = fx.symbolic_trace(block)
    before = graph_module.code
    result = export(graph_module, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert result.transformed_nodes["merge-linears"]
    assert graph_module.code == before
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(result, x=x)["output"], block(x), rtol=1e-4, atol=1e-5)


def test_an_exported_program_is_exported(tmp_path: Path) -> None:
    block = exports.block()
    dims = {name: torch.export.Dim(name, min=2, max=32) for name in ("batch", "sequence")}
    axes = {0: dims["batch"], 1: dims["sequence"]}
    program = torch.export.export(block, (), exports.batch(), dynamic_shapes={"x": axes, "mask": axes})
    result = export(program, exports.batch(), tmp_path / "bundle", formats=["onnx", "pt2"])
    assert result.transformed_nodes["merge-linears"]
    batch = exports.batch(4, 9)
    torch.testing.assert_close(run(result, **batch)["hidden"], block(**batch)["hidden"], rtol=1e-4, atol=1e-5)


def test_a_plain_network_needs_nothing_but_an_input(tmp_path: Path) -> None:
    model = randomise(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    result = export(model, X, tmp_path / "bundle")
    assert result.manifest.inputs[0].shape == ["batch", 4]
    assert result.manifest.fixed_axes == ["input[1] = 4"]
    x = torch.randn(9, 4)
    torch.testing.assert_close(run(result, input=x)["output"], model(x), rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_does_not_fix_the_batch(tmp_path: Path) -> None:
    model = randomise(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    result = quick(model, X[:1], tmp_path / "bundle")
    assert result.manifest.inputs[0].shape == ["batch", 4]


def test_all_batches_that_are_given_are_checked_on(tmp_path: Path) -> None:
    several = [exports.batch(2, 5), exports.batch(1, 9), exports.batch(3, 3)]
    result = quick(exports.block(), several, tmp_path / "bundle", dynamic=exports.DYNAMIC)
    assert {"data 0", "data 1", "data 2"} <= set(result.manifest.parity.cases)

    class Trap(nn.Module):
        """Right but for one value, which only the second batch holds."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x == 5, x * 1.5, x)

    class Wrong(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            for node in graph_module.graph.nodes:
                if node.target is torch.ops.aten.where.self:
                    node.replace_all_uses_with(node.args[2])
            return graph_module

    quick(Trap(), [{"x": X}, {"x": X + 1}], tmp_path / "good", transformations=Wrong(), dynamic=BATCH)
    with pytest.raises(ParityError, match="at data 1"):
        quick(
            Trap(), [{"x": X}, {"x": torch.full((3, 4), 5.0)}], tmp_path / "trap", transformations=Wrong(),
            dynamic=BATCH,
        )  # fmt: skip


def test_dynamic_axes_may_be_given_by_name_or_with_their_range(tmp_path: Path) -> None:
    by_name = quick(exports.block(), exports.batch(), tmp_path / "name", dynamic={
        "x": {0: "batch", 1: "sequence"}, "mask": {0: "batch", 1: "sequence"},
    })  # fmt: skip
    assert by_name.manifest.inputs[0].shape == ["batch", "sequence", 8]
    by_range = exports.exported()
    assert by_range.manifest.dims["batch"].max == 32
    static = quick(exports.block(), exports.batch(), tmp_path / "static", dynamic={})
    assert static.manifest.inputs[0].shape == [2, 5, 8]
    assert static.manifest.dims == {}
    assert all(place.passed for place in verify(static.output).places)


def test_an_axis_that_the_model_fixes_against_the_declaration_is_an_error(tmp_path: Path) -> None:
    model = randomise(nn.Linear(4, 2))
    for width in ("width", Dim("width", 2, 64)):
        with pytest.raises(TraceError) as caught:
            quick(model, {"input": X}, tmp_path / "bundle", dynamic={"input": {0: "batch", 1: width}})
        assert "width" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("formats", [["onnx"], ["pt2", "torchscript"], ("torchscript",), ["pt2", "pt2"]])
def test_only_the_formats_asked_for_are_written(formats: Any, tmp_path: Path) -> None:
    result = export(exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, formats=formats)
    assert list(result.files) == list(dict.fromkeys(formats))
    models_there = {path.name for path in result.output.iterdir() if path.name.startswith("model.")}
    assert models_there == {path.name for path in result.files.values()}
    assert all(place.passed for place in verify(result.output).places)


def several_rules() -> Iterator[Transformation]:
    yield MergeLinears()
    yield ChangeTrueDivToMulByInverse(exact=True)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (MergeLinears, ["merge-linears"]),
        (lambda: [], []),
        (several_rules, ["merge-linears", "change-true-div-to-mul-by-inverse"]),
        (lambda: None, list(PRESET)),
    ],
)
def test_transformations_may_be_one_several_none_or_the_preset(
    make: Callable[[], Any], rules: Any, tmp_path: Path
) -> None:
    result = quick(
        exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, transformations=make()
    )
    named = [t.rule for t in result.manifest.transformations]
    assert named == rules


class Marking(Transformation):
    """Marks one negation, and changes nothing."""

    preserves_computation = True

    def __init__(self, position: int) -> None:
        self.position = position

    def transform(self, graph_module: GraphModule) -> GraphModule:
        negations = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.neg.default]
        self.mark_as_transformed(negations[self.position])
        return graph_module


def test_a_rule_that_is_applied_twice_is_counted_twice(tmp_path: Path) -> None:
    model = Program(lambda m, x: (-x, (-x).neg().exp()))
    result = quick(model, {"x": X}, tmp_path / "bundle", transformations=[Marking(0), Marking(1)], dynamic=BATCH)
    (nodes,) = result.transformed_nodes.values()
    assert nodes == [n for t in result.manifest.transformations for c in t.changes for n in c.nodes]
    assert len(nodes) == 2


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
    """Outputs of every kind: booleans, integers, scalars, empty ones, sizes, nothing, repeats, nested ones."""

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
    assert all(place.passed for place in verify(result.output).places)


def test_a_difference_where_the_exact_result_is_zero_can_be_written_down(tmp_path: Path) -> None:
    """In float64 the sum is exact and every element zero; in float32 it is off, and so is every candidate."""

    class Cancelling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((((x + 1e11) - 1e11) - x, x * 1e2))

    result = quick(Cancelling(), {"x": torch.full((3, 4), 100.0)}, tmp_path / "bundle", dynamic=BATCH)
    assert all(place.passed for place in verify(result.output).places)


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
    assert all(place.passed for place in verify(result.output).places)
    assert result.manifest.inputs[0].dtype == str(dtype).removeprefix("torch.")


MISTAKES: dict[str, dict[str, Any]] = {
    "no format": {"formats": ()},
    "an unknown format": {"formats": ["tflite"]},
    "a format that is no list": {"formats": "onnx"},
    "a multiple of nothing": {"multiple": 0},
    "a negative tolerance": {"atol": -1.0},
    "an opset of long ago": {"opset": 3},
    "an axis of no input": {"dynamic": {"z": {0: "batch"}}},
    "an axis that the input lacks": {"dynamic": {"input": {5: "batch"}}},
    "an axis without a name": {"dynamic": {"input": {0: 3}}},
    "axes that are no mapping": {"dynamic": {"input": ["batch", None]}},
    "sizes of nothing": {"dynamic": {"input": {0: Dim("batch", 0, 8)}}},
    "the name of a rule": {"transformations": "merge-linears"},
    "a class of rules": {"transformations": [MergeLinears]},
    "a multiple that the model itself fails": {"multiple": 0.5},
    "no batch": {"inputs": []},
    "a batch of numbers": {"inputs": {"input": 3}},
    "a batch of lists": {"inputs": {"input": [[1.0, 2.0, 3.0, 4.0]]}},
    "an input that the model lacks": {"inputs": {"output": X}},
    "an empty batch": {"inputs": {}},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_argument_that_cannot_be_meant_is_one_clear_error(name: str, tmp_path: Path) -> None:
    given = {"inputs": {"input": X}, **MISTAKES[name]}
    with pytest.raises((ConfigError, TraceError)) as caught:
        export(randomise(nn.Linear(4, 2)), given.pop("inputs"), tmp_path / "bundle", **given)
    assert "pydantic" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_no_module_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a function, not a module"):
        export(lambda x: x, {"x": X}, tmp_path / "bundle")  # type: ignore[arg-type]


_BRANCHES: dict[str, tuple[Any, tuple[int, int], Any]] = {
    "a large product": (lambda h, w: h * w > 1_000_000, (64, 64), (Dim("h", 32, 4096), Dim("w", 32, 4096))),
    "one product": (lambda h, w: h * w == 35, (8, 8), (Dim("h", 1, 64), Dim("w", 1, 64))),
    "a large multiple": (lambda h, w: h % 1000 == 0, (10, 3), (Dim("h", 1, 3999), Dim("w", 1, 8))),
    "a large size": (lambda h, w: h > 5000, (10, 3), (Dim("h", 1, 9000), Dim("w", 1, 8))),
}


@pytest.mark.parametrize("name", _BRANCHES)
def test_a_branch_on_sizes_far_from_the_traced_ones_is_found(name: str, tmp_path: Path) -> None:
    condition, shape, (h, w) = _BRANCHES[name]
    model = Program(lambda m, x: x * 2 if condition(*x.shape) else x + 1)
    with pytest.raises((ParityError, TraceError)):  # of a declared range torch itself sees some
        quick(model, {"x": torch.rand(shape)}, tmp_path / "bundle", dynamic={"x": {0: h, 1: w}})


def test_a_range_that_nobody_declared_ends_where_the_model_goes_another_way(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2 if x.shape[0] > 5000 else x + 1)
    result = quick(model, {"x": torch.rand(10, 3)}, tmp_path / "bundle", dynamic={"x": {0: "h", 1: "w"}})
    assert result.manifest.dims["h"].max == 5000


def test_a_size_that_float32_rounds_otherwise_is_tried(tmp_path: Path) -> None:
    model = Program(lambda m, x: nn.functional.interpolate(x, scale_factor=0.7, mode="bilinear"))
    dynamic = {"x": {2: Dim("h", 8, 256), 3: Dim("w", 8, 256)}}
    with pytest.raises(ParityError, match="onnx: output, at h 90"):  # 0.7 * 90 is 62.99999 in float64 alone
        quick(model, {"x": torch.rand(1, 2, 17, 20)}, tmp_path / "bundle", dynamic=dynamic, formats=["onnx"])


def test_an_output_may_be_named_as_something_inside_the_graph(tmp_path: Path) -> None:
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


def test_sizes_that_are_made_longer_hold_no_ties_that_the_data_did_not(tmp_path: Path) -> None:
    sorts = Program(lambda m, x: x.sort(1))
    result = quick(sorts, {"x": torch.randn(3, 17)}, tmp_path / "bundle", dynamic={"x": {1: Dim("n", 8, 200)}})
    assert result.passed


def test_the_end_of_a_huge_range_is_not_built(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2)
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 2**31 - 1)}})
    assert result.passed


@pytest.mark.parametrize("name", ["rounding up a size", "a sparse weight"])
def test_what_a_pt2_file_cannot_hold_is_told(name: str, tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.eye(4).to_sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.to_dense().sum()

    model = Sparse() if name == "a sparse weight" else Program(lambda m, x: x[:, : math.ceil(x.shape[1] / 3)])
    with pytest.raises(ExportError, match=r"export.formats: pt2: .*\n  Leave"):
        quick(
            model, {"x": torch.rand(3, 12)}, tmp_path / "bundle", dynamic={"x": {0: "batch", 1: "n"}}, formats=["pt2"]
        )


def test_only_the_outputs_that_are_kept_are_proven_and_written(tmp_path: Path) -> None:
    rules = [KeepOutputs(outputs=("pooler_output",)), SinkSelect(), MergeLinears()]
    result = export(models.model("bert"), models.inputs("bert"), tmp_path / "bundle", transformations=rules)
    assert [output.name for output in result.manifest.outputs] == ["pooler_output"]
    assert result.transformed_nodes["sink-select"]
    inputs = models.inputs("bert", 3, 11)
    with torch.no_grad():
        want = models.model("bert")(**inputs).pooler_output
    torch.testing.assert_close(run(result, **inputs)["pooler_output"], want)


class Branching(nn.Module):
    """Goes another way at some sizes, which a trace does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100 if x.shape[0] % 11 == 0 else x * 2


@pytest.mark.parametrize("dynamic", [{"x": {0: Dim("batch", 1, 64)}}, {"x": {0: "batch"}}, None])
def test_a_branch_on_a_size_is_found(dynamic: Any, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="batch 11"):
        quick(Branching(), {"x": torch.rand(3, 4)}, tmp_path / "bundle", dynamic=dynamic)


def test_a_branch_on_a_size_that_is_not_declared_does_no_harm(tmp_path: Path) -> None:
    result = quick(Branching(), {"x": torch.rand(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 10)}})
    assert result.passed


def test_inputs_of_a_graph_module_go_by_name(tmp_path: Path) -> None:
    """In the graph's own order, whichever they are given in; equal values would hide a mistake."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y * 3

    given = {"y": torch.ones(3, 4), "x": torch.ones(3, 4)}
    dynamic = {name: {0: "batch"} for name in given}
    result = export(torch.fx.symbolic_trace(Two().eval()), given, tmp_path / "bundle", dynamic=dynamic)
    for name, path in result.files.items():
        ((_, run), *_) = runtimes.open_file(path, name, ["output"])
        assert torch.equal(run({"x": torch.ones(2, 4), "y": torch.zeros(2, 4)})["output"], torch.full((2, 4), 2.0))
    with pytest.raises(TraceError, match="the graph takes x, y, and is given x"):
        export(torch.fx.symbolic_trace(Two().eval()), {"x": X}, tmp_path / "other", dynamic=BATCH)


def test_both_ends_of_a_range_are_checked(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2)
    result = quick(model, {"x": torch.rand(3, 768)}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 64)}})
    assert {"batch 1", "batch 64"} <= set(result.manifest.parity.cases)


class MaskedOut(nn.Module):
    """Adds -1e9 where the mask is zero: of a whole row float32 keeps nothing but that, and float64 the scores too."""

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


def test_a_row_that_is_masked_out_hides_no_fault_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MaskedOut().eval()
    given = {"input_ids": torch.randint(0, 99, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.int64)}
    dynamic = {name: {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 48)} for name in given}
    result = quick(model, given, tmp_path / "bundle", dynamic=dynamic)
    assert result.manifest.parity.unguided
    with pytest.raises(ParityError):
        quick(model, given, tmp_path / "other", dynamic=dynamic, transformations=[OnePercentMore()])


def test_a_complex_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="complex"):
        quick(Program(lambda m, x: torch.fft.fft(x)), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
