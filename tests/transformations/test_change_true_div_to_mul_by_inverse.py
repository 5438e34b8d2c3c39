"""ChangeTrueDivToMulByInverse: which divisions it takes, how near the product comes, and the way back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from optexport import symbolic_trace
from optexport.testing import (
    assert_close,
    assert_same,
    check_applied,
    check_laws,
    check_refused,
    outputs,
    sharing,
)
from optexport.transformations import ChangeTrueDivToMulByInverse
from optexport.transformations.rule import run
from tests import models
from tests.transformations.programs import by_export, by_fx

X = torch.linspace(-200, 200, 2001)
_TINY = torch.finfo(torch.float32).tiny
_DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "operator": lambda x, c: x / c,
    "torch.div": lambda x, c: torch.div(x, c),
    "torch.true_divide": lambda x, c: torch.true_divide(x, c),
    "div": lambda x, c: x.div(c),
    "true_divide": lambda x, c: x.true_divide(c),
}


def test_golden_graph_before_and_after() -> None:
    graph_module = by_fx(lambda _, x: torch.div(x / 8, 49))
    before = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %truediv : [num_users=1] = call_function[target=operator.truediv](args = (%x, 8), kwargs = {})
    %div : [num_users=1] = call_function[target=torch.div](args = (%truediv, 49), kwargs = {})
    return div"""
    after = f"""graph():
    %x : [num_users=1] = placeholder[target=x]
    %truediv : [num_users=1] = call_function[target=operator.mul](args = (%x, 0.125), kwargs = {{}})
    %div : [num_users=1] = call_function[target=operator.mul](args = (%truediv, {1 / 49}), kwargs = {{}})
    return div"""
    assert str(graph_module.graph) == before
    ChangeTrueDivToMulByInverse()(graph_module)
    assert str(graph_module.graph) == after
    ChangeTrueDivToMulByInverse()(graph_module, reverse=True)
    assert str(graph_module.graph) == before


@pytest.mark.parametrize("how", _DIVISIONS)
@pytest.mark.parametrize("divisor", [49, -3, 0.1, math.pi, 1e-30, 1e30])
def test_divisions_by_numbers_become_products_and_come_back_as_they_were_written(how: str, divisor: float) -> None:
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: _DIVISIONS[how](x, divisor)), X)


@pytest.mark.parametrize("divisor", [8, 8.0, -0.25, 2.0**100, 2.0**-100, 1, 2.0**126])
@pytest.mark.parametrize("exact", [False, True])
def test_a_power_of_two_is_exact_to_the_bit(divisor: float, exact: bool) -> None:
    check_applied(ChangeTrueDivToMulByInverse(exact=exact), by_fx(lambda _, x: x / divisor), X, exact=True)


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40),
)
def test_one_more_rounding_is_all_that_is_lost(x: float, divisor: float) -> None:
    graph_module = by_fx(lambda _, x: x / divisor)
    want = outputs(graph_module, torch.tensor([x]))[0].double()
    graph_module, report = run(ChangeTrueDivToMulByInverse(), graph_module)
    got = outputs(graph_module, torch.tensor([x]))[0].double()
    if not report.changes:
        assert torch.equal(got, want) or got.isnan().all()
        return
    if want.isinf().any() or got.isinf().any():  # at the very edge of the range one rounding decides
        assert max(got.abs(), want.abs()) >= 3.4e38
        assert min(got.abs(), want.abs()) >= 3.4e38
        return
    unit = max(want.abs().item() * torch.finfo(torch.float32).eps, 2.0**-149)
    assert (got - want).abs().item() <= 2 * unit


@given(st.floats(allow_nan=False) | st.integers(-(2**40), 2**40))
def test_with_exact_nothing_changes_by_a_bit(divisor: float) -> None:
    graph_module = by_fx(lambda _, x: x / divisor)
    want = outputs(graph_module, X)
    assert_same(outputs(ChangeTrueDivToMulByInverse(exact=True)(graph_module), X), want, "to the bit")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [7, 1e-3, 300.0, 65536])
