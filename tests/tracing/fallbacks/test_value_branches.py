"""Branches on values of the inputs: the graph contains both ways, and chooses as the model does."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import optexport
from optexport.errors import TraceError
from optexport.parity.cases.branch_cases import branch_cases
from optexport.parity.cases.case import Case
from optexport.tracing.trace import Traced, trace

Function = Callable[["Branching", torch.Tensor], object]


class Branching(nn.Module):
    """Calls a function with layers to choose from."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


def replaces_nan(m: Branching, x: torch.Tensor) -> object:
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    return m.first(x)


def writes_in_place(m: Branching, x: torch.Tensor) -> object:
    if torch.isnan(x).any():
        x[torch.isnan(x)] = 0.5
    return m.first(x)


def reads_a_number(m: Branching, x: torch.Tensor) -> object:
    if x.abs().max().item() > 3:
        x = x / x.abs().max()
    return m.first(x)


def returns_early(m: Branching, x: torch.Tensor) -> object:
    if (x > 0).all():
        return m.first(x)
    return m.second(x).relu()


def chooses_in_an_expression(m: Branching, x: torch.Tensor) -> object:
    return (m.first(x) if x.sum() > 0 else m.second(x)) * 2


def branches_twice(m: Branching, x: torch.Tensor) -> object:
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    if x.abs().max() > 3:
        x = x.clamp(-3, 3)
    return {"y": m.first(x), "x": x}


def branches_within_a_branch(m: Branching, x: torch.Tensor) -> object:
    if x.sum() > 0:
        x = x * 2 if x.max() > 3 else x * 3
    else:
        x = x - 1
    return m.first(x)


def raises_after_a_branch(m: Branching, x: torch.Tensor) -> object:
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    if x.abs().max() > 1e6:
        largest = x.abs().max()
        raise ValueError(f"too large: {largest}")
    return m.first(x)


def compares_tensors(m: Branching, x: torch.Tensor) -> object:
    if torch.equal(x, x.abs()) or torch.allclose(x, -x.abs()):
        x = x + 1
    return m.first(x)


def has_other_shapes_inside(m: Branching, x: torch.Tensor) -> object:
    if x.max() > 3:
        x = torch.cat([x, x + 1])
    return m.first(x).mean(0)


def selects_rows(m: Branching, x: torch.Tensor) -> object:
    mask = x[:, 0] > 0
    if mask.any():
        x = x * 2
    return m.first(x[mask])


def asks_twice(m: Branching, x: torch.Tensor) -> object:
    is_positive, is_large, has_nan = x.sum() > 0, x.max() > 3, torch.isnan(x).any()
    if (is_positive and not is_large) or (has_nan and (is_large or not is_positive)):
        x = x - 1
    return m.first(x) if is_positive else m.second(x)


def chooses_by_else_if(m: Branching, x: torch.Tensor) -> object:
    if x.sum() > 5:
        return m.first(x), x > 1
    elif x.sum() > 1:  # noqa: RET505
        return x * 2, x > 0
    else:
        return x * 3, x < 0


def returns_keys_in_another_order(m: Branching, x: torch.Tensor) -> object:
    if x.sum() > 0:
        return {"a": x, "b": [x * 2, {"c": x, "d": m.first(x)}]}
    return {"b": [m.second(x), {"d": x + 1, "c": x}], "a": x * 3}


FUNCTIONS = (
    *(replaces_nan, writes_in_place, reads_a_number, returns_early, chooses_in_an_expression, branches_twice),
    *(branches_within_a_branch, raises_after_a_branch, compares_tensors, has_other_shapes_inside, selects_rows),
    *(asks_twice, chooses_by_else_if, returns_keys_in_another_order),
)


def _trace(function: Function) -> Traced:
    return trace(Branching(function).eval(), {"x": torch.randn(3, 4).clamp(-2, 2)}, {"x": {0: "rows"}})


def _batches() -> list[torch.Tensor]:
    large, with_nan = torch.randn(5, 4).clamp(-2, 2), torch.randn(6, 4).clamp(-2, 2)
    large[0, 1], with_nan[2, 3] = 7, torch.nan
    return [large, with_nan, torch.rand(4, 4) + 0.1, -torch.rand(4, 4) - 4, torch.rand(2, 4) + 4]


