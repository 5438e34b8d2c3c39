"""Exporting a model in memory: the result, and the caller's unchanged model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import optexport
from optexport import export
from optexport.errors import ConfigError, OptexportError, ParityError, TraceError
from optexport.parity.verify import verify
from optexport.signature.signature import Dim
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    KeepOutputs,
    MergeLinears,
    SinkSelect,
    Transformation,
)
from optexport.transformations.registry import PRESET
from tests._helpers import cli, exports, models
from tests._helpers.exports import BATCH, X, quick, run
from tests._helpers.graphs import Program
from tests._helpers.models import randomise


def test_result_reports_the_verification_and_the_folder() -> None:
    result = exports.exported()
    assert result.passed is True
    assert [target.target for target in result.parity][:2] == ["original", "graph"]
    assert all(target.passed for target in result.parity)
    assert list(result.files) == ["torchscript", "onnx", "pt2"]
    assert all(path.is_file() and path.parent == result.output for path in result.files.values())
    assert result.transformed_nodes["change-true-div-to-mul-by-inverse"] == ["div"]
    assert len(result.transformed_nodes["merge-linears"]) == 1
    assert result.manifest.artifacts[1].path == "model.onnx"
    assert result.run_id is None
    metadata = {entry.key for entry in onnx.load(result.files["onnx"]).metadata_props}
    assert {"optexport.version", "optexport.weights_sha256", "optexport.transformations"} <= metadata


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Returns all visible state of a model: values and identities of its weights, attributes, hooks, modes, configs."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                state |= {f"{name}.{key}.{inner}": (id(v), getattr(v, "_version", 0)) for inner, v in value.items()}
            elif isinstance(value, bool | int | float | str | tuple | list | dict | set):
                state[f"{name}.{key}"] = repr(value)
            else:
                state[f"{name}.{key}"] = id(value)
        if hasattr(module, "config"):
            state[f"{name} config"] = str(module.config)
    state["requires_grad"] = [p.requires_grad for p in model.parameters()]
    state["class"] = type(model)
    return state


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["block", "llama"])
def test_callers_model_and_inputs_stay_unchanged(name: str, tmp_path: Path) -> None:
    model = exports.block() if name == "block" else models.model(name)
    inputs = exports.batch() if name == "block" else models.inputs(name, 2, 9)
    model.register_forward_hook(hook := lambda module, args, output: None)
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    copies = {key: value.clone() for key, value in inputs.items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    export(model, inputs, tmp_path / "bundle", formats=["torchscript", "pt2"])
    assert torch.equal(torch.rand(3), expected)
    assert snapshot(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(inputs[key], value) for key, value in copies.items())
    assert list(next(iter([model]))._forward_hooks.values()) == [hook]
    model._forward_hooks.clear()


class FoldingInPlace(Transformation):
    """Halves one weight and doubles the next, in the modules that the graph shares with the model."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            graph_module.get_submodule("a").weight.mul_(0.5)
            graph_module.get_submodule("b").weight.mul_(2.0)
        return graph_module


def test_rule_that_works_in_place_keeps_the_callers_model(tmp_path: Path) -> None:
    model = randomise(Program(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4, False), b=nn.Linear(4, 2)))
    before = copy.deepcopy(model.state_dict())
    try:
        quick(model, {"x": X}, tmp_path / "bundle", transformations=FoldingInPlace(), dynamic=BATCH)
    except OptexportError:
        pass  # refusing such a rule is fine too
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_all_provided_batches_are_checked(tmp_path: Path) -> None:
    several = [exports.batch(2, 5), exports.batch(1, 9), exports.batch(3, 3)]
    result = quick(exports.block(), several, tmp_path / "bundle", dynamic=exports.DYNAMIC)
    assert {"traced", "data 1", "data 2"} <= set(result.manifest.parity.cases)

    class Trap(nn.Module):
        """Right except for one value, which only the second batch has."""

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


@pytest.mark.sample(1)
@pytest.mark.parametrize("formats", [("torchscript",), ["pt2", "torchscript"], ["onnx"]])
def test_only_requested_formats_are_written(formats: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dynamic": exports.DYNAMIC, "effort": "quick"}
    result = export(exports.block(), exports.batch(), tmp_path / "bundle", formats=formats, **options)
    assert list(result.files) == list(formats)
    models_there = {path.name for path in result.output.iterdir() if path.name.startswith("model.")}
    assert models_there == {path.name for path in result.files.values()}
    assert all(target.passed for target in verify(result.output).targets)


def several_rules() -> Iterator[Transformation]:
    yield MergeLinears()
    yield ChangeTrueDivToMulByInverse(exact=True)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (MergeLinears, ["merge-linears"]),
        (lambda: [], []),
        (several_rules, ["merge-linears", "change-true-div-to-mul-by-inverse"]),
        (lambda: None, list(PRESET)),
    ],
)
def test_transformations_may_be_one_several_empty_or_the_preset(
    make: Callable[[], Any], rules: Any, tmp_path: Path
) -> None:
    result = quick(
        exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, transformations=make()
    )
    named = [t.rule for t in result.manifest.transformations]
    assert named == rules


