"""The public contract of transformations: the contract of Optimum's classes, marks and compose."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from optexport.errors import TransformationError
from optexport.testing import check_laws, graph_state, outputs
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
    ReversibleTransformation,
    Transformation,
    compose,
)
from tests._helpers import models
from tests._helpers.graphs import by_fx, calls

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class AddInsteadOfMul(Transformation):
    """Replaces every product by a sum."""

    def __init__(self, times: int | None = None) -> None:
        self.times = times

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            node.target = operator.add
        return graph_module


class TwiceTheConstant(ReversibleTransformation):
    """Doubles constant factors; undo halves them."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return self._scale(graph_module, 2)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self._scale(graph_module, 0.5)

    def _scale(self, graph_module: GraphModule, factor: float) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                node.args = tuple(a * factor if isinstance(a, (int, float)) else a for a in node.args)
        return graph_module


class MarkLinears(ReversibleTransformation):
    """Marks linears and changes nothing."""

    def __init__(self, colour: str = "red") -> None:
        self.colour = colour

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in calls(graph_module, nn.Linear):
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        return graph_module


def _two_linears() -> GraphModule:
    return by_fx(lambda m, x: m.q(x) * 3 - m.k(x) / 7, q=nn.Linear(4, 2), k=nn.Linear(4, 2))


def test_a_transformation_changes_the_graph_and_its_code() -> None:
    graph_module = _two_linears()
    after = AddInsteadOfMul()(graph_module)
    assert after is graph_module
    assert "q + 3" in after.code
    (got,) = outputs(after, X)
    torch.testing.assert_close(got, graph_module.q(X) + 3 - graph_module.k(X) / 7)


def test_code_stays_the_same_without_recompiling() -> None:
    graph_module = _two_linears()
    code = graph_module.code
    AddInsteadOfMul()(graph_module, lint_and_recompile=False)
    assert graph_module.code == code
    LintAndRecompile()(graph_module)
    assert graph_module.code != code


def test_broken_graph_is_refused() -> None:
    class UsesWhatComesLater(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            first, second = calls(graph_module, nn.Linear)
            first.args = (second,)
            return graph_module

    with pytest.raises(RuntimeError, match=r"topological|before it has been defined"):
        UsesWhatComesLater()(_two_linears())
    UsesWhatComesLater()(_two_linears(), lint_and_recompile=False)


def test_a_reversible_transformation_is_undone_by_the_same_call() -> None:
    graph_module = _two_linears()
    before = outputs(graph_module, X)
    assert TwiceTheConstant()(graph_module) is graph_module
    assert "q * 6" in graph_module.code
    assert TwiceTheConstant()(graph_module, reverse=True) is graph_module
    assert "q * 3.0" in graph_module.code
    assert torch.equal(outputs(graph_module, X)[0], before[0])


def test_the_rules_of_the_guide_work_on_a_traced_model() -> None:
    graph_module = copy.deepcopy(models.traced("llama"))
    before = outputs(graph_module, models.inputs("llama"))
    products = len(graph_module.graph.find_nodes(op="call_function", target=operator.mul))
    assert products
    TwiceTheConstant()(graph_module)
    TwiceTheConstant()(graph_module, reverse=True)
    for got, want in zip(outputs(graph_module, models.inputs("llama")), before, strict=True):
        assert torch.equal(got, want)
    AddInsteadOfMul()(graph_module)
    assert not graph_module.graph.find_nodes(op="call_function", target=operator.mul)
    assert len(graph_module.graph.find_nodes(op="call_function", target=operator.add)) >= products
    for got, want in zip(outputs(graph_module, models.inputs("llama")), before, strict=True):
        assert got.shape == want.shape
        assert not torch.equal(got, want)


def test_the_example_of_the_guide_doubles_constant_products() -> None:
    graph_module = copy.deepcopy(models.traced("albert"))
    constants = [
        node.args[1]
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul)
        if isinstance(node.args[1], float)
    ]
    assert constants
    TwiceTheConstant()(graph_module)
    doubled = [
        node.args[1]
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul)
        if isinstance(node.args[1], float)
    ]
    assert doubled == [2 * constant for constant in constants]


def test_transformation_promises_nothing_by_default() -> None:
    assert not AddInsteadOfMul().preserves_computation
    assert not TwiceTheConstant().preserves_computation
    for cls in (MergeLinears, FuseBiasInLinear, ChangeTrueDivToMulByInverse, DeepCopy, LintAndRecompile):
        assert cls().preserves_computation
    assert FuseBatchNorm1dInLinear().preserves_computation
    assert FuseBatchNorm2dInConv2d().preserves_computation


