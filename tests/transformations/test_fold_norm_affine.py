"""FoldNormAffine folds gains and shifts into the linears that read a norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from optexport.testing import check_applied, check_refused, copy_sharing_modules
from optexport.transformations import FoldNormAffine
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Inherited, by_export, by_fx, calls

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def _rms(m: Any, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = m.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    return normed


def _layers(**more: Any) -> dict[str, Any]:
    return {"norm": nn.LayerNorm(8), "q": nn.Linear(8, 4), "k": nn.Linear(8, 4, bias=False), **more}


@pytest.mark.slow
@pytest.mark.parametrize("shifts", [True, False])
def test_a_layer_norm_before_linears(shifts: bool) -> None:
    norm = nn.LayerNorm(8, bias=shifts, eps=0.1)
    graph_module = by_export(X, lambda m, x: m.q(y := m.norm(x)) * m.k(y), **_layers(norm=norm))
    check_applied(FoldNormAffine(), graph_module, X)
    changed, _ = run(FoldNormAffine(), copy_sharing_modules(graph_module))
    bare = changed.get_submodule("norm")
    assert isinstance(bare, nn.LayerNorm)
    assert (bare.elementwise_affine, bare.eps, list(bare.parameters())) == (False, 0.1, [])
    assert (changed.get_submodule("k").bias is not None) is shifts


@pytest.mark.slow
def test_an_rms_norm_before_linears() -> None:
    graph_module = by_export(X, lambda m, x: m.q(y := _rms(m, x)) * m.k(y), **_layers(gain=nn.Parameter(torch.ones(8))))
    check_applied(FoldNormAffine(), graph_module, X)
    changed, _ = run(FoldNormAffine(), copy_sharing_modules(graph_module))
    assert "gain" not in changed.state_dict()


@pytest.mark.slow
def test_a_gain_after_a_layer_norm() -> None:
    gain = nn.Parameter(torch.ones(8))
    graph_module = by_export(X, lambda m, x: m.q(y := m.norm(x) * m.gain) * m.k(y), **_layers(gain=gain))
    check_applied(FoldNormAffine(), graph_module, X, count=2)


@pytest.mark.slow
def test_positions_of_a_norm() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        y = nn.functional.dropout(m.norm(x), 0.1, training=False)
        return m.q(y[:, 0]), m.k(y[:, 1:])

    check_applied(FoldNormAffine(), by_export(X, body, **_layers()), X)
    part = by_export(X, lambda m, x: m.q(m.norm(x)[..., :6]), **_layers(q=nn.Linear(6, 4)))
    check_refused(FoldNormAffine(), part, X)


def test_layer_norm_needs_no_shapes() -> None:
    check_applied(FoldNormAffine(), by_fx(lambda m, x: m.q(m.norm(x)), **_layers()), X)
    graph_module = by_fx(lambda m, x: m.q(_rms(m, x)), **_layers(gain=nn.Parameter(torch.ones(8))))
    check_refused(FoldNormAffine(), graph_module, X, "is unknown (trace with example inputs)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, x: m.q(y := m.norm(x)) + y[..., :4], "layer_norm is also used by slice_1"),
        (lambda m, x: (m.q(y := m.norm(x)), y), "layer_norm is also used by output"),
        (lambda m, x: m.q(m.norm(x)) + m.k(m.norm(x + 1)), "norm: the module is called more than once"),
        (lambda m, x: m.q(m.norm(x)) + m.q(x), "q: the module is called more than once"),
        (lambda m, x: m.q(m.norm(x)) + m.norm.weight[:4], "norm: the graph also reads the weight directly"),
        (lambda m, x: m.q(m.norm(x)) + m.q.bias, "q: the graph also reads the bias directly"),
    ],
)
def test_skipped_graphs_report_the_reason(body: Any, reason: str) -> None:
    graph_module = by_export(X, body, **_layers())
    changed, report = run(FoldNormAffine(), copy_sharing_modules(graph_module))
    assert not report.changes
    check_refused(FoldNormAffine(), graph_module, X, *[reason] * len(report.near_misses))
    assert report.near_misses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.norm(x),
        lambda m, x: m.q(m.norm(x).relu()),
        lambda m, x: m.q(nn.functional.layer_norm(x, (8,))),
        lambda m, x: m.q(nn.functional.layer_norm(x, (5, 8), x[0], x[0])),
        lambda m, x: m.q(x * x[0, 0]),
    ],
)
def test_unrelated_graphs_are_ignored(body: Any) -> None:
    check_refused(FoldNormAffine(), by_export(X, body, **_layers()), X)


@pytest.mark.slow
def test_tied_derived_and_hooked_layers_are_skipped() -> None:
    layers = _layers()
    layers["k"].weight = layers["q"].weight
    graph_module = by_export(X, lambda m, x: m.q(m.norm(x)) + m.k(x), **layers)
    check_refused(FoldNormAffine(), graph_module, X, "q: the weight is tied to k.weight")
    derived = by_fx(lambda m, x: m.q(m.norm(x)), **_layers(q=Inherited(8, 4)))
    check_refused(FoldNormAffine(), derived, X, "q: Inherited is a subclass")
    layers = _layers()
    layers["norm"].register_forward_hook(lambda module, args, result: result + 1)
    hooked = by_fx(lambda m, x: m.q(m.norm(x)), **layers)
    check_refused(FoldNormAffine(), hooked, X, "norm: the module has hooks")


@pytest.mark.slow
def test_a_product_that_changes_the_shape_is_skipped() -> None:
    wide = by_export(X, lambda m, x: m.q(x[..., :1] * m.gain), **_layers(gain=nn.Parameter(torch.ones(8))))
    check_refused(FoldNormAffine(), wide, X, "differ in shape or dtype")
    one = by_export(X, lambda m, x: m.q(x * m.gain), **_layers(gain=nn.Parameter(torch.ones(1))))
    check_refused(FoldNormAffine(), one, X, "wrong number of features (expected 1, found 8")


def test_input_changed_before_its_reader_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = x * m.gain
        x.add_(1.0)
        return m.q(y) + x[..., :4]

    graph_module = by_export(X, body, **_layers(gain=nn.Parameter(torch.ones(8))))
    check_refused(FoldNormAffine(), graph_module, X, "is changed in place by add_")


def test_gain_with_other_readers_stays_for_them() -> None:
    gain = nn.Parameter(torch.ones(8))
    graph_module = by_export(X, lambda m, x: m.q(_rms(m, x)) + m.gain[:4], **_layers(gain=gain))
    check_applied(FoldNormAffine(), graph_module, X)
    assert "gain" in run(FoldNormAffine(), copy_sharing_modules(graph_module))[0].state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    layers = {name: layer.to(dtype) for name, layer in _layers().items()}
    graph_module = by_export(X.to(dtype), lambda m, x: m.q(m.norm(x)), **layers)
    check_applied(FoldNormAffine(), graph_module, X.to(dtype))


def test_mixed_precisions_and_overflow_are_skipped() -> None:
    layers = _layers()
    layers["q"].half()
    mixed = by_fx(lambda m, x: m.q(m.norm(x)), **layers)
    check_refused(FoldNormAffine(), mixed, None, "and the norm differ in dtype")
    layers = {name: layer.half() for name, layer in _layers().items()}
    great = by_fx(lambda m, x: m.q(m.norm(x)), **layers)
    with torch.no_grad():
        great.norm.weight.fill_(60000)  # type: ignore[operator, union-attr]
        great.q.weight.fill_(60000)  # type: ignore[operator, union-attr]
    check_refused(FoldNormAffine(), great, None, "the weights would overflow")


@pytest.mark.slow
def test_flags_are_kept() -> None:
    layers = _layers()
    for layer in (layers["q"], layers["norm"]):
        layer.requires_grad_(False)
    check_applied(FoldNormAffine(), by_export(X, lambda m, x: m.q(m.norm(x)), **copy.deepcopy(layers)), X)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("llama", 5), ("vit", 5), ("t5", 10), ("bert", 0)])
def test_real_norms(name: str, count: int) -> None:
    graph_module = models.traced(name)
    check_applied(FoldNormAffine(), graph_module, models.inputs(name), count)
    changed, _ = run(FoldNormAffine(), copy_sharing_modules(graph_module))
    bare = [call for call in calls(changed, nn.LayerNorm) if changed.get_submodule(str(call.target)).weight is None]
    assert len(bare) == (count if name == "vit" else 0)


def test_gain_held_by_a_called_norm_stays_for_it() -> None:
    graph_module = by_export(X, lambda m, x: (m.q(x.tanh() * m.norm.weight), m.norm(x)), **_layers())
    check_applied(FoldNormAffine(), graph_module, X)