def test_every_floating_dtype(dtype: torch.dtype, divisor: float) -> None:
    x = torch.linspace(-2, 2, 101, dtype=dtype)
    graph_module = by_fx(lambda _, x: x / divisor)
    want = outputs(graph_module, x)
    transformed, report = run(ChangeTrueDivToMulByInverse(), graph_module)
    assert report.changes
    assert_close(outputs(transformed, x), want, "outputs agree")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_integers_are_divided_as_numbers(dtype: torch.dtype) -> None:
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / 7), torch.arange(-5, 6).to(dtype))


@pytest.mark.parametrize("how", ["operator", "torch.div", "div"])
def test_divisions_are_found_in_an_exported_graph(how: str) -> None:
    x = torch.randn(3, 4)
    check_applied(ChangeTrueDivToMulByInverse(), by_export(x, lambda _, x: _DIVISIONS[how](x, 7.0)), x)


def test_divisions_of_a_real_model_are_found() -> None:
    _, report = run(ChangeTrueDivToMulByInverse(), sharing(models.traced("t5")))
    assert len(report.changes) + len(report.near_misses) == 4
    # By what the buckets of the relative positions begin with, a power of two; sizes from within them to beyond all.
    assert len(report.changes) >= 2
    for sequence in (17, 130):
        check_laws(ChangeTrueDivToMulByInverse(), models.traced("t5"), models.inputs("t5", 1, sequence))


@pytest.mark.parametrize(
    ("divisor", "reason"),
    [
        (0, "the divisor is 0"),
        (0.0, "the divisor is 0.0"),
        (-0.0, "the divisor is -0.0"),
        (math.nan, "the divisor is nan"),
        (math.inf, "1 / inf is not a normal float32"),
        (-math.inf, "1 / -inf is not a normal float32"),
        (5e-324, "is not a normal float32"),
        (1e-40, "is not a normal float32"),
        (1e300, "is not a normal float32"),
        (3e38, "is not a normal float32"),
        (1.5 / _TINY, "is not a normal float32"),
    ],
)
def test_a_divisor_without_a_sound_inverse_is_left_alone(divisor: float, reason: str) -> None:
    check_refused(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / divisor), X, reason)


@pytest.mark.parametrize("divisor", [49, 3.0, 0.1, 6])
def test_with_exact_all_but_powers_of_two_are_left_alone(divisor: float) -> None:
    graph_module = by_fx(lambda _, x: x / divisor)
    check_refused(ChangeTrueDivToMulByInverse(exact=True), graph_module, X, f"{divisor} is not a power of two")


_REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "bool": (lambda m, x: x / True, "the divisor is True, not a number"),
    "constant tensor": (lambda m, x: x / torch.tensor(3.0), "the divisor is a tensor"),
    "parameter": (lambda m, x: x / m.scale, "the divisor is a tensor"),
    "rounding": (lambda m, x: torch.div(x, 3, rounding_mode="floor"), "it takes more than"),
    "no rounding": (lambda m, x: torch.div(x, 3, rounding_mode=None), "it takes more than"),
    "method, rounding": (lambda m, x: x.div(3, rounding_mode="trunc"), "it takes more than"),
    "keyword": (lambda m, x: torch.div(x, other=3), "it takes more than"),
    "in place": (lambda m, x: (x + 1).div_(3), "it divides in place"),
    "out": (lambda m, x: torch.div(x, 3, out=torch.empty(0)), "it takes more than"),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_a_division_of_another_kind_is_left_alone_and_said(what: str) -> None:
    body, reason = _REFUSED[what]
    graph_module = by_fx(body, scale=nn.Parameter(torch.tensor([2.5])))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X.abs() + 1, reason)


_OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "tensor": lambda m, x: x / x.exp(),
    "number by tensor": lambda m, x: 3 / x,
    "floor": lambda m, x: x // 3,
    "remainder": lambda m, x: x % 3,
}


@pytest.mark.parametrize("what", _OTHERS)
def test_other_divisions_are_none_of_its_business(what: str) -> None:
    graph_module = by_fx(_OTHERS[what], scale=nn.Parameter(torch.tensor([2.5])))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X.abs() + 1)