class Marking(Transformation):
    """Marks one negation and changes nothing."""

    preserves_computation = True

    def __init__(self, position: int) -> None:
        self.position = position

    def transform(self, graph_module: GraphModule) -> GraphModule:
        negations = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.neg.default]
        self.mark_as_transformed(negations[self.position])
        return graph_module


@pytest.mark.slow
def test_rule_that_is_applied_twice_is_counted_twice(tmp_path: Path) -> None:
    model = Program(lambda m, x: (-x, (-x).neg().exp()))
    result = quick(model, {"x": X}, tmp_path / "bundle", transformations=[Marking(0), Marking(1)], dynamic=BATCH)
    (nodes,) = result.transformed_nodes.values()
    assert nodes == [n for t in result.manifest.transformations for c in t.changes for n in c.nodes]
    assert len(nodes) == 2


MISTAKES: dict[str, dict[str, Any]] = {
    "no format": {"formats": ()},
    "an unknown format": {"formats": ["tflite"]},
    "an unknown format outside a list": {"formats": "tflite"},
    "a multiple of nothing": {"noise_multiple": 0},
    "a negative tolerance": {"atol": -1.0},
    "an opset of long ago": {"opset": 3},
    "an axis of no input": {"dynamic": {"z": {0: "batch"}}},
    "an axis that the input lacks": {"dynamic": {"input": {5: "batch"}}},
    "an axis without a name": {"dynamic": {"input": {0: 3}}},
    "axes in a list": {"dynamic": {"input": ["batch", None]}},
    "sizes of nothing": {"dynamic": {"input": {0: Dim("batch", 0, 8)}}},
    "the name of no rule": {"transformations": "merge-linear"},
    "a class of rules": {"transformations": [MergeLinears]},
    "a class for a rule": {"transformations": MergeLinears},
    "a number for rules": {"transformations": 3},
    "a name for axes": {"dynamic": "batch"},
    "names for gates": {"metrics": ["cosine"]},
    "a precision of no format": {"precision": "int8"},
    "no formats": {"formats": None},
    "a format number": {"formats": 3},
    "a multiple that the model itself fails": {"noise_multiple": 0.5},
    "no batch": {"inputs": []},
    "a batch of numbers": {"inputs": {"input": 3}},
    "a batch of lists": {"inputs": {"input": [[1.0, 2.0, 3.0, 4.0]]}},
    "an input that the model lacks": {"inputs": {"output": X}},
    "an empty batch": {"inputs": {}},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_argument_is_one_clear_error(name: str, tmp_path: Path) -> None:
    arguments = {"inputs": {"input": X}, **MISTAKES[name]}
    with pytest.raises((ConfigError, TraceError)) as caught:
        export(randomise(nn.Linear(4, 2)), arguments.pop("inputs"), tmp_path / "bundle", **arguments)
    assert "pydantic" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_model_that_is_not_a_module_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model is not an nn\.Module \(found function\)"):
        export(lambda x: x, {"x": X}, tmp_path / "bundle")  # type: ignore[arg-type]


@pytest.mark.slow
def test_only_selected_outputs_are_verified_and_written(tmp_path: Path) -> None:
    rules = [KeepOutputs(outputs=("pooler_output",)), SinkSelect(), MergeLinears()]
    result = export(
        models.model("bert"), models.inputs("bert"), tmp_path / "bundle", transformations=rules, effort="quick"
    )
    assert [output.name for output in result.manifest.outputs] == ["pooler_output"]
    assert result.transformed_nodes["sink-select"]
    inputs = models.inputs("bert", 3, 11)
    with torch.no_grad():
        want = models.model("bert")(**inputs).pooler_output
    torch.testing.assert_close(run(result, **inputs)["pooler_output"], want)


@pytest.mark.slow
def test_path_may_be_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text(cli.MODULE, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(cli.config(), encoding="utf-8")
    result = optexport.run("mine.toml", dump="dump")
    assert optexport.verify(str(result.output)).passed
    assert optexport.verify(PurePath(result.output)).passed  # type: ignore[arg-type]  # as any that os.fspath takes
    assert any((tmp_path / "dump").iterdir())
    with pytest.raises(ConfigError, match=r"the config has no table \[generation\]"):
        optexport.run_generation("mine.toml")


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, 3, b"bundle", "a\0b"])
def test_invalid_path_is_one_clear_error(path: Any) -> None:
    calls: list[Callable[[Any], Any]] = [
        optexport.run,
        optexport.run_generation,
        optexport.verify,
        optexport.Bundle.load,
        optexport.Generator.load,
        lambda path: export(randomise(nn.Linear(4, 2)), X, path),
        lambda path: optexport.export_generation(nn.Linear(4, 2), [], path),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="is not a path"):
            call(path)
