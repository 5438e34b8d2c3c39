"""A run undoes its last reversible rules and compares the graph with the earlier one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from optexport import TransformationError, export
from optexport.pipeline.undo_check import check_undo
from optexport.report.result import Result
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBias,
    MergeLinears,
    ReversibleTransformation,
    Transformation,
)
from optexport.transformations.apply import NamedRule, sharing_copy, transform
from tests._helpers import exports
from tests._helpers.graphs import by_fx


def export_with(tmp_path: Path, *rules: Transformation) -> Result:
    return export(
        exports.block(), exports.batch(), tmp_path / "out", transformations=rules, dynamic=exports.DYNAMIC,
        formats=["pt2"],
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_checks_undo_and_records_it_in_the_manifest(tmp_path: Path) -> None:
    result = export_with(tmp_path, MergeLinears(), ChangeTrueDivToMulByInverse())
    assert result.manifest.undone == ["merge-linears", "change-true-div-to-mul-by-inverse"]


@pytest.mark.slow
def test_rules_without_changes_are_not_reported_as_undone(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    rules = [MergeLinears(), ChangeTrueDivToMulByInverse()]
    result = export(Halves().eval(), {"x": torch.randn(2, 3)}, tmp_path / "out", transformations=rules, formats=["pt2"])
    assert result.manifest.undone == ["change-true-div-to-mul-by-inverse"]


class Leaky(ReversibleTransformation):
    """A reversible transformation whose undo is incomplete."""

    preserves_computation = True

    def __init__(self, leak: str) -> None:
        self.leak = leak

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        linear = copy.deepcopy(graph_module.get_submodule("out"))
        assert isinstance(linear, nn.Linear)
        linear.bias = nn.Parameter(linear.bias.detach() + 0)
        graph_module.set_submodule("out", linear)
        for node in graph_module.graph.find_nodes(op="call_module", target="out"):
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        out = graph_module.get_submodule("out")
        if self.leak == "code":
            with graph_module.graph.inserting_before(next(iter(graph_module.graph.find_nodes(op="output")))):
                graph_module.graph.call_function(torch.zeros, (1,))
        elif self.leak == "names":
            graph_module.register_buffer("left_behind", torch.zeros(1))
        elif self.leak == "values":
            with torch.no_grad():
                out.bias = nn.Parameter(out.bias.detach().nextafter(torch.tensor(9.0)))
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        return graph_module


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("leak", "message"),
    [("code", "the code differs"), ("names", "the names in the state_dict"), ("values", "the values of out.bias")],
)
def test_an_incomplete_undo_fails_the_run_and_says_why(tmp_path: Path, leak: str, message: str) -> None:
    with pytest.raises(TransformationError) as caught:
        export_with(tmp_path, Leaky(leak))
    assert message in str(caught.value)
    assert "Leaky" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_complete_undo_passes(tmp_path: Path) -> None:
    assert export_with(tmp_path, Leaky("")).passed


def traced() -> tuple[fx.GraphModule, Mapping[str, torch.Tensor]]:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.one(x) * (m.two(x) + 1.5) / 2  # type: ignore[operator]

    return by_fx(forward, one=nn.Linear(4, 3), two=nn.Linear(4, 3)), {"x": torch.randn(2, 4)}


def test_only_rules_after_the_last_irreversible_one_are_undone() -> None:
    graph_module, example = traced()
    rules = NamedRule.of([ChangeTrueDivToMulByInverse(), FuseBias(), MergeLinears()])
    transformed = transform(graph_module, rules)
    assert [rule.name for rule in transformed.undoable] == ["merge-linears"]
    assert "1.5" not in transformed.earlier.code
    check_undo(transformed.graph_module, transformed.undoable, transformed.earlier, example)


def test_the_undo_check_does_not_change_the_graph() -> None:
    graph_module, example = traced()
    transformed = transform(graph_module, NamedRule.of([MergeLinears()]))
    code, state = transformed.graph_module.code, copy.deepcopy(transformed.graph_module.state_dict())
    check_undo(transformed.graph_module, transformed.undoable, transformed.earlier, example)
    assert transformed.graph_module.code == code
    after = transformed.graph_module.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


def test_a_sharing_copy_has_its_own_modules_and_the_same_tensors() -> None:
    graph_module, _ = traced()
    copied = sharing_copy(graph_module)
    assert copied.one is not graph_module.one
    assert copied.one.weight is graph_module.one.weight  # type: ignore[union-attr]