def test_only_folded_norms_cannot_be_undone() -> None:
    for rule in (MergeLinears, FuseBiasInLinear, ChangeTrueDivToMulByInverse, DeepCopy, LintAndRecompile):
        assert issubclass(rule, ReversibleTransformation)
    for rule in (FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d):
        assert not issubclass(rule, ReversibleTransformation)


@pytest.mark.parametrize("base", [Transformation, ReversibleTransformation])
def test_class_without_transform_cannot_be_instantiated(base: type[Transformation]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_marks_belong_to_the_transformation_that_set_them() -> None:
    graph_module = _two_linears()
    red, blue = MarkLinears(), MarkLinears("blue")
    linears = calls(graph_module, nn.Linear)
    red(graph_module)
    assert all(red.transformed(node) and not blue.transformed(node) for node in linears)
    blue(graph_module)
    assert red.get_transformed_nodes(graph_module) == blue.get_transformed_nodes(graph_module) == linears
    red(graph_module, reverse=True)
    assert not red.get_transformed_nodes(graph_module)
    assert blue.get_transformed_nodes(graph_module) == linears
    assert not any(blue.transformed(node) for node in graph_module.graph.nodes if node not in linears)


def test_marks_of_an_equal_transformation_count() -> None:
    graph_module = _two_linears()
    MarkLinears()(graph_module)
    assert MarkLinears().get_transformed_nodes(graph_module) == calls(graph_module, nn.Linear)
    assert MergeLinears().get_transformed_nodes(MergeLinears()(_two_linears()))


def test_marks_survive_a_copy_and_are_not_shared_with_it() -> None:
    graph_module = MarkLinears()(_two_linears())
    copied = copy.deepcopy(graph_module)
    MarkLinears()(graph_module, reverse=True)
    assert len(MarkLinears().get_transformed_nodes(copied)) == 2


def test_other_metadata_stays_next_to_the_marks() -> None:
    graph_module = _two_linears()
    node = calls(graph_module, nn.Linear)[0]
    node.meta["custom"] = {"mine": 1}
    MarkLinears()(graph_module)
    MarkLinears()(graph_module, reverse=True)
    assert node.meta["custom"] == {"mine": 1}


def test_a_node_without_the_mark_cannot_be_restored() -> None:
    node = calls(_two_linears(), nn.Linear)[0]
    with pytest.raises(ValueError, match="The node q was not transformed"):
        MarkLinears().mark_as_restored(node)
    MarkLinears("blue").mark_as_transformed(node)
    with pytest.raises(ValueError, match="The node q was not transformed"):
        MarkLinears().mark_as_restored(node)
    MarkLinears("blue").mark_as_restored(node)


def test_node_marked_by_hand_does_not_stop_a_rule() -> None:
    graph_module = _two_linears()
    MergeLinears().mark_as_transformed(calls(graph_module, nn.Linear)[0])
    want = outputs(graph_module, X)
    MergeLinears()(graph_module)
    torch.testing.assert_close(outputs(graph_module, X), want)


def test_empty_composition_changes_nothing() -> None:
    graph_module = _two_linears()
    before = graph_state(graph_module)
    nothing = compose()
    assert isinstance(nothing, ReversibleTransformation)
    assert nothing.preserves_computation
    assert graph_state(nothing(graph_module)) == before
    assert nothing(graph_module, reverse=True) is graph_module


def test_composition_of_one_equals_it_and_can_be_undone() -> None:
    graph_module = _two_linears()
    before = graph_state(graph_module)
    composition = compose(MergeLinears())
    composition(graph_module)
    assert len(calls(graph_module, nn.Linear)) == 1
    composition(graph_module, reverse=True)
    assert graph_state(graph_module) == before


@pytest.mark.parametrize("inplace", [True, False])
def test_composition_equals_its_members_in_order(inplace: bool) -> None:
    one_by_one = MergeLinears()(ChangeTrueDivToMulByInverse()(_two_linears()))
    composition = compose(ChangeTrueDivToMulByInverse(), MergeLinears(), inplace=inplace)
    original = _two_linears()
    code = original.code
    together = composition(original)
    assert together.code == one_by_one.code
    assert (together is original) == inplace
    restored = composition(together, reverse=True)
    assert restored.code == code
    assert (restored is together) == inplace
    assert (original.code == code) or inplace


def test_inplace_false_does_not_change_the_graph() -> None:
    original = _two_linears()
    before = graph_state(original)
    composition = compose(MergeLinears(), FuseBiasInLinear(), inplace=False)
    transformed = composition(original)
    after = graph_state(transformed)
    assert graph_state(original) == before
    assert not MergeLinears().get_transformed_nodes(original)
    restored = composition(transformed, reverse=True)
    assert graph_state(restored) == before
    assert graph_state(transformed) == after


def test_compositions_are_undone_last_to_first() -> None:
    steps: list[str] = []

    class Says(ReversibleTransformation):
        def __init__(self, word: str) -> None:
            self.word = word

        def transform(self, graph_module: GraphModule) -> GraphModule:
            steps.append(self.word)
            return graph_module

        def reverse(self, graph_module: GraphModule) -> GraphModule:
            steps.append(f"not {self.word}")
            return graph_module

    composition = compose(Says("a"), compose(Says("b"), Says("c")), Says("d"))
    composition(_two_linears())
    composition(_two_linears(), reverse=True)
    assert steps == ["a", "b", "c", "d", "not d", "not c", "not b", "not a"]


def test_nested_compositions_keep_the_laws() -> None:
    inner = compose(MergeLinears(), FuseBiasInLinear(), inplace=False)
    check_laws(compose(ChangeTrueDivToMulByInverse(), inner, LintAndRecompile()), _two_linears(), X)
    check_laws(compose(compose(compose(inner))), _two_linears(), X)


def test_the_same_rule_twice_keeps_the_laws() -> None:
    check_laws(compose(MergeLinears(), MergeLinears()), _two_linears(), X)
    check_laws(compose(FuseBiasInLinear(), MergeLinears(), FuseBiasInLinear()), _two_linears(), X)
    check_laws(compose(MergeLinears(), FuseBiasInLinear(), MergeLinears()), _two_linears(), X)
    check_laws(compose(MergeLinears(), compose(FuseBiasInLinear(), MergeLinears())), _two_linears(), X)


def test_composition_promises_only_what_all_members_promise() -> None:
    assert compose(MergeLinears(), ChangeTrueDivToMulByInverse()).preserves_computation
    assert compose(MergeLinears(), inplace=False).preserves_computation
    assert not compose(MergeLinears(), AddInsteadOfMul()).preserves_computation
    assert not compose(MergeLinears(), compose(TwiceTheConstant())).preserves_computation


def test_a_composition_can_be_undone_if_all_its_members_can() -> None:
    assert isinstance(compose(MergeLinears(), TwiceTheConstant()), ReversibleTransformation)
    for member in (AddInsteadOfMul(), FuseBatchNorm1dInLinear(), compose(FuseBatchNorm1dInLinear())):
        mixed = compose(MergeLinears(), member)
        assert not isinstance(mixed, ReversibleTransformation)
        options: dict[str, Any] = {"reverse": True}
        with pytest.raises(TypeError, match="reverse"):  # as in Optimum
            mixed(_two_linears(), **options)
        irreversible = "AddInsteadOfMul" if isinstance(member, AddInsteadOfMul) else "FuseBatchNorm1dInLinear"
        with pytest.raises(TransformationError, match=f"{irreversible}: this transformation cannot be undone"):
            compose(mixed)(_two_linears(), **options)


def test_graph_returned_by_a_member_is_passed_on() -> None:
    original = _two_linears()
    transformed = compose(DeepCopy(), MergeLinears())(original)
    assert len(calls(original, nn.Linear)) == 2
    assert len(calls(transformed, nn.Linear)) == 1


def test_a_composition_recompiles_once_and_only_if_asked_to() -> None:
    graph_module = _two_linears()
    code = graph_module.code
    compose(MergeLinears(), ChangeTrueDivToMulByInverse())(graph_module, lint_and_recompile=False)
    assert graph_module.code == code
    graph_module.recompile()
    assert "q_k_merged" in graph_module.code


class Forgets(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:  # type: ignore[empty-body]
        """Has no return statement."""


def test_transformation_without_a_result_is_named() -> None:
    """The error was an AttributeError on None."""
    with pytest.raises(TransformationError, match=r"^Forgets: transform returned NoneType, expected a GraphModule\n"):
        Forgets()(symbolic_trace(nn.ReLU()))
