"""Graph networks of torch_geometric, with any number of nodes and edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.zoo.libraries.model import Input, Model, ids, indexes, network, uniform

_SIZES = ({"nodes": 10, "edges": 24}, {"nodes": 7, "edges": 30}, {"nodes": 23, "edges": 11})
_INPUTS = {"x": Input(("nodes", 8)), "edge_index": Input((2, "edges"), indexes("nodes"))}
_DEGREES = torch.tensor([1, 4, 6, 3])

# Networks of several layers.
_NETWORKS: dict[str, dict[str, Any]] = {
    "GCN": {},
    "GraphSAGE": {},
    "GIN": {},
    "GAT": {"heads": 2},
    "EdgeCNN": {},
    "PNA": {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": _DEGREES},
}
# Single layers from 8 to 4 features: positional and further arguments.
_LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "GATv2Conv": ((8, 4), {"heads": 2}),
    "TransformerConv": ((8, 4), {"heads": 2}),
    "GraphConv": ((8, 4), {"aggr": "max"}),
    "ChebConv": ((8, 4), {"K": 3}),
    "TAGConv": ((8, 4), {}),
    "SGConv": ((8, 4), {"K": 2}),
    "ARMAConv": ((8, 4), {}),
    "LEConv": ((8, 4), {}),
    "ClusterGCNConv": ((8, 4), {}),
    "FiLMConv": ((8, 4), {}),
    "SuperGATConv": ((8, 4), {}),
    "GENConv": ((8, 4), {}),
    "ResGatedGraphConv": ((8, 4), {}),
    "APPNP": ((), {"K": 3, "alpha": 0.1}),
    "GatedGraphConv": ((8,), {"num_layers": 2}),
    "MixHopConv": ((8, 4), {}),
    "EGConv": ((8, 4), {"num_heads": 2}),
}


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, options in _NETWORKS.items():
        make = network(f"torch_geometric.nn:{name}", 8, 16, num_layers=2, out_channels=4, **options)
        yield Model(f"torch_geometric/{name.lower()}", make, _INPUTS, _SIZES)
    for name, (arguments, options) in _LAYERS.items():
        make = network(f"torch_geometric.nn:{name}", *arguments, **options)
        yield Model(f"torch_geometric/{name.lower()}", make, _INPUTS, _SIZES)
    yield Model(
        "torch_geometric/rgcnconv",
        network("torch_geometric.nn:RGCNConv", 8, 4, num_relations=3),
        {**_INPUTS, "edge_type": Input(("edges",), ids(3))},
        _SIZES,
    )
    yield Model(
        "torch_geometric/cgconv",
        network("torch_geometric.nn:CGConv", 8, dim=3),
        {**_INPUTS, "edge_attr": Input(("edges", 3), uniform)},
        _SIZES,
    )
    yield Model(
        "torch_geometric/mlp",
        network("torch_geometric.nn:MLP", [8, 16, 4]),
        {"x": _INPUTS["x"]},
        [{"nodes": n} for n in (10, 1, 23)],
    )