_SIZES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape[0] / 49,
    "size of axis": lambda x: x.size(0) / 49,
    "size": lambda x: x.size()[0] / 49,
    "product of sizes": lambda x: x.shape[0] * x.shape[1] / 49,
    "number of elements": lambda x: x.numel() / 49,
    "elements of shape": lambda x: x.shape.numel() / 49,
    "rank": lambda x: x.dim() / 49,
    "ndim": lambda x: x.ndim / 49,
    "stride": lambda x: x.stride(0) / 49,
    "item": lambda x: x[0, 0].item() / 49,
    "list": lambda x: x.tolist()[0][0] / 49,
    "quotient of size": lambda x: x.shape[0] / 7 / 7,
    "element size": lambda x: x.element_size() / 49,
    "function": lambda x: torch.numel(x) / 49,
}


@pytest.mark.parametrize("what", _SIZES)
def test_a_division_of_a_size_stays_exact(what: str) -> None:
    # For some sizes the product misses the whole number that the quotient hits.
    size = next(n for n in range(1, 100) if n * 49 * (1 / 49) != n)
    assert size * 49 / 49 == size
    graph_module = by_fx(lambda _, x: x.sum() * 0 + _SIZES[what](x))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, torch.full((size * 49, 2), float(size * 49)))


def test_a_size_in_an_exported_graph_stays_exact() -> None:
    x = torch.randn(98, 3)
    graph_module = by_export(x, lambda _, x: x * (x.shape[0] / 49))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, torch.randn(147, 3))


_ROUNDED: dict[str, Callable[[Any], Any]] = {
    "long": lambda q: q.long(),
    "to": lambda q: q.to(torch.int64),
    "floor": lambda q: q.floor(),
    "function": lambda q: torch.ceil(q),
    "scaled": lambda q: (q * 1.0).int(),
    "reshaped": lambda q: q.reshape(-1, 1).floor(),
    "rectified": lambda q: torch.relu(q).floor(),
    "rounding mode": lambda q: torch.div(q, 1.0, rounding_mode="floor"),
    "compared": lambda q: (q >= q.detach().round()).float(),
    "in bins": lambda q: torch.bucketize(q, torch.arange(1.0, 50.0), right=True),
}

_WHOLE = torch.zeros(1999, dtype=torch.int64)
_ROUNDED |= {
    "threshold": lambda q: F.threshold(q, 3.0, -5.0),
    "shrunk": lambda q: F.hardshrink(q, 3.0),
    "sign": lambda q: torch.sgn(q - 3),
    "sign bit": lambda q: torch.signbit(q - 3),
    "logic": lambda q: torch.logical_not(q - 3),
    "count": lambda q: torch.count_nonzero(q - q.round()),
    "member": lambda q: torch.isin(q, torch.arange(50.0)),
    "places": lambda q: torch.where(q - q.round())[0],
    "place of the median": lambda q: (q - q.round()).abs().median(0)[1],
    "place of the greatest so far": lambda q: (q.round() - q).cummax(0)[1],
    "type of another": lambda q: q.type_as(_WHOLE),
    "to another": lambda q: q.to(_WHOLE),
    "type by name": lambda q: q.type("torch.LongTensor"),
    "copied into another": lambda q: _WHOLE.clone().copy_(q),
    "added into another": lambda q: (whole := _WHOLE.float(), whole.add_(q), whole.floor())[-1],
    "set in another": lambda q: (whole := _WHOLE.clone(), whole.__setitem__(slice(None), q), whole)[-1],
    "sum of whole numbers": lambda q: q.cumsum(0, dtype=torch.int64),
    "bits": lambda q: q.view(torch.int32),
    "quantised": lambda q: torch.fake_quantize_per_tensor_affine(q, 2.0, 0, 0, 255),
    "as many": lambda q: torch.arange(q[0].abs() + 1),
}


@pytest.mark.parametrize("how", _ROUNDED)
def test_a_quotient_that_is_cut_to_whole_numbers_stays_exact(how: str) -> None:
    # Where x is a multiple of the divisor the quotient is whole, and the product may be just below it: off by one.
    divisor = next(c for c in range(3, 200) if _misses(c))
    x = torch.arange(1, 2000.0) * divisor
    graph_module = by_fx(lambda _, x: _ROUNDED[how](x / divisor))
    want = outputs(graph_module, x)
    assert_same(outputs(ChangeTrueDivToMulByInverse()(graph_module), x), want, "to the bit")


