"""Names and defaults of the arguments of ATen calls."""

from __future__ import annotations

import torch
from torch import fx

from optexport._utils import aten_ops


def test_arguments_have_schema_names_and_defaults() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(torch.ops.aten.conv2d.default, (x, w), {"padding": [1, 1]})
    assert aten_ops.arguments(node) == {
        "input": x, "weight": w, "bias": None, "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1
    }  # fmt: skip
