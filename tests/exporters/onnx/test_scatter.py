"""Reductions into places that an index selects, functional and in place, in ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import Dim
from tests._helpers.graphs import Program
from tests.exporters import files

KINDS = [(kind, itself) for kind in ("sum", "mean", "amax", "amin", "prod") for itself in (True, False)]


class GraphAttention(nn.Module):
    """Softmax over the neighbours of each node, mean and largest message, as graph libraries write them."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        source, target = edges
        score = self.score(torch.cat([x[source], x[target]], 1))[:, 0]
        largest = x.new_zeros(x.shape[0]).scatter_reduce_(0, target, score, "amax", include_self=False)
        weight = (score - largest[target]).exp()
        total = x.new_zeros(x.shape[0])
        total.scatter_add_(0, target, weight)  # the result of the call is not used
        messages = x[source] * (weight / total[target])[:, None]
        places = target[:, None].expand_as(messages)
        both = [torch.zeros_like(x).scatter_reduce_(0, places, messages, kind) for kind in ("mean", "amin")]
        return torch.zeros_like(x).index_add_(0, target, messages), *both


def _graph(nodes: int, edges: int, *, among: int) -> dict[str, torch.Tensor]:
    """Returns a graph whose edges end at the first `among` nodes only."""
    sources, targets = torch.randint(0, nodes, (edges,)), torch.randint(0, among, (edges,))
    return {"x": torch.randn(nodes, 4), "edges": torch.stack([sources, targets])}


def test_graph_attention_reduces_in_place(tmp_path: Path) -> None:
    """torch.onnx failed with KeyError: 'val', or wrote the last message instead of the mean."""
    dynamic = {"x": {0: Dim("nodes", 2, 60)}, "edges": {1: Dim("edges", 2, 90)}}
    model = GraphAttention().eval()
    files.assert_onnx(model, _graph(6, 9, among=6), dynamic, tmp_path, _graph(20, 50, among=7), _graph(3, 2, among=1))


def _in_place(m: nn.Module, x: torch.Tensor) -> Any:
    index = (x.abs() * 2).long().clamp(max=4)
    whole = (x * 4).round().long()
    results = []
    for kind, itself in KINDS:
        of_floats, rows = x + 1, torch.ones_like(x)
        of_floats.scatter_reduce_(1, index, x, kind, include_self=itself)
        rows[:, 1:].scatter_reduce_(-1, index.clamp(max=3), x, kind, include_self=itself)
        results += [of_floats, rows]
    results += [(whole + 1).scatter_reduce_(1, index, whole, kind, include_self=False) for kind in ("mean", "amax")]
    return results


@pytest.mark.slow
def test_every_reduction_in_place_reaches_its_base(tmp_path: Path) -> None:
    model, example = Program(_in_place), {"x": torch.randn(4, 5)}
    files.assert_onnx(model, example, {"x": {0: "rows"}}, tmp_path, {"x": torch.randn(7, 5)}, {"x": torch.zeros(2, 5)})


def _by_index(m: nn.Module, x: torch.Tensor) -> Any:
    index = (x[0].abs() * 2).long().clamp(max=5)
    wide = torch.arange(12.0).reshape(2, 6) - 5
    results: list[torch.Tensor] = []
    for kind, itself in KINDS[2:]:
        results += [wide.index_reduce(1, index, x[:2], kind, include_self=itself)]
        results += [wide.T.clone().index_reduce_(0, index, x[:2].T, kind, include_self=itself)]
    added = torch.zeros(2, 6)
    added.index_put_((torch.arange(2)[:, None], index), x[:2], accumulate=True)
    added[:, 1:].index_add_(1, index.clamp(max=4), x[:2], alpha=2)
    return *results, added, torch.bincount(index, x[0], minlength=6), torch.bincount(index, x[1].double())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:index_reduce")  # torch calls it beta
def test_reductions_by_index_are_written(tmp_path: Path) -> None:
    """ONNX has no index_reduce, and the translation of transformers ignored the weights of bincount."""
    model, example, dynamic = Program(_by_index), {"x": torch.randn(4, 5)}, {"x": {0: "rows", 1: Dim("columns", 2, 40)}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": torch.randn(3, 9)}, {"x": torch.zeros(2, 3)})


def _rounded(m: nn.Module, x: torch.Tensor) -> Any:
    # Half of x: near the ends of its range, erfinv turns one rounding of erf into 2,000, and processors round it apart.
    y, whole = x * 3, (x * 9).round().long()
    y[:, 0].floor_()
    y[:, 1].remainder_(0.7)
    y[:, 2].div_(0.7, rounding_mode="floor")
    y[:, 3] //= 0.7
    whole[:, 0] %= 4
    whole[:, 1].floor_divide_(3)
    return y, whole.floor_(), x.clone().fmod_(0.3), torch.erf(x / 2).erfinv_()


@pytest.mark.slow
def test_rounding_in_place_is_as_exact_as_elsewhere(tmp_path: Path) -> None:
    model, example = Program(_rounded), {"x": torch.randn(4, 4)}
    multiples = torch.arange(-12, 12).reshape(6, 4) * 0.7 / 3
    files.assert_onnx(model, example, {"x": {0: "rows"}}, tmp_path, {"x": multiples}, {"x": torch.randn(2, 4)})
