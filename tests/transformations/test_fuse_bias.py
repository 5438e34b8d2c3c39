"""FuseBias folds constants with one number per feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optexport.testing import check_applied, check_refused, copy_sharing_modules
from optexport.transformations import FuseBias
from optexport.transformations.rule import run
from tests._helpers.graphs import Inherited, Program, by_export, by_fx, graph_of

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-2, 2, 96).reshape(2, 3, 4, 4)


def _plus(m: Any, x: torch.Tensor) -> Any:
    return m.layer(x) + m.more


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1,), (), (1, 5)])
def test_a_parameter_added_to_a_linear(bias: bool, shape: tuple[int, ...]) -> None:
    more = nn.Parameter(torch.randn(shape))
    graph_module = by_export(X, _plus, layer=nn.Linear(4, 5, bias=bias), more=more)
    if len(shape) > 1:  # with a vector, such a sum has one more axis
        check_refused(FuseBias(), graph_module, X, "does not have one number for each of the 5 features")
    else:
        check_applied(FuseBias(), graph_module, X)


def test_constant_may_be_the_first_operand() -> None:
    graph_module = by_export(
        X, lambda m, x: m.more + m.layer(x), layer=nn.Linear(4, 5), more=nn.Parameter(torch.ones(5))
    )
    check_applied(FuseBias(), graph_module, X)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [1, 0.5, -3.25])
def test_a_number_added_to_a_linear(number: float) -> None:
    check_applied(FuseBias(), by_export(X, lambda m, x: m.layer(x) + number, layer=nn.Linear(4, 5)), X)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 1, 1), (1, 1, 1), (), (1,)])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_parameter_added_to_a_convolution(shape: tuple[int, ...], groups: int) -> None:
    conv = nn.Conv2d(3, 3 if groups == 3 else 5, 2, groups=groups)
    shape = tuple(conv.out_channels if size == 5 else size for size in shape)
    graph_module = by_export(IMAGE, _plus, layer=conv, more=nn.Parameter(torch.randn(shape)))
    check_applied(FuseBias(), graph_module, IMAGE)


def test_constant_along_the_last_axis_of_an_image_is_no_bias() -> None:
    graph_module = by_export(IMAGE, _plus, layer=nn.Conv2d(3, 3, 2), more=nn.Parameter(torch.randn(3)))
    check_refused(FuseBias(), graph_module, IMAGE, "does not have one number for each of the 3 features")


def test_the_constant_is_removed_if_it_has_no_other_readers() -> None:
    more = nn.Parameter(torch.ones(5))
    graph_module, _ = run(FuseBias(), copy_sharing_modules(by_export(X, _plus, layer=nn.Linear(4, 5), more=more)))
    assert list(graph_module.state_dict()) == ["layer.weight", "layer.bias"]
    twice = by_export(X, lambda m, x: (m.layer(x) + m.more) * m.more, layer=nn.Linear(4, 5), more=more)
    assert "more" in run(FuseBias(), copy_sharing_modules(twice))[0].state_dict()
    check_applied(FuseBias(), twice, X)


def test_consecutive_sums_are_all_folded() -> None:
    graph_module = by_export(
        X, lambda m, x: m.layer(x) + m.more + 1.0, layer=nn.Linear(4, 5), more=nn.Parameter(torch.ones(5))
    )
    check_applied(FuseBias(), graph_module, X, count=2)


def test_result_that_is_used_elsewhere_is_skipped() -> None:
    graph_module = by_export(X, lambda m, x: (m.layer(x) + 1.0) * m.layer(x), layer=nn.Linear(4, 5))
    check_refused(FuseBias(), graph_module, X, "layer: the module is called more than once")
    used = by_export(X, lambda m, x: ((y := m.layer(x)) + 1.0) * y, layer=nn.Linear(4, 5))
    check_refused(FuseBias(), used, X, "the result of layer has other users")


def test_a_subclass_and_a_tied_layer_are_skipped() -> None:
    check_refused(
        FuseBias(), by_fx(lambda m, x: m.layer(x) + 1.0, layer=Inherited(4, 4)), X, "layer: Inherited is a subclass"
    )
    tied = nn.Linear(4, 4)
    graph_module = by_fx(lambda m, x: m.layer(x) + m.layer.weight, layer=tied)
    check_refused(FuseBias(), graph_module, torch.ones(4, 4), "the graph also reads the weight directly")


def test_buffer_changed_by_the_graph_is_not_a_constant() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.norm.running_mean.add_(1.0)
        return m.layer(x) + m.norm.running_mean

    graph_module = by_export(X, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    assert not run(FuseBias(), copy_sharing_modules(graph_module))[1].changes


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    layer, more = nn.Linear(4, 5).to(dtype), nn.Parameter(torch.randn(5, dtype=dtype))
    check_applied(FuseBias(), by_export(X.to(dtype), _plus, layer=layer, more=more), X.to(dtype))


def test_precision_other_than_the_layers_is_skipped() -> None:
    more = nn.Parameter(torch.randn(5, dtype=torch.float64))
    graph_module = by_export(X, _plus, layer=nn.Linear(4, 5), more=more)
    check_refused(FuseBias(), graph_module, X, "differ in dtype or device")


@pytest.mark.parametrize("value", [torch.tensor(1 + 2j), torch.tensor([1 + 2j])])
def test_a_complex_constant_is_skipped(value: torch.Tensor) -> None:
    program = Program(lambda m, x: torch.view_as_real(m.layer(x) + m.more), layer=nn.Linear(4, 5))
    program.register_buffer("more", value)
    graph_module = graph_of(program.eval())
    check_refused(FuseBias(), graph_module, X, "differ in dtype or device")


def test_number_beyond_the_range_of_floats_is_ignored() -> None:
    check_refused(FuseBias(), by_fx(lambda m, x: m.layer(x) + 10**400, layer=nn.Linear(4, 5)), None)


def test_constant_without_numbers_is_skipped() -> None:
    program = Program(_plus, layer=nn.Linear(4, 5))
    program.register_buffer("more", torch.ones((), device="meta"))
    _, report = run(FuseBias(), graph_of(program.eval()))
    assert not report.changes
    assert "differ in dtype or device" in report.near_misses[0].reason


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (m.layer(x) + m.other.bias) * m.other(x),
        lambda m, x: m.layer(x) + m.norm.running_mean + m.norm(x),
        lambda m, x: m.layer(x) + m.norm.weight + m.norm(x),
    ],
)
def test_constant_held_by_a_called_layer_stays_for_it(body: Any) -> None:
    layers = {"layer": nn.Linear(4, 4), "other": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    check_applied(FuseBias(), by_fx(body, **layers), X)
