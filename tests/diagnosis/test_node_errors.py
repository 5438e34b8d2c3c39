"""Errors of the nodes along a graph, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from optexport.bundle.node_error_records import NodeErrorsRecord
from optexport.diagnosis import node_errors
from optexport.diagnosis.intermediates import sample_evenly
from optexport.diagnosis.node_errors import measure_node_errors
from optexport.parity.cases.case import Case
from optexport.parity.reference import Reference
from optexport.parity.reference_run import run_original
from optexport.transformations import FuseBatchNorm2dInConv2d, MergeLinears
from optexport.transformations.apply import Applied, NamedRule, sharing_copy, transform
from tests._helpers import exports
from tests._helpers.graphs import by_export

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def reference_of(graph_module: fx.GraphModule, x: torch.Tensor = X) -> Reference:
    def call(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = model(batch["x"])
        return {"output": output}

    return run_original(call, graph_module, [Case("traced", {"x": x})], batched=None)


def measured(
    graph_module: fx.GraphModule, *rules: Any, x: torch.Tensor = X, spoil: Callable[[fx.GraphModule], None] = id
) -> NodeErrorsRecord:
    """Measures the errors of a graph and of its copy after some rules."""
    transformed = transform(sharing_copy(graph_module), NamedRule.of(rules))
    spoil(transformed.graph_module)
    targets = {"graph": (transformed.graph_module, transformed.applied)}
    return measure_node_errors(graph_module, targets, reference_of(graph_module, x))


def errors_of(record: NodeErrorsRecord) -> dict[str, list[float | None]]:
    assert record.skipped is None
    return {point.node: point.errors for point in record.points}


def test_a_run_records_the_errors_of_the_original_and_of_the_graph() -> None:
    record = exports.exported().manifest.node_errors
    assert record is not None
    assert record.skipped is None
    assert record.targets == ["original", "graph"]
    assert [point.position for point in record.points] == sorted(point.position for point in record.points)
    assert {"query", "norm", "down"} <= {point.module for point in record.points}
    for point in record.points:
        assert all(error is not None and error < 1e-6 for error in point.errors)


def test_errors_rise_at_the_node_that_cancels() -> None:
    graph = by_export(X, lambda m, x: m.b((m.a(x) + 1e4) - 1e4), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    errors = errors_of(measured(graph))
    assert errors["linear"][0] < 1e-6 < 1e-5 < errors["sub"][0] < 1e-2
    assert errors["linear_1"][0] > 1e-5
    assert all(original == transformed for original, transformed in errors.values())


def test_errors_of_a_wrong_graph_rise_at_the_wrong_node() -> None:
    graph = by_export(X, lambda m, x: m.c(m.b(m.a(x)).tanh()), a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8))

    def spoil(graph_module: fx.GraphModule) -> None:
        b = graph_module.get_submodule("b")
        b.bias = nn.Parameter(b.bias + 0.1)

    errors = errors_of(measured(graph, spoil=spoil))
    assert errors["linear"][1] < 1e-6
    assert all(errors[name][0] < 1e-6 < 1e-3 < errors[name][1] for name in ("linear_1", "tanh", "linear_2"))


def test_changed_nodes_are_compared_where_later_nodes_read_the_same_value() -> None:
    x = torch.randn(2, 3, 6, 6)
    graph = by_export(x, lambda m, x: m.norm(m.conv(x)).relu(), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    errors = errors_of(measured(graph.eval(), FuseBatchNorm2dInConv2d(), x=x))
    assert errors["conv2d"][1] is None  # the fused layer computes the norm's value
    assert errors["batch_norm"][1] < 1e-6
    graph = by_export(X, lambda m, x: m.q(x).tanh() + m.k(x).relu(), q=nn.Linear(8, 8), k=nn.Linear(8, 8))
    errors = errors_of(measured(graph, MergeLinears()))
    assert all(error is not None and error < 1e-6 for node in errors.values() for error in node)


def test_large_graphs_have_a_point_for_several_nodes_with_the_largest_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x * 1.01 + 0.3
        return (x + 1e3) - 1e3

    graph = by_export(X, body)
    every = errors_of(measured(graph))
    monkeypatch.setattr(node_errors, "_MAX_POINTS", 5)
    grouped = measured(graph)
    assert len(grouped.points) <= 5
    assert grouped.points[-1].node == "sub"
    assert max(point.errors[0] or 0 for point in grouped.points) == max(errors[0] or 0 for errors in every.values())


@pytest.mark.parametrize("body", [lambda m, x: m.a(x), lambda m, x: x @ m.a.weight.T], ids=["module", "get_attr"])
def test_weights_that_float64_shares_are_exact(body: Callable[[Any, Any], Any]) -> None:
    x = torch.randn(2, 512)
    errors = errors_of(measured(by_export(x, body, a=nn.Linear(512, 1024)), x=x))
    assert 0 < [*errors.values()][-1][0] < 1e-5


def test_casts_to_float32_in_a_model_do_not_hide_the_errors() -> None:
    graph = by_export(X, lambda m, x: m.a(x.to(torch.float32)), a=nn.Linear(8, 8))
    assert 0 < errors_of(measured(graph))["linear"][0] < 1e-6


def test_masks_do_not_count_as_the_largest_value() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (m.a(x) + torch.where(x > 0, 0.0, torch.finfo(torch.float32).min)).softmax(-1)

    assert 0 < errors_of(measured(by_export(X, body, a=nn.Linear(8, 8))))["add"][0] < 1e-6


def test_samples_meet_every_position_of_an_axis() -> None:
    for shape in ((4096, 384), (64, 7, 11, 13, 17), (1 << 20,), (3,)):
        last = torch.arange(shape[-1]).expand(shape)
        sampled = sample_evenly(last, 1 << 14)
        assert len(sampled) <= 1 << 14
        assert len(sampled.unique()) == min(shape[-1], len(sampled))


def test_errors_are_left_out_if_float64_takes_another_path() -> None:
    graph = by_export(X, lambda m, x: (m.a(x) - 1e9).softmax(-1), a=nn.Linear(8, 8))  # float32 erases the scores
    output = graph(X).detach()
    reference = Reference((Case("traced", {"x": X}),), ({"y": output},), ({"y": output.double()},))
    record = measure_node_errors(graph, {}, reference)
    assert record.points == []
    assert record.skipped == "float64 is not available node by node: it takes another path than the original"


def test_no_errors_are_measured_without_a_float64_reference() -> None:
    applied: tuple[Applied, ...] = ()
    graph = by_export(X, lambda m, x: m.a(x), a=nn.Linear(8, 8))
    reference = Reference((Case("traced", {"x": X}),), (), (), fallback="there is not enough memory")
    record = measure_node_errors(graph, {"graph": (graph, applied)}, reference)
    assert record.skipped == "float64 is not available node by node: there is not enough memory"