@pytest.mark.sample(4)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_both_ways_of_a_branch_are_right(function: Function) -> None:
    traced = _trace(function)
    assert traced.branches
    model = Branching(function).eval()
    model.load_state_dict(traced.graph_module.state_dict(), strict=False)
    for x in _batches():
        torch.testing.assert_close(traced.graph_module(x.clone()), model(x.clone()), equal_nan=True)


@pytest.mark.parametrize(
    "condition",
    [lambda v: v == True, lambda v: v != True, lambda v: v == False, lambda v: v == 1, lambda v: not v],  # noqa: E712
)
def test_a_flag_may_be_compared_with_true_and_false(condition: Callable[[object], bool]) -> None:
    class Flagged(nn.Module):
        def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
            return x * 2 if condition(flag.item()) else x + 1

    traced = trace(Flagged(), {"x": torch.randn(3, 4), "flag": torch.tensor(True)}, {"x": {0: "rows"}})
    for flag in (torch.tensor(True), torch.tensor(False)):
        x = torch.randn(5, 4)
        assert torch.equal(traced.graph_module(x, flag), Flagged()(x, flag))


def test_operators_after_a_branch_are_called_once() -> None:
    graph = _trace(replaces_nan).graph_module.graph
    assert len(graph.find_nodes(op="call_module", target="first")) == 1
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)) == 1


def grows(m: Branching, x: torch.Tensor) -> object:
    if x.max() > 3:
        x = torch.cat([x, x])
    return m.first(x)


def repeats(m: Branching, x: torch.Tensor) -> object:
    while x.abs().max() > 100:
        x = x / 10
    return m.first(x)


def changes_the_dtype(m: Branching, x: torch.Tensor) -> object:
    return m.first(x).half() if x.max() > 3 else m.first(x)


def logs_its_peak(m: Branching, x: torch.Tensor) -> object:
    peak = x.abs().max().item()
    if peak > 1000:
        logging.getLogger(__name__).debug(f"peak {peak:.1f}")
        x = x / peak
    return m.first(x)


