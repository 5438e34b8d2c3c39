"""The drawing of a whole exported graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import optexport
from optexport.report.html.whole_graph import MAX_NODES, WholeGraph, read_whole_graphs
from tests._helpers import exports


def _graphs(result: optexport.Result) -> list[WholeGraph]:
    return read_whole_graphs(result.output, result.manifest)


def _export(model: nn.Module, folder: Path, **options: Any) -> optexport.Result:
    options = {"dynamic": {"x": {0: "rows"}}, "formats": "pt2", "effort": "quick", **options}
    return optexport.export(model.eval(), {"x": torch.randn(3, 4)}, folder / "bundle", **options)


def test_nodes_that_rules_added_are_marked() -> None:
    result = exports.exported()
    (graph,) = _graphs(result)
    assert graph.view is not None
    merged = [node for rule in result.manifest.transformations for change in rule.changes for node in change.nodes]
    assert merged
    assert set(graph.view.changed) <= set(merged)
    assert any("merged" in name for name in graph.view.changed)


class Sized(nn.Module):
    """Computes with its sizes, and reads its input again after many nodes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(x.shape[0] * 2, 2)
        for _ in range(self.depth):
            y = y.sin()
        return y.reshape(x.shape) + x


def test_sizes_and_long_lines_are_left_out(tmp_path: Path) -> None:
    (graph,) = _graphs(_export(Sized(60), tmp_path))
    assert graph.view is not None
    nodes = {shown.node.name: shown.node for shown in graph.view.nodes}
    assert graph.size == len(nodes) == 65  # the input, 60 sines, two reshapes, the sum and the output
    assert nodes["add"].inputs == ("reshape_1",)
    assert nodes["reshape"].inputs == ("x",)


def test_a_graph_without_rules_is_drawn(tmp_path: Path) -> None:
    (graph,) = _graphs(_export(Sized(1), tmp_path, transformations=[]))
    assert graph.view is not None
    assert graph.view.changed == []


def test_a_large_graph_is_counted_only(tmp_path: Path) -> None:
    result = _export(Sized(MAX_NODES), tmp_path)
    (graph,) = _graphs(result)
    assert graph.view is None
    assert graph.size == MAX_NODES + 5
    assert f"Graphs of more than {MAX_NODES} nodes are not drawn" in (result.output / "report.html").read_text()