# A dtype by its name becomes another there, and how many numbers there are has to be known.
_NOT_EXPORTED = {"type by name", "quantised", "as many"}


@pytest.mark.parametrize("how", sorted(_ROUNDED.keys() - _NOT_EXPORTED))
def test_a_quotient_that_is_cut_to_whole_numbers_stays_exact_after_export(how: str) -> None:
    divisor = next(c for c in range(3, 200) if _misses(c))
    x = torch.arange(1, 2000.0) * divisor
    graph_module = by_export(x, lambda _, x: _ROUNDED[how](x / divisor))
    check_laws(ChangeTrueDivToMulByInverse(), graph_module, x, exact=True)


_SMOOTH: dict[str, Callable[[Any, Any], Any]] = {
    "attention": lambda m, q: torch.matmul(F.dropout(torch.softmax(q + 1.0, -1), training=False), q.transpose(-1, -2)),
    "masked": lambda m, q: F.softmax(q.clamp(-9, 9).masked_fill(torch.arange(7) > 4, -1e9), dim=-1),
    "in place": lambda m, q: torch.softmax(q.add_(1.0), -1),
    "activation": lambda m, q: m.act(q).view(-1, 7).sum(1),
    "layers": lambda m, q: m.linear(q.reshape(-1, 7)),
    "size": lambda m, q: q.reshape(q.shape[0], -1) * q.dim(),
    "memory": lambda m, q: torch.cat([q, q.detach()]).to(torch.device("cpu")),
    "roots": lambda m, q: (q.square() * 2).sqrt() + q.abs().reshape(-1, 7).rsqrt() + q.abs().log(),
    "reciprocals": lambda m, q: 1 / (q * 2) + (q * 3).reciprocal() + (q + 1) / q.exp(),
    "powers": lambda m, q: (q + 1) ** 2 + 2.0 ** (q - 1) + q.abs() ** 0.5,
}


@pytest.mark.parametrize("how", _SMOOTH)
@pytest.mark.parametrize("exported", [True, False])
def test_a_quotient_that_only_smooth_functions_and_sums_follow_becomes_a_product(how: str, exported: bool) -> None:
    x = torch.linspace(-3, 3.2, 28).reshape(4, 7)
    children = {"act": nn.GELU(), "linear": nn.Linear(7, 3)}
    body = lambda m, x: _SMOOTH[how](m, x / 7)  # noqa: E731
    check_applied(
        ChangeTrueDivToMulByInverse(), by_export(x, body, **children) if exported else by_fx(body, **children), x
    )


@pytest.mark.parametrize("layer", [nn.Threshold(3.0, -5.0), nn.Hardshrink(3.0)])
def test_a_quotient_that_goes_into_a_layer_not_known_to_be_smooth_stays_exact(layer: nn.Module) -> None:
    graph_module = by_fx(lambda m, x: m.layer(x / 41), layer=layer)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X, "layer is not known to take a quotient")


def test_a_quotient_that_goes_into_a_layer_with_hooks_stays_exact() -> None:
    act = nn.GELU()
    act.register_forward_hook(lambda module, args, result: result.floor())
    graph_module = by_fx(lambda m, x: m.act(x / 41), act=act)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X, "act is not known to take a quotient")


def test_a_quotient_of_a_number_that_was_given_stays_exact_where_it_counts() -> None:
    class Counts(nn.Module):
        def forward(self, x, n):  # type: ignore[no-untyped-def]
            return x[:1] + torch.arange(n / 75)

    graph_module = torch.fx.symbolic_trace(Counts())
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, None, "arange is not known to take a quotient")


@pytest.mark.parametrize("step", [lambda m, x: x / 3 + 1, lambda m, x: x + m.linear(x), lambda m, x: x + x * 0.5])
def test_a_long_way_to_a_quotient_is_followed_once(step: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        for _ in range(300):
            x = step(m, x)
        return x / 5

    _, report = run(ChangeTrueDivToMulByInverse(), by_fx(body, linear=nn.Linear(4, 4)))
    assert len(report.changes) in (1, 301)


def test_a_number_that_no_float_holds_and_a_function_of_ones_own_are_left_alone() -> None:
    check_refused(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / 10**400), None, "is not a normal float32")
    graph = torch.fx.Graph()
    graph.output(graph.call_function(divide, (graph.placeholder("x"),)))
    check_refused(ChangeTrueDivToMulByInverse(), torch.fx.GraphModule(nn.Module(), graph), X)


