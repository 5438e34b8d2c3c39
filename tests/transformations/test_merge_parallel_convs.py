"""MergeParallelConvs adds kernels with the same input and the same center."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optexport import symbolic_trace
from optexport.testing import assert_close, check_applied, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FuseBatchNorm, MergeParallelConvs, compose
from optexport.transformations.rule import run
from tests._helpers.graphs import by_export, by_fx

SPACE = {1: (9,), 2: (8, 7), 3: (5, 6, 4)}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
RULE = MergeParallelConvs()


def _x(dims: int = 2, channels: int = 4) -> torch.Tensor:
    return torch.randn(3, channels, *SPACE[dims], generator=torch.Generator().manual_seed(0))


def _two(m: Any, x: torch.Tensor) -> Any:
    return m.a(x) + m.b(x)


def _pair(**options: Any) -> dict[str, Any]:
    """Returns a 3x3 and a 1x1 convolution that differ only in the options of each."""
    both = [{key: value[i] if isinstance(value, list) else value for key, value in options.items()} for i in (0, 1)]
    defaults: list[dict[str, Any]] = [{"kernel_size": 3, "padding": 1}, {"kernel_size": 1}]
    a, b = (
        {"in_channels": 4, "out_channels": 4, **own, **original} for own, original in zip(defaults, both, strict=True)
    )
    return {"a": nn.Conv2d(**a), "b": nn.Conv2d(**b)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_large_kernel_and_a_small_one(dims: int, groups: int, bias: tuple[bool, bool]) -> None:
    small = CONVOLUTIONS[dims](4, 4, 1, groups=groups, bias=bias[0])
    large = CONVOLUTIONS[dims](4, 4, 3, padding=1, groups=groups, bias=bias[1])
    graph_module = by_export(_x(dims), _two, a=small, b=large)
    check_applied(RULE, graph_module, _x(dims))
    merged, _ = run(RULE, copy_sharing_modules(graph_module))
    assert list(merged.state_dict()) == ["b.weight", "b.bias"][: 1 + any(bias)]
    assert "add" not in str(merged.graph)


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_block_of_repvgg(dims: int, groups: int) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.large_norm(m.large(x)) + m.small_norm(m.small(x)) + m.norm(x)

    children = {
        "large": CONVOLUTIONS[dims](4, 4, 3, padding=1, groups=groups, bias=False),
        "small": CONVOLUTIONS[dims](4, 4, 1, groups=groups, bias=False),
        **{name: NORMS[dims](4) for name in ("large_norm", "small_norm", "norm")},
    }
    graph_module = by_export(_x(dims), body, **children)
    both = compose(FuseBatchNorm(), RULE)
    merged = both(copy_sharing_modules(graph_module))
    assert_close(outputs(merged, _x(dims)), outputs(graph_module, _x(dims)), "merged")
    assert len(merged.graph.find_nodes(op="call_module")) == 1


SUMS: dict[str, Any] = {
    "conv + x": lambda m, x: m.a(x) + x,
    "x + conv": lambda m, x: x + m.a(x),
    "x twice": lambda m, x: x + m.a(x) + x,
    "x plus x": lambda m, x: m.a(x) + (m.b(x) + x) + x,
    "nested at the left": lambda m, x: m.a(x) + m.b(x) + m.norm(x),
    "nested at the right": lambda m, x: m.a(x) + (m.norm(x) + m.b(x)),
    "in pairs": lambda m, x: (m.a(x) + m.b(x)) + (x + m.norm(x)),
    "norm + x + conv": lambda m, x: m.norm(x) + x + m.a(x),
    "norm + conv": lambda m, x: m.norm(x) + m.a(x),
    "used twice afterwards": lambda m, x: ((y := m.a(x) + x) * 2, y.tanh()),
    "by keyword": lambda m, x: m.a(input=x) + m.b(input=x),
    "a part in brackets": lambda m, x: (m.a(x) + x) + x.tanh(),
    "added to itself": lambda m, x: (y := m.a(x) + x) + y,
    "of what a convolution gives": lambda m, x: m.a(y := m.b(x)) + y,
    "changed in place afterwards": lambda m, x: (m.a(y := x * 1) + y, y.add_(1.0)),
    "whose sum is changed in place": lambda m, x: (m.a(x) + x).relu_(),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("make", [by_fx, lambda body, **c: by_export(_x(), body, **c)], ids=["fx", "export"])
def test_sums_of_all_kinds(make: Any, name: str) -> None:
    children = {**_pair(), "norm": nn.BatchNorm2d(4)}
    check_applied(RULE, make(SUMS[name], **children), _x())


def test_consecutive_blocks() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x) + x
        return m.b(y) + y

    check_applied(RULE, by_export(_x(), body, **_pair()), _x(), count=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"dilation": 2, "padding": [2, 0]},
        {"dilation": [2, 1], "padding": [2, 0]},
        {"stride": 2},
        {"stride": (2, 1)},
        {"padding": ["same", 0]},
        {"padding": ["same", "valid"]},
        {"padding": "same"},
        {"padding": "same", "kernel_size": [5, 3], "dilation": 2},
        {"kernel_size": [5, 3], "padding": [2, 1]},
        {"kernel_size": [3, 3], "padding": 1},
        {"kernel_size": [(3, 5), (3, 1)], "padding": [(1, 2), (1, 0)]},
        {"kernel_size": [(3, 1), (1, 1)], "padding": [(1, 0), 0]},
        {"kernel_size": [5, 3], "padding": [1, 0]},
        {"kernel_size": [4, 2], "padding": [1, 0]},
        {"kernel_size": [4, 4], "padding": [1, 1]},
        {"kernel_size": [1, 1], "padding": 0},
        {"kernel_size": [1, 1], "padding": 0, "stride": 2},
        {"kernel_size": [1, 1], "padding": 0, "dilation": [2, 1]},
        {"kernel_size": [7, 1], "padding": [3, 0]},
        {"out_channels": 6},
        {"out_channels": 8, "groups": 2},
        {"padding_mode": ["zeros", "zeros"]},
    ],
    ids=str,
)
def test_kernels_with_the_same_center(options: dict[str, Any]) -> None:
    graph_module = by_export(_x(), _two, **_pair(**options))
    check_applied(RULE, graph_module, _x())
    merged, _ = run(RULE, copy_sharing_modules(graph_module))
    larger = torch.randn(2, 4, 11, 13)
    assert_close(
        outputs(merged, larger), outputs(symbolic_trace(graph_module, example_inputs={"x": larger}), larger), ""
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernel_size": [3, 2], "padding": [1, (0, 1)], "stride": 2}, "b and a differ in dilation, or in the center"),
        (
            {"kernel_size": [3, 3], "padding": [1, 2], "dilation": [1, 2]},
            "b and a differ in dilation, or in the center",
        ),
        ({"padding": [0, 0], "stride": 9}, "b and a differ in dilation, or in the center"),
        (
            {"kernel_size": [(1, 7), (7, 1)], "padding": [(0, 3), (3, 0)]},
            "7x7 would need 49 multiplications instead of",
        ),
        ({"groups": [1, 4]}, "the convolutions differ in channels, groups or stride"),
        ({"padding_mode": ["reflect", "zeros"]}, "not all convolutions pad with zeros"),
        ({"padding_mode": "circular"}, "not all convolutions pad with zeros"),
        ({"kernel_size": [4, 2], "padding": "same"}, "a and a differ in dilation, or in the center"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_kernels_with_different_centers(options: dict[str, Any], reason: str) -> None:
    check_refused(RULE, by_fx(_two, **_pair(**options)), _x(), reason)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv2d(4, 4, 3), "a shifts positions, so it cannot include x"),
        (nn.Conv2d(1, 4, 3, padding=1), "has a stride or differing channels"),
        (nn.Conv2d(4, 1, 3, padding=1), "has a stride or differing channels"),
        (nn.Conv2d(4, 4, 3, padding=1, stride=9), "has a stride or differing channels"),
        (nn.Conv2d(4, 4, 4, padding="same"), "a shifts positions, so it cannot include x"),
    ],
    ids=str,
)
def test_input_that_cannot_be_a_kernel(conv: nn.Conv2d, reason: str) -> None:
    size = 3 if conv.padding == (0, 0) else 5
    x = torch.randn(2, conv.in_channels, size, size)
    check_refused(RULE, by_fx(lambda m, x: m.a(x) + x, a=conv), x, reason)


REFUSED: dict[str, tuple[Any, str]] = {
    "used elsewhere": (lambda m, x: (y := m.a(x)) + m.b(x) * 1 + y, ""),
    "a term used elsewhere": (lambda m, x: ((y := m.a(x)) + m.b(x), y), "the result of a has other users"),
    "called twice": (lambda m, x: (m.a(x) + m.b(x)) * m.a(x * 2), "a: the module is called more than once"),
    "twice in one sum": (lambda m, x: m.a(x) + m.a(x), "a: the module is called more than once"),
    "added to itself": (lambda m, x: (y := m.a(x)) + y, "the result of a is added to itself"),
    "reads the weight": (
        lambda m, x: m.a(x) + m.b(x) + m.b.weight.sum() * 0,
        "the graph also reads the weight directly",
    ),
    "another input": (lambda m, x: m.a(x) + m.b(x * 2), ""),
    "another term": (lambda m, x: m.a(x) + x.tanh() + m.b(x), ""),
    "norm + x": (lambda m, x: m.norm(x) + x, ""),
    "of another size": (lambda m, x: m.a(x) + m.b(x[:, :, :1, :1]), ""),
    "a constant": (lambda m, x: m.a(x) + 1.0, ""),
    "a difference": (lambda m, x: m.a(x) - m.b(x), ""),
    "by tuple": (lambda m, x: m.a(*(x,)) + torch.add(m.b(x), x), ""),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", REFUSED)
def test_skipped_graphs_report_the_reason(name: str) -> None:
    body, reason = REFUSED[name]
    graph_module = by_fx(body, **_pair(), norm=nn.BatchNorm2d(4))
    check_refused(RULE, graph_module, _x(), *([reason] if reason else []))


@pytest.mark.parametrize("change", [lambda x: x.add_(1.0), lambda x: x[0].mul_(2.0)], ids=["whole", "a view"])
def test_input_changed_in_place_between_the_terms(change: Any) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x)
        change(x)
        return y + m.b(x)

    check_refused(RULE, by_fx(body, **_pair()), _x(), "is changed in place by")

    def itself(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x)
        change(x)
        return y + x

    graph_module = by_fx(itself, **_pair())
    check_refused(RULE, graph_module, _x(), "is changed in place by")


class _Own(nn.Conv2d):
    pass


def _hooked(conv: nn.Conv2d) -> None:
    conv.register_forward_hook(lambda module, args, result: result * 2)


def _replaced(conv: nn.Conv2d) -> None:
    conv.forward = lambda input: input * 2  # type: ignore[method-assign, assignment]  # noqa: A006


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_hooked, "b: the module has hooks"),
        (_replaced, "b: the forward method was replaced"),
        (lambda conv: nn.utils.parametrizations.weight_norm(conv), "b: ParametrizedConv2d is a subclass"),
        (lambda conv: nn.utils.weight_norm(conv), "b: the module has hooks"),
        (lambda conv: conv.requires_grad_(False), "the layers differ in requires_grad"),
        (lambda conv: conv.bias.requires_grad_(False), "the layers differ in requires_grad"),
        (lambda conv: conv.train(), "the convolutions differ in mode"),
        (lambda conv: conv.to(memory_format=torch.channels_last), "the convolutions differ in memory format"),
        (lambda conv: _transposed(conv), "a weight is neither contiguous nor channels_last"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_subclassed_or_hooked_convolution_is_skipped(spoil: Any, reason: str) -> None:
    children = _pair(kernel_size=[3, 3], padding=1)
    graph_module = by_fx(_two, **children)
    spoil(graph_module.get_submodule("b"))
    check_refused(RULE, graph_module, None, reason)


def _transposed(conv: nn.Conv2d) -> None:
    conv.weight = nn.Parameter(conv.weight.detach().mT.contiguous().mT)


@pytest.mark.parametrize("sizes", [[3, 3], [3, 1], [1, 1]])
def test_convolutions_in_channels_last_stay_so(sizes: list[int]) -> None:
    children = {name: nn.Conv2d(4, 4, size, padding=size // 2) for name, size in zip("ab", sizes, strict=True)}
    graph_module = by_fx(_two, **children).to(memory_format=torch.channels_last)
    check_applied(RULE, graph_module, _x())
    merged = RULE(copy_sharing_modules(graph_module))
    assert merged(_x()).stride() == graph_module(_x()).stride()


@pytest.mark.parametrize("body", [lambda m, x: m.a(x) + x, lambda m, x: x + m.a(x), lambda m, x: m.a(x) + m.norm(x)])
def test_channels_last_with_other_terms_is_skipped(body: Any) -> None:
    graph_module = by_fx(body, a=nn.Conv2d(4, 4, 3, padding=1), norm=nn.BatchNorm2d(4))
    check_refused(RULE, graph_module.eval().to(memory_format=torch.channels_last), _x(), "or from other terms")


def test_subclassed_shared_and_tied_convolutions_are_skipped() -> None:
    check_refused(RULE, by_fx(_two, **{**_pair(), "b": _Own(4, 4, 1)}), _x(), "b: _Own")
    shared = nn.Conv2d(4, 4, 1)
    known_twice = by_fx(lambda m, x: m.a(x) + m.b(x) * m.c(x), a=_pair()["a"], b=shared, c=shared)
    assert not run(RULE, copy_sharing_modules(known_twice))[1].changes
    tied = _pair(kernel_size=[3, 3], padding=1)
    tied["b"].weight = tied["a"].weight
    check_refused(RULE, by_fx(_two, **tied), _x(), "a: the weight is tied to b.weight")
