"""ChangeTrueDivToMulByInverse keeps quotients exact if a rounding may be amplified."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optexport import symbolic_trace
from optexport.testing import (
    assert_same,
    check_applied,
    check_laws,
    check_refused,
    copy_sharing_modules,
    outputs,
)
from optexport.transformations import ChangeTrueDivToMulByInverse
from optexport.transformations.rule import run
from tests._helpers.graphs import by_export, by_fx
from tests.transformations.test_change_true_div_to_mul_by_inverse import X

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
    "sum": lambda q: torch.stack([q, q * 0]).sum(0).floor(),
    "mean": lambda q: torch.stack([q, q]).mean(0).floor(),
    "product": lambda q: torch.matmul(q[:, None], torch.ones(1, 2)).floor(),
    "length": lambda q: torch.stack([q, q * 0], 1).norm(dim=1).floor(),
    "bits": lambda q: q.view(torch.int32),
    "quantised": lambda q: torch.fake_quantize_per_tensor_affine(q, 2.0, 0, 0, 255),
    "as many": lambda q: torch.arange(q[0].abs() + 1),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("how", _ROUNDED)
def test_quotient_truncated_to_an_integer_stays_exact(how: str) -> None:
    # If x is a multiple of the divisor, the product may be just below the integer quotient, and floor is off by one.
    divisor = next(c for c in range(3, 200) if _misses(c))
    x = torch.arange(1, 2000.0) * divisor
    graph_module = by_fx(lambda _, x: _ROUNDED[how](x / divisor))
    want = outputs(graph_module, x)
    assert_same(outputs(ChangeTrueDivToMulByInverse()(graph_module), x), want, "to the bit")


# Export resolves dtypes by name, and needs the number of elements.
_NOT_EXPORTED = {"type by name", "quantised", "as many"}


@pytest.mark.slow
@pytest.mark.parametrize("how", sorted(_ROUNDED.keys() - _NOT_EXPORTED))
def test_rounded_quotient_stays_exact_after_export(how: str) -> None:
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", _SMOOTH)
@pytest.mark.parametrize("exported", [True, False])
def test_a_quotient_before_smooth_functions_becomes_a_product(how: str, exported: bool) -> None:
    x = torch.linspace(-3, 3.2, 28).reshape(4, 7)
    children = {"act": nn.GELU(), "linear": nn.Linear(7, 3)}
    body = lambda m, x: _SMOOTH[how](m, x / 7)  # noqa: E731
    check_applied(
        ChangeTrueDivToMulByInverse(), by_export(x, body, **children) if exported else by_fx(body, **children), x
    )


@pytest.mark.parametrize("layer", [nn.Threshold(3.0, -5.0), nn.Hardshrink(3.0)])
def test_a_quotient_before_an_unknown_layer_stays_exact(layer: nn.Module) -> None:
    graph_module = by_fx(lambda m, x: m.layer(x / 41), layer=layer)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X, "layer may amplify the rounding")


def test_a_quotient_before_a_layer_with_hooks_stays_exact() -> None:
    act = nn.GELU()
    act.register_forward_hook(lambda module, args, result: result.floor())
    graph_module = by_fx(lambda m, x: m.act(x / 41), act=act)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, X, "act may amplify the rounding")


def test_a_quotient_of_an_input_number_stays_exact() -> None:
    class Counts(nn.Module):
        def forward(self, x, n):  # type: ignore[no-untyped-def]
            return x[:1] + torch.arange(n / 75)

    graph_module = torch.fx.symbolic_trace(Counts())
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, None, "arange may amplify the rounding")


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [lambda m, x: x / 3 + 1, lambda m, x: x + m.linear(x), lambda m, x: x + x * 0.5])
def test_long_path_to_a_quotient_is_followed_once(step: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        for _ in range(100):
            x = step(m, x)
        return x / 5

    _, report = run(ChangeTrueDivToMulByInverse(), by_fx(body, linear=nn.Linear(4, 4)))
    assert len(report.changes) in (1, 101)


def test_huge_integers_and_foreign_functions_are_skipped() -> None:
    check_refused(ChangeTrueDivToMulByInverse(), by_fx(lambda _, x: x / 10**400), None, "is not a normal float32")
    graph = torch.fx.Graph()
    graph.output(graph.call_function(divide, (graph.placeholder("x"),)))
    check_refused(ChangeTrueDivToMulByInverse(), torch.fx.GraphModule(nn.Module(), graph), X)


def divide(x: torch.Tensor) -> torch.Tensor:
    """A foreign function with the name of a division."""
    return x


@pytest.mark.sample(4)
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
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "may amplify the rounding")


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [3, 4])
def test_complex_quotients_are_never_exact(divisor: int) -> None:
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda m, x: x / divisor), torch.complex(x, 1 - 3 * x))
    parts = by_export(x, lambda m, x: torch.view_as_real(torch.complex(x, x + 1) / divisor))
    check_applied(ChangeTrueDivToMulByInverse(), parts, x)
    reason = "complex products are rounded differently"
    check_refused(ChangeTrueDivToMulByInverse(exact=True), parts, x, reason)
    root = by_export(x, lambda m, x: torch.view_as_real((torch.complex(x, x + 1) / divisor).sqrt()))
    check_refused(ChangeTrueDivToMulByInverse(), root, x, f"{reason} from quotients, and sqrt may amplify")


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


def test_a_foreign_function_with_a_known_name_may_round() -> None:
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


@pytest.mark.sample(7)
@pytest.mark.parametrize("how", _POLES)
@pytest.mark.parametrize("exported", [True, False])
def test_a_rounding_never_decides_between_a_number_and_infinity(how: str, exported: bool) -> None:
    divisor = next(c for c in range(3, 200) if torch.tensor(float(c)) * (1 / c) != 1)
    x = torch.tensor([divisor, 3.0, 1.1])
    body = lambda m, x: _POLES[how](x, x / divisor)  # noqa: E731
    graph_module = by_export(x, body) if exported else by_fx(body)
    *_, report = run(ChangeTrueDivToMulByInverse(), copy_sharing_modules(graph_module))
    assert not report.changes
    assert "may amplify the rounding" in report.near_misses[0].reason
    check_laws(ChangeTrueDivToMulByInverse(), graph_module, x, exact=True)


@pytest.mark.parametrize("order", [(), ("fro",), (1,), (2.0,), (math.inf,)])
def test_norms_other_than_order_zero_allow_a_rounding(order: tuple[Any, ...]) -> None:
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


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", _LOWER)
@pytest.mark.parametrize("exported", [True, False])
def test_a_quotient_before_a_lower_precision_stays_exact(how: str, exported: bool) -> None:
    x = torch.linspace(1, 100, 20000)
    body = lambda m, x: _LOWER[how](x / 3)  # noqa: E731
    graph_module = by_export(x, body) if exported else by_fx(body)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "may amplify the rounding")


def test_a_lower_precision_by_a_scalar_or_autocast() -> None:
    promoted = by_export(X, lambda m, x: x.half() + x.sum() / 3)
    check_refused(ChangeTrueDivToMulByInverse(), promoted, X, "add may amplify the rounding")

    graph = torch.fx.Graph()
    quotient = graph.call_function(operator.truediv, (graph.placeholder("x"), 3))
    graph.call_function(torch.set_autocast_enabled, ("cpu", True))
    product = graph.call_module("linear", (quotient,))
    graph.call_function(torch.set_autocast_enabled, ("cpu", False))
    graph.output(product)
    graph_module = torch.fx.GraphModule({"linear": nn.Linear(4, 4)}, graph)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, None, "linear may amplify the rounding")


def test_a_quotient_may_be_cast_to_its_own_precision() -> None:
    x = torch.linspace(-2, 2, 12).half()
    check_applied(ChangeTrueDivToMulByInverse(), by_export(x, lambda m, x: (x / 3).float().softmax(-1)), x)
    check_applied(ChangeTrueDivToMulByInverse(), by_fx(lambda m, x: (x / 3).double() + 1), x)
    same = by_export(X, lambda m, x: torch.cat([x / 3, x]).to(torch.float32).float() + 1)
    check_applied(ChangeTrueDivToMulByInverse(), same, X)
    unknown = by_fx(lambda m, x: (x / 3).float())  # this may be a float64
    check_refused(ChangeTrueDivToMulByInverse(), unknown, x, "float_1 may amplify the rounding")


@pytest.mark.sample(2)
@pytest.mark.parametrize("layer", [nn.MaxPool1d(2, return_indices=True), nn.AdaptiveMaxPool1d(2, return_indices=True)])
@pytest.mark.parametrize("exported", [True, False])
def test_positions_of_the_largest_quotients_stay(layer: nn.Module, exported: bool) -> None:
    x = torch.rand(1, 1, 4096, generator=torch.Generator().manual_seed(0)) + 1
    x[..., 1::2] = torch.nextafter(x[..., ::2], torch.tensor(9.0))  # equal quotients are common here
    body = lambda m, x: m.pool(x / 3)[1]  # noqa: E731
    graph_module = by_export(x, body, pool=layer) if exported else by_fx(body, pool=layer)
    check_refused(ChangeTrueDivToMulByInverse(), graph_module, x, "may amplify the rounding")
