"""ChangeTrueDivToMulByInverse: matches, accuracy, and undo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from optexport.testing import (
    assert_close,
    assert_same,
    check_applied,
    check_laws,
    check_refused,
    copy_sharing_modules,
    outputs,
)
from optexport.transformations import ChangeTrueDivToMulByInverse
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import by_export, by_fx

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


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", _DIVISIONS)
@pytest.mark.parametrize("divisor", [49, -3, 0.1, math.pi, 1e-30, 1e30])
def test_divisions_become_products_and_are_restored(how: str, divisor: float) -> None:
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: _DIVISIONS[how](x, divisor)), X)


@pytest.mark.sample(6)
@pytest.mark.parametrize("divisor", [8, 8.0, -0.25, 2.0**100, 2.0**-100, 1, 2.0**126])
@pytest.mark.parametrize("exact", [False, True])
def test_a_power_of_two_is_exact_to_the_bit(divisor: float, exact: bool) -> None:
    check_applied(ChangeTrueDivToMulByInverse(exact=exact), by_fx(lambda _, x: x / divisor), X, exact=True)


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40),
)
def test_only_one_rounding_is_lost(x: float, divisor: float) -> None:
    graph_module = by_fx(lambda _, x: x / divisor)
    want = outputs(graph_module, torch.tensor([x]))[0].double()
    graph_module, report = run(ChangeTrueDivToMulByInverse(), graph_module)
    got = outputs(graph_module, torch.tensor([x]))[0].double()
    if not report.changes:
        assert torch.equal(got, want) or got.isnan().all()
        return
    if want.isinf().any() or got.isinf().any():  # at the end of the range, one rounding can overflow
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


@pytest.mark.sample(7)
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
def test_integers_are_divided_as_real_numbers(dtype: torch.dtype) -> None:
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / 7), torch.arange(-5, 6).to(dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["operator", "torch.div", "div"])
def test_divisions_are_found_in_an_exported_graph(how: str) -> None:
    x = torch.randn(3, 4)
    check_applied(ChangeTrueDivToMulByInverse(), by_export(x, lambda _, x: _DIVISIONS[how](x, 7.0)), x)


@pytest.mark.slow
def test_divisions_of_a_real_model_are_found() -> None:
    _, report = run(ChangeTrueDivToMulByInverse(), copy_sharing_modules(models.traced("t5")))
    assert len(report.changes) + len(report.near_misses) == 4
    # T5 divides relative positions by a power of two; this size is beyond its buckets.
    assert len(report.changes) >= 2
    check_laws(ChangeTrueDivToMulByInverse(), models.traced("t5"), models.inputs("t5", 1, 130))


@pytest.mark.sample(7)
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
def test_a_divisor_without_a_sound_inverse_is_skipped(divisor: float, reason: str) -> None:
    check_refused(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / divisor), X, reason)


@pytest.mark.parametrize("divisor", [49, 3.0, 0.1, 6])
def test_with_exact_all_but_powers_of_two_are_skipped(divisor: float) -> None:
    graph_module = by_fx(lambda _, x: x / divisor)
    check_refused(ChangeTrueDivToMulByInverse(exact=True), graph_module, X, f"{divisor} is not a power of two")


_REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "bool": (lambda m, x: x / True, "the divisor is True, not a number"),
    "constant tensor": (lambda m, x: x / torch.tensor(3.0), "the divisor is a tensor"),
    "parameter": (lambda m, x: x / m.scale, "the divisor is a tensor"),
    "rounding": (
        lambda m, x: torch.div(x, 3, rounding_mode="floor"),
        "the division has keyword arguments, or more than",
    ),
    "no rounding": (
        lambda m, x: torch.div(x, 3, rounding_mode=None),
        "the division has keyword arguments, or more than",
    ),
    "method, rounding": (
        lambda m, x: x.div(3, rounding_mode="trunc"),
        "the division has keyword arguments, or more than",
    ),
    "keyword": (lambda m, x: torch.div(x, other=3), "the division has keyword arguments, or more than"),
    "in place": (lambda m, x: (x + 1).div_(3), "the division is in place"),
    "out": (lambda m, x: torch.div(x, 3, out=torch.empty(0)), "the division has keyword arguments, or more than"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", _REFUSED)
def test_division_of_another_kind_is_skipped_with_the_reason(case: str) -> None:
    body, reason = _REFUSED[case]
    graph_module = by_fx(body, scale=nn.Parameter(torch.tensor([2.5])))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X.abs() + 1, reason)


_OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "tensor": lambda m, x: x / x.exp(),
    "number by tensor": lambda m, x: 3 / x,
    "floor": lambda m, x: x // 3,
    "remainder": lambda m, x: x % 3,
}


@pytest.mark.parametrize("case", _OTHERS)
def test_unrelated_divisions_are_ignored(case: str) -> None:
    graph_module = by_fx(_OTHERS[case], scale=nn.Parameter(torch.tensor([2.5])))
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", _SIZES)
def test_a_division_of_a_size_stays_exact(case: str) -> None:
    # For some sizes, the product is not equal to the integer quotient.
    size = next(n for n in range(1, 100) if n * 49 * (1 / 49) != n)
    assert size * 49 / 49 == size
    graph_module = by_fx(lambda _, x: x.sum() * 0 + _SIZES[case](x))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, torch.full((size * 49, 2), float(size * 49)))


def test_a_size_in_an_exported_graph_stays_exact() -> None:
    x = torch.randn(98, 3)
    graph_module = by_export(x, lambda _, x: x * (x.shape[0] / 49))
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, torch.randn(147, 3))