def divide(x: torch.Tensor) -> torch.Tensor:
    """A function of one's own, by the name of a division."""
    return x


@pytest.mark.parametrize(
    "how",
    [lambda q: (1 - q).sqrt(), lambda q: (1 - q).log(), lambda q: (1 - q) ** 0.5, lambda q: (0 - torch.ones(3)) ** q],
    ids=["root", "logarithm", "power", "negative base"],
)
@pytest.mark.parametrize("exported", [True, False])
def test_a_rounding_never_decides_between_a_number_and_nan(how: Callable[[Any], Any], exported: bool) -> None:
    divisor = next(c for c in range(3, 200) if c * (1 / c) != 1 or torch.tensor(float(c)) * (1 / c) != 1)
    x = torch.full((3,), float(divisor))
    body = lambda m, x: how(x / divisor)  # noqa: E731
    graph_module = by_export(x, body) if exported else by_fx(body)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "is not known to take a quotient")


@pytest.mark.parametrize("divisor", [3, 4])
def test_complex_quotients_are_rounded_as_real_ones_are_and_never_exact(divisor: int) -> None:
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda m, x: x / divisor), torch.complex(x, 1 - 3 * x))
    parts = by_export(x, lambda m, x: torch.view_as_real(torch.complex(x, x + 1) / divisor))
    check_applied(ChangeTrueDivToMulByInverse(), parts, x)
    reason = "complex numbers are multiplied otherwise"
    check_refused(ChangeTrueDivToMulByInverse(exact=True), parts, x, reason)
    root = by_export(x, lambda m, x: torch.view_as_real((torch.complex(x, x + 1) / divisor).sqrt()))
    check_refused(ChangeTrueDivToMulByInverse(), root, x, f"{reason} than divided, and sqrt is not known")


def _misses(divisor: int) -> bool:
    x = torch.arange(1, 2000.0)
    return bool(((x * divisor) * (1 / divisor) < x).any())


def test_only_true_divisions_are_products_afterwards() -> None:
    graph_module = by_fx(lambda _, x: (x / 3) * (x / 4) / x)
    ChangeTrueDivToMulByInverse()(graph_module)
    assert len(graph_module.graph.find_nodes(op="call_function", target=operator.mul)) == 3
    assert len(graph_module.graph.find_nodes(op="call_function", target=operator.truediv)) == 1


@torch.library.custom_op("optexport_tests::mul", mutates_args=())
def mul(x: torch.Tensor) -> torch.Tensor:
    return torch.floor(x)


@mul.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_function_of_others_with_a_known_name_may_cut_the_quotient() -> None:
    class Cuts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.optexport_tests.mul(x / 41)

    x = torch.arange(1, 2000.0) * 41
    graph_module = ChangeTrueDivToMulByInverse()(symbolic_trace(Cuts(), example_inputs=(x,)))
    assert torch.equal(graph_module(x), Cuts()(x))


_POLES: dict[str, Callable[[Any, Any], Any]] = {
    "one over": lambda x, q: 1 / (q - 1),
    "reciprocal": lambda x, q: (q - 1).reciprocal(),
    "over": lambda x, q: x / (q - 1),
    "over itself": lambda x, q: q / (q - 1),
    "div": lambda x, q: torch.div(x, q - 1),
    "div by keyword": lambda x, q: torch.div(x, other=q - 1),
    "in place": lambda x, q: x.clone().div_(q - 1),
    "addcdiv": lambda x, q: torch.addcdiv(x, x, q - 1),
    "how many are not zero": lambda x, q: (q - 1).norm(0),
}


