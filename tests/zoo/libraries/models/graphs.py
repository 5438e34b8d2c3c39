"""Graph networks of torch_geometric, with any number of nodes and edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.zoo.libraries.model import Input, Model, indexes

_SIZES = ({"nodes": 10, "edges": 24}, {"nodes": 7, "edges": 30}, {"nodes": 23, "edges": 11})
_INPUTS = {"x": Input(("nodes", 8)), "edge_index": Input((2, "edges"), indexes("nodes"))}


def _geometric(name: str, *arguments: Any, **options: Any) -> nn.Module:
    from torch_geometric import nn as networks

    model: nn.Module = getattr(networks, name)(*arguments, **options)
    return model


_LAYERS: dict[str, dict[str, Any]] = {
    "GCN": {},
    "GraphSAGE": {},
    "GIN": {},
    "GAT": {"heads": 2},
    "EdgeCNN": {},
    "PNA": {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]},
}


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, options in _LAYERS.items():

        def make(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            if name == "PNA":
                import torch

                options = {**options, "deg": torch.tensor([1, 4, 6, 3])}
            return _geometric(name, 8, 16, num_layers=2, out_channels=4, **options)

        yield Model(f"torch_geometric/{name.lower()}", make, _INPUTS, _SIZES)
