"""Models of tables: recommenders, and networks for rows of numbers and categories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.zoo.libraries.model import Input, Model, ids, network
from tests.zoo.libraries.models.images import BATCHES

_FIELDS = {"x": Input(("batch", 3), ids(10))}
_MLP = {"embed_dim": 8, "mlp_dims": (16, 16), "dropout": 0.1}
_MLPS = {"embed_dim": 8, "mlp_dims": (16, 16), "dropouts": (0.1, 0.1)}
# Class and options by module of torchfm.
_TORCHFM: dict[str, tuple[str, dict[str, Any]]] = {
    "lr": ("LogisticRegressionModel", {}),
    "fm": ("FactorizationMachineModel", {"embed_dim": 8}),
    "ffm": ("FieldAwareFactorizationMachineModel", {"embed_dim": 8}),
    "dfm": ("DeepFactorizationMachineModel", _MLP),
    "xdfm": ("ExtremeDeepFactorizationMachineModel", {**_MLP, "cross_layer_sizes": (8, 8)}),
    "wd": ("WideAndDeepModel", _MLP),
    "dcn": ("DeepCrossNetworkModel", {**_MLP, "num_layers": 2}),
    "fnn": ("FactorizationSupportedNeuralNetworkModel", _MLP),
    "nfm": ("NeuralFactorizationMachineModel", _MLPS),
    "afi": (
        "AutomaticFeatureInteractionModel",
        {**_MLPS, "atten_embed_dim": 8, "num_heads": 2, "num_layers": 1, "dropouts": (0.1, 0.1, 0.1)},
    ),
    "pnn": ("ProductNeuralNetworkModel", _MLP),
    "ncf": ("NeuralCollaborativeFiltering", {**_MLP, "user_field_idx": np.array([0]), "item_field_idx": np.array([1])}),
}


class _Columns(nn.Module):
    """Calls a model of torch-rechub with a tensor for each column."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user: torch.Tensor, item: torch.Tensor, price: torch.Tensor) -> Any:
        return self.model({"user": user, "item": item, "price": price})


def _ranking(name: str) -> Any:
    def make() -> nn.Module:
        sparse = [network("torch_rechub.basic.features:SparseFeature", c, 10, embed_dim=8)() for c in ("user", "item")]
        dense = [network("torch_rechub.basic.features:DenseFeature", "price")()]
        mlp = {"dims": [16, 8], "dropout": 0.1, "activation": "relu"}
        options: dict[str, dict[str, Any]] = {
            "WideDeep": {"wide_features": dense, "deep_features": sparse, "mlp_params": mlp},
            "DeepFM": {"deep_features": [*sparse, *dense], "fm_features": sparse, "mlp_params": mlp},
            "DCN": {"features": [*sparse, *dense], "n_cross_layers": 2, "mlp_params": mlp},
            "FiBiNet": {"features": sparse, "mlp_params": mlp},
            "AutoInt": {"sparse_features": sparse, "dense_features": dense, "mlp_params": mlp},
        }
        return _Columns(network(f"torch_rechub.models.ranking:{name}", **options[name])())

    return make


def models() -> Iterator[Model]:
    """Yields the models."""
    for module, (name, options) in _TORCHFM.items():
        make = network(f"torchfm.model.{module}:{name}", [10, 10, 10], **options)
        yield Model(f"torchfm/{module}", make, _FIELDS, BATCHES)
    column = Input(("batch",), ids(10))
    for name in ("WideDeep", "DeepFM", "DCN", "FiBiNet", "AutoInt"):
        columns = {"user": column, "item": column, "price": Input(("batch",))}
        yield Model(f"torch-rechub/{name.lower()}", _ranking(name), columns, BATCHES)
    block = {"d_out": 2, "n_blocks": 2, "d_block": 16}
    numbers, categories = Input(("batch", 4)), Input(("batch", 2), ids(3))
    yield Model(
        "rtdl_revisiting_models/ft_transformer",
        network(
            "rtdl_revisiting_models:FTTransformer",
            n_cont_features=4,
            cat_cardinalities=[3, 5],
            attention_n_heads=2,
            attention_dropout=0.1,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.1,
            residual_dropout=0.0,
            **block,
        ),
        {"x_cont": numbers, "x_cat": categories},
        BATCHES,
    )
    yield Model(
        "rtdl_revisiting_models/resnet",
        network("rtdl_revisiting_models:ResNet", d_in=4, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0, **block),
        {"x": numbers},
        BATCHES,
    )
    yield Model(
        "rtdl_revisiting_models/mlp",
        network("rtdl_revisiting_models:MLP", d_in=4, dropout=0.1, **block),
        {"x": numbers},
        BATCHES,
    )
    yield Model(
        "rtdl_num_embeddings/periodic",
        network("rtdl_num_embeddings:PeriodicEmbeddings", 4, 8, lite=False),
        {"x": numbers},
        BATCHES,
    )
    bins = [torch.linspace(-2, 2, 5 + index) for index in range(4)]
    yield Model(
        "rtdl_num_embeddings/piecewise_linear",
        network("rtdl_num_embeddings:PiecewiseLinearEmbeddings", bins, 8, activation=True, version="B"),
        {"x": numbers},
        BATCHES,
    )
    small = {"categories": (3, 5), "num_continuous": 4, "dim": 16, "depth": 2, "heads": 2, "dim_out": 1}
    yield Model(
        "tab-transformer-pytorch/tab_transformer",
        network("tab_transformer_pytorch:TabTransformer", mlp_act=nn.ReLU(), **small),
        {"x_categ": categories, "x_cont": numbers},
        BATCHES,
    )
    yield Model(
        "tab-transformer-pytorch/ft_transformer",
        network("tab_transformer_pytorch:FTTransformer", **small),
        {"x_categ": categories, "x_numer": numbers},
        BATCHES,
    )
    yield Model(
        "pytorch-tabnet/tabnet",
        network(
            "pytorch_tabnet.tab_network:TabNet",
            input_dim=4,
            output_dim=2,
            n_d=8,
            n_a=8,
            group_attention_matrix=torch.eye(4),
        ),
        {"x": numbers},
        BATCHES,
    )
