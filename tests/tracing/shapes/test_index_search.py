"""Inputs of whole numbers that index an axis are found by running the model at other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optexport.signature.index_values import IndexValues
from optexport.signature.signature import Batch, Dim, Signature, TensorSpec
from optexport.tracing.shapes.index_search import find_indexes

Body = Callable[..., torch.Tensor]
Shapes = dict[str, tuple[int | str, ...]]


class Model(nn.Module):
    """A module whose forward is a function of named inputs."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.table = nn.Embedding(5, 4)
        self.bags = nn.EmbeddingBag(20, 4)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.body(self, **inputs)


def found(body: Body, shapes: Shapes, *, smallest: int = 1, declared: Any = None, **inputs: Any) -> dict[str, Any]:
    """Returns the indexes of a model; `shapes` name the dynamic axes of each input."""
    batch: Batch = {name: torch.as_tensor(value) for name, value in inputs.items()}
    specs = tuple(TensorSpec(name, str(batch[name].dtype)[6:], shape) for name, shape in shapes.items())
    dims = {name: Dim(name, smallest, 40) for shape in shapes.values() for name in shape if isinstance(name, str)}
    return find_indexes(Model(body).eval(), batch, Signature(specs, (), dims), declared or {})


def last(m: Model, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]), lengths - 1]


def message(m: Model, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


X = torch.randn(3, 7, 4)
SEQUENCES: Shapes = {"x": ("batch", "time", 4), "lengths": ("batch",)}
EDGES = torch.tensor([[0, 5, 3, 2, 2, 1, 4], [1, 1, 0, 5, 2, 3, 4]])


@pytest.mark.parametrize("smallest", [1, 2])
def test_lengths_index_the_time(smallest: int) -> None:
    """They do so if no length is the longest, too."""
    for lengths in ([7, 2, 5], [6, 2, 5]):
        indexes = found(last, SEQUENCES, smallest=smallest, x=X, lengths=lengths)
        assert indexes == {"lengths": IndexValues(("time",), 1, 0)}


def test_edges_index_the_nodes() -> None:
    shapes: Shapes = {"x": ("nodes", 4), "edges": (2, "count")}
    assert found(message, shapes, x=torch.randn(6, 4), edges=EDGES) == {"edges": IndexValues(("nodes",))}


def test_both_ends_of_edges_index_the_nodes() -> None:
    shapes: Shapes = {"x": ("nodes", 4), "source": ("edges",), "target": ("edges",)}
    indexes = found(
        lambda m, x, source, target: message(m, x, torch.stack([source, target])),
        shapes,
        x=torch.randn(6, 4),
        source=EDGES[0],
        target=EDGES[1].clamp(min=1),
    )
    assert indexes == {name: IndexValues(("nodes",)) for name in ("source", "target")}


def test_labels_of_a_table_are_not_fitted() -> None:
    """Alone or with lengths: larger labels would leave the table."""
    shapes: Shapes = {**SEQUENCES, "labels": ("batch",)}
    labels = [2, 0, 4]
    indexes = found(
        lambda m, x, lengths, labels: last(m, x, lengths) + m.table(labels),
        shapes,
        x=X,
        lengths=[7, 2, 5],
        labels=labels,
    )
    assert set(indexes) == {"lengths"}
    del shapes["lengths"]
    assert found(lambda m, x, labels: x.sum(1) + m.table(labels), shapes, x=X, labels=labels) == {}


def test_segments_and_offsets_of_bags_are_fitted() -> None:
    indexes = found(
        lambda m, x, segments, graphs: graphs.index_add(0, segments, x),
        {"x": ("nodes", 4), "segments": ("nodes",), "graphs": ("graphs", 4)},
        x=torch.randn(6, 4),
        segments=[0, 0, 1, 1, 2, 2],
        graphs=torch.zeros(3, 4),
    )
    assert indexes == {"segments": IndexValues(("graphs",))}
    indexes = found(
        lambda m, ids, offsets: m.bags(ids, offsets),
        {"ids": ("tokens",), "offsets": ("bags",)},
        ids=torch.arange(9) + 10,
        offsets=[0, 3, 3, 7],
    )
    assert indexes == {"offsets": IndexValues(("tokens",))}


def test_lengths_of_parts_add_up_to_the_size() -> None:
    def means(m: Model, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.mean(0) for part in x.split(lengths.tolist())])

    expected = {"lengths": IndexValues(("rows",), 1, 0, adds_up=True)}
    for smallest in (1, 6):
        shapes: Shapes = {"x": ("rows", 4), "lengths": (3,)}
        assert found(means, shapes, smallest=smallest, x=torch.randn(9, 4), lengths=[2, 3, 4]) == expected


def test_coordinates_index_both_axes_of_an_image() -> None:
    indexes = found(
        lambda m, image, points: image[points[:, 0], points[:, 1]],
        {"image": ("height", "width"), "points": ("count", 2)},
        image=torch.randn(8, 6),
        points=[[7, 5], [0, 2], [3, 3]],
    )
    assert set(indexes["points"].dims) == {"height", "width"}


def test_lengths_that_must_reach_the_end_grow_with_it() -> None:
    def padded_again(m: Model, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, : int(lengths.max())] + x

    assert found(padded_again, SEQUENCES, smallest=7, x=X, lengths=[7, 2, 5]) == {
        "lengths": IndexValues(("time",), 1, 0)
    }


def test_a_check_of_the_values_shows_the_axis() -> None:
    def checked(m: Model, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if lengths.max() > x.shape[1]:
            raise ValueError("too long")
        return x.sum(1)

    assert set(found(checked, SEQUENCES, x=X, lengths=[7, 2, 5])) == {"lengths"}


def test_declared_values_are_fitted_without_a_failure() -> None:
    indexes = found(
        lambda m, x, lengths: x.sum(1) * lengths[:, None],
        SEQUENCES,
        declared={"lengths": ["time"]},
        x=X,
        lengths=[7, 2, 5],
    )
    assert indexes == {"lengths": IndexValues(("time",), 1, 0)}


def test_model_that_fails_for_another_reason_has_no_indexes() -> None:
    def narrow(m: Model, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, 6] * lengths[:, None]

    assert found(narrow, SEQUENCES, x=X, lengths=[7, 2, 5]) == {}
