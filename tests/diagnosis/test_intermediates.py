"""Intermediate values of files are matched with values of the graph."""

from __future__ import annotations

import torch
from torch import fx

from optexport.diagnosis.divergence import compare
from optexport.diagnosis.intermediates import observe_graph, observe_onnx, observe_torchscript
from tests._helpers import exports


def test_intermediate_values_of_files_match_the_graph() -> None:
    bundle, batch = exports.exported().output, exports.batch(3, 7)
    graph = torch.export.load(bundle / "model.pt2").module(check_guards=False)
    assert isinstance(graph, fx.GraphModule)
    original, exact = observe_graph(graph, batch), observe_graph(graph, batch, double=True)
    scripted = observe_torchscript(bundle / "model.torchscript.pt", batch)
    for observed in (observe_onnx(bundle / "model.onnx", batch), scripted):
        comparison = compare(original, observed, exact, by_name=False)
        assert comparison.divergence is None
        assert len(comparison.matched) > 0.9 * len(original.values)
