"""ReplaceActivation replaces an activation by a similar one, and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from optexport import ConfigError
from optexport.testing import assert_same, check_laws, check_refused, copy_sharing_modules, outputs
from optexport.transformations import ReplaceActivation, registry
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import by_export, by_fx

X = torch.linspace(-6, 6, 48).reshape(3, 16)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
}
IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "sigmoid": torch.sigmoid_,
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "gelu": torch.ops.aten.gelu_.default,
    "gelu-tanh": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
}
PAIRS = [("gelu", "gelu-tanh"), ("silu", "hardswish"), ("sigmoid", "hardsigmoid")]
PAIRS += [(new, old) for old, new in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("functions", [FUNCTIONS, IN_PLACE], ids=["as it is", "in place"])
def test_result_is_the_new_activation(functions: Any, old: str, new: str) -> None:
    def body(function: Any) -> Any:
        def program(m: Any, x: torch.Tensor) -> Any:
            y = x * 2
            return function(y) + 1, y

        return program

    rule = ReplaceActivation(old=old, new=new)
    graph_module = by_export(X, body(functions[old]))
    want = by_export(X, body(functions[new]))
    changed, report = run(rule, copy_sharing_modules(graph_module))
    assert len(report.changes) == 1
    assert_same(outputs(changed, X), outputs(want, X), new)
    calls, expected = ([(str(node.target), node.kwargs) for node in g.graph.nodes] for g in (changed, want))
    assert calls == expected
    check_laws(rule, graph_module, X)
    check_refused(rule, want, X)


def test_explicit_and_omitted_defaults_match() -> None:
    graph_module = by_export(X, lambda m, x: F.gelu(x, approximate="none") + F.gelu(x))
    for node in graph_module.graph.nodes:
        if node.name == "gelu":
            node.kwargs = {"approximate": "none"}
    graph_module.recompile()
    assert len(run(ReplaceActivation(), copy_sharing_modules(graph_module))[1].changes) == 2
    check_laws(ReplaceActivation(), graph_module, X)


def test_integers_and_unknown_dtypes_are_skipped() -> None:
    integers = torch.arange(6).reshape(2, 3)
    rule = ReplaceActivation(old="sigmoid", new="hardsigmoid")  # it does not support integers
    check_refused(
        rule, by_export(integers, lambda m, x: torch.sigmoid(x)), integers, "x is not known to be floating-point"
    )
    unknown = by_fx(lambda m, x: torch.ops.aten.sigmoid.default(x))
    check_refused(rule, unknown, X, "x is not known to be floating-point")


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_other_precisions(old: str, new: str, dtype: torch.dtype) -> None:
    graph_module = by_export(X.to(dtype), lambda m, x: FUNCTIONS[old](x))
    rule = ReplaceActivation(old=old, new=new)
    changed, _ = run(rule, copy_sharing_modules(graph_module))
    assert_same(outputs(changed, X.to(dtype)), [FUNCTIONS[new](X.to(dtype))], new)
    check_laws(rule, graph_module, X.to(dtype))


def test_opposite_replacements_are_undone_one_after_the_other() -> None:
    graph_module = by_export(X, lambda m, x: F.gelu(x))
    there, back = ReplaceActivation(), ReplaceActivation(old="gelu-tanh", new="gelu")
    changed = back(there(copy_sharing_modules(graph_module)))
    assert_same(outputs(changed, X), outputs(graph_module, X), "back")
    restored = there(back(changed, reverse=True), reverse=True)
    assert restored.code == graph_module.code


@pytest.mark.parametrize(("old", "new"), [("gelu", "silu"), ("gelu", "gelu"), ("relu", "gelu"), ("gelu", "gelu_tanh")])
def test_unknown_names_are_refused(old: str, new: str) -> None:
    with pytest.raises(ConfigError):
        ReplaceActivation(old=old, new=new)


def test_the_registry_knows_the_activations_without_torch() -> None:
    activations = importlib.import_module("optexport.transformations.replace_activation")._ACTIVATIONS
    options = registry.RULES["replace-activation"].options
    assert options["old"].choices == options["new"].choices == tuple(activations)
    with pytest.raises(ConfigError, match='here.new: unknown value "gelu-tan"\n.*Did you mean "gelu-tanh"'):
        registry.check("replace-activation", {"new": "gelu-tan"}, "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "count"), [("bert", *PAIRS[0], 2), ("llama", *PAIRS[1], 2), ("vit", *PAIRS[0], 2)]
)
def test_the_activations_of_models(name: str, old: str, new: str, count: int) -> None:
    rule = ReplaceActivation(old=old, new=new)
    assert len(run(rule, copy_sharing_modules(models.traced(name)))[1].changes) == count
    check_laws(rule, models.traced(name), models.inputs(name))