def test_way_that_fails_only_in_a_trace_is_not_a_check() -> None:
    """The way was left out, and the files were wrong for large values."""
    with pytest.raises(TraceError, match=r"stopped at test_value_branches.py:\d+: .*peak:.1f.*unsupported format"):
        _trace(logs_its_peak)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (grows, r"two ways of the branch at test_value_branches.py:\d+: if x.max\(\) > 3: give results of the shapes"),
        (
            repeats,
            r"test_value_branches.py:\d+: while x.abs.* branches on values more than 8 times in one call",
        ),
        (
            changes_the_dtype,
            r"test_value_branches.py:\d+: .* give results of the dtypes torch.float16 and",
        ),
    ],
)
def test_branch_that_no_graph_can_choose_is_refused_with_the_line(function: Function, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as refusal:
        _trace(function)
    assert "torch.where" in str(refusal.value)


def test_cases_are_added_for_ways_that_the_example_does_not_take() -> None:
    traced = _trace(branches_twice)
    batches = {"x": torch.zeros(3, 4)}
    cases, notes = branch_cases(traced.graph_module, traced.signature, [Case("traced", batches)])
    assert [case.name for case in cases] == ["x with nan", "x with inf"]
    assert notes == []


class Weights(nn.Module):
    """Returns one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a if x.sum() > 0 else self.b


def test_branch_may_choose_between_weights() -> None:
    model = Weights()
    graph = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}}).graph_module
    for x in (torch.ones(5, 4), -torch.ones(5, 4)):
        assert torch.equal(graph(x), model(x))


def test_answers_to_conditions_asked_for_again_are_no_branch() -> None:
    assert len(_trace(asks_twice).branches) == 1


def test_repeated_bound_of_a_size_is_no_skipped_check() -> None:
    assert _trace(selects_rows).skipped_checks == ()


def test_branch_in_code_without_a_file_is_not_named_after_the_caller() -> None:
    names: dict[str, Function] = {}
    exec("def choose(m, x):\n    return m.first(x) if x.sum() > 0 else m.second(x)", names)
    traced = trace(Branching(names["choose"]).eval(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert traced.branches == ("<string>:2",)


def compares(m: Branching, x: torch.Tensor) -> object:
    return m.first(x) if torch.equal(input=x, other=x.abs()) else m.second(x)


def compares_closely(m: Branching, x: torch.Tensor) -> object:
    return m.first(x) if torch.allclose(input=x, other=x.abs(), atol=1e-3) else m.second(x)


@pytest.mark.parametrize("function", [compares, compares_closely])
def test_comparison_of_named_tensors_is_a_branch(function: Function) -> None:
    model = Branching(function).eval()
    graph = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}}).graph_module
    for x in (torch.rand(5, 4), torch.randn(5, 4)):
        torch.testing.assert_close(graph(x), model(x))


def never(m: Branching, x: torch.Tensor) -> object:
    return m.first(x) if x[0, 0] > x[0, 0] else m.second(x)


def compares_with_a_number(m: Branching, x: torch.Tensor) -> object:
    return m.first(x) if x[0, 0] == 0.123 else m.second(x)


def test_numbers_that_a_model_compares_with_are_tried() -> None:
    traced = _trace(compares_with_a_number)
    cases, notes = branch_cases(traced.graph_module, traced.signature, [Case("traced", {"x": torch.zeros(3, 4)})])
    assert [case.name for case in cases] == ["x all 0.123"]
    assert notes == []


class Member(nn.Module):
    """Looks for a whole number."""

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return x * 2 if 77 in k.tolist() else x


def test_whole_numbers_that_a_model_compares_with_are_tried() -> None:
    example = {"x": torch.zeros(3, 4), "k": torch.tensor([1, 2], dtype=torch.int8)}
    traced = trace(Member(), example, {"x": {0: "rows"}})
    cases, notes = branch_cases(traced.graph_module, traced.signature, [Case("traced", example)])
    assert [case.name for case in cases] == ["k all 77"]
    assert notes == []


def test_way_that_no_tried_values_take_is_noted() -> None:
    traced = _trace(never)
    cases, (note,) = branch_cases(traced.graph_module, traced.signature, [Case("traced", {"x": torch.zeros(3, 4)})])
    assert cases == []
    assert note.endswith("no tried values make its condition True")


@pytest.mark.slow
def test_bundle_names_branches_and_checks_and_its_files_take_both_ways(tmp_path) -> None:
    model = Branching(raises_after_a_branch).eval()
    result = optexport.export(model, {"x": torch.zeros(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: "rows"}})
    assert result.manifest.branches[0].endswith("if torch.isnan(x).any():")
    assert result.manifest.skipped_checks[0].endswith("if x.abs().max() > 1e6:")
    assert "x with nan" in result.manifest.parity.cases
    for format_name in result.files:
        bundle = optexport.Bundle.load(tmp_path / "bundle", format_name)
        for x in _batches():
            (output,) = bundle(x=x).values()
            torch.testing.assert_close(torch.as_tensor(output), model(x))


def test_outputs_of_other_order_are_compared_by_name(tmp_path) -> None:
    model = Branching(returns_keys_in_another_order).eval()
    inputs = {"x": -torch.ones(3, 4)}
    result = optexport.export(
        model, inputs, tmp_path / "bundle", dynamic={"x": {0: "rows"}}, formats=["onnx"], effort="quick"
    )
    assert {case.partition(" ")[0] for case in result.manifest.parity.cases} >= {"traced"}
    bundle = optexport.Bundle.load(tmp_path / "bundle", "onnx")
    for x in (torch.ones(5, 4), -torch.ones(2, 4)):
        outputs, expected = bundle(x=x), model(x)
        torch.testing.assert_close(torch.as_tensor(outputs["a"]), expected["a"])
        torch.testing.assert_close(torch.as_tensor(outputs["b.1.d"]), expected["b"][1]["d"])
