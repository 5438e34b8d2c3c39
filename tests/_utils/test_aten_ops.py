"""Arguments of ATen calls: by name, whether given by position, by keyword, or not at all."""

from __future__ import annotations

import torch
from torch import fx

from optexport._utils import aten_ops


def test_arguments_go_by_the_names_of_the_schema_with_its_defaults() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(torch.ops.aten.conv2d.default, (x, w), {"padding": [1, 1]})
    assert aten_ops.arguments(node) == {
        "input": x, "weight": w, "bias": None, "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1
    }  # fmt: skip