@pytest.mark.parametrize("how", _POLES)
@pytest.mark.parametrize("exported", [True, False])
def test_a_rounding_never_decides_between_a_number_and_infinity(how: str, exported: bool) -> None:
    divisor = next(c for c in range(3, 200) if torch.tensor(float(c)) * (1 / c) != 1)
    x = torch.tensor([divisor, 3.0, 1.1])
    body = lambda m, x: _POLES[how](x, x / divisor)  # noqa: E731
    graph_module = by_export(x, body) if exported else by_fx(body)
    *_, report = run(ChangeTrueDivToMulByInverse(), sharing(graph_module))
    assert not report.changes
    assert "is not known to take a quotient" in report.near_misses[0].reason
    check_laws(ChangeTrueDivToMulByInverse(), graph_module, x, exact=True)


@pytest.mark.parametrize("order", [(), ("fro",), (1,), (2.0,), (math.inf,)])
def test_a_norm_that_does_not_count_takes_a_quotient_that_is_rounded_otherwise(order: tuple[Any, ...]) -> None:
    matrix = X[:12].reshape(3, 4)
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda m, x: (x / 41 - 1).norm(*order)), matrix)


_LOWER: dict[str, Callable[[Any], Any]] = {
    "half": lambda q: q.half().float(),
    "bfloat16": lambda q: q.bfloat16().float(),
    "to": lambda q: q.to(torch.bfloat16).float(),
    "type": lambda q: q.type(torch.float16).float(),
    "later": lambda q: (q + 1).reshape(-1, 1).to(dtype=torch.float16).float(),
    "softmax": lambda q: torch.softmax(q, 0, dtype=torch.float16).float(),
}


@pytest.mark.parametrize("how", _LOWER)
@pytest.mark.parametrize("exported", [True, False])
def test_a_rounding_never_decides_between_two_numbers_of_a_lower_precision(how: str, exported: bool) -> None:
    x = torch.linspace(1, 100, 20000)
    body = lambda m, x: _LOWER[how](x / 3)  # noqa: E731
    graph_module = by_export(x, body) if exported else by_fx(body)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "is not known to take a quotient")


def test_a_lower_precision_may_be_that_of_a_scalar_beside_a_tensor_or_of_autocast() -> None:
    promoted = by_export(X, lambda m, x: x.half() + x.sum() / 3)
    check_refused(ChangeTrueDivToMulByInverse(), promoted, X, "add is not known to take a quotient")

    graph = torch.fx.Graph()
    quotient = graph.call_function(operator.truediv, (graph.placeholder("x"), 3))
    graph.call_function(torch.set_autocast_enabled, ("cpu", True))
    product = graph.call_module("linear", (quotient,))
    graph.call_function(torch.set_autocast_enabled, ("cpu", False))
    graph.output(product)
    graph_module = torch.fx.GraphModule({"linear": nn.Linear(4, 4)}, graph)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, None, "linear is not known to take a quotient")


def test_a_quotient_may_be_cast_to_as_high_a_precision_as_its_own() -> None:
    x = torch.linspace(-2, 2, 12).half()
    check_applied(ChangeTrueDivToMulByInverse(), by_export(x, lambda m, x: (x / 3).float().softmax(-1)), x)
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda m, x: (x / 3).double() + 1), x)
    same = by_export(X, lambda m, x: torch.cat([x / 3, x]).to(torch.float32).float() + 1)
    check_applied(ChangeTrueDivToMulByInverse(), same, X)
    unknown = by_fx(lambda m, x: (x / 3).float())  # may be a float64
    check_refused(ChangeTrueDivToMulByInverse(), unknown, x, "float_1 is not known to take a quotient")


@pytest.mark.parametrize("layer", [nn.MaxPool1d(2, return_indices=True), nn.AdaptiveMaxPool1d(2, return_indices=True)])
@pytest.mark.parametrize("exported", [True, False])
def test_the_places_of_the_greatest_quotients_stay(layer: nn.Module, exported: bool) -> None:
    x = torch.rand(1, 1, 4096, generator=torch.Generator().manual_seed(0)) + 1
    x[..., 1::2] = torch.nextafter(x[..., ::2], torch.tensor(9.0))  # quotients of which are often equal
    body = lambda m, x: m.pool(x / 3)[1]  # noqa: E731
    graph_module = by_export(x, body, pool=layer) if exported else by_fx(body, pool=layer)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "is not known to take a quotient")
