"""Models of tables: recommenders, and networks for rows of numbers and categories."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from tests.zoo.libraries.model import Input, Model, ids

BATCHES = ({"batch": 2}, {"batch": 1}, {"batch": 7})
_FIELDS = {"x": Input(("batch", 3), ids(10))}


def _torchfm(module: str, name: str, **options: Any) -> nn.Module:
    if not hasattr(np, "long"):
        np.long = np.int64  # torchfm 0.7 uses the name that NumPy 1.24 removed
    cls = getattr(importlib.import_module(f"torchfm.model.{module}"), name)
    model: nn.Module = cls([10, 10, 10], **options)
    return model


_MLP = {"embed_dim": 8, "mlp_dims": (16, 16), "dropout": 0.1}
_RECOMMENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FactorizationMachineModel": ("fm", {"embed_dim": 8}),
    "DeepFactorizationMachineModel": ("dfm", _MLP),
    "WideAndDeepModel": ("wd", _MLP),
    "DeepCrossNetworkModel": ("dcn", {"embed_dim": 8, "num_layers": 2, "mlp_dims": (16, 16), "dropout": 0.1}),
}


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, (module, options) in _RECOMMENDERS.items():
        yield Model(f"torchfm/{module}", lambda m=module, n=name, o=options: _torchfm(m, n, **o), _FIELDS, BATCHES)

    def ft_transformer() -> nn.Module:
        from rtdl_revisiting_models import FTTransformer

        return FTTransformer(
            n_cont_features=4,
            cat_cardinalities=[3, 5],
            d_out=2,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.1,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.1,
            residual_dropout=0.0,
        )

    def resnet() -> nn.Module:
        from rtdl_revisiting_models import ResNet

        return ResNet(d_in=6, d_out=2, n_blocks=2, d_block=16, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0)

    def tab_transformer() -> nn.Module:
        from tab_transformer_pytorch import TabTransformer

        return TabTransformer(
            categories=(3, 5), num_continuous=4, dim=16, depth=2, heads=2, dim_out=1, mlp_act=nn.ReLU()
        )

    numbers, categories = Input(("batch", 4)), Input(("batch", 2), ids(3))
    yield Model(
        "rtdl_revisiting_models/ft_transformer", ft_transformer, {"x_cont": numbers, "x_cat": categories}, BATCHES
    )
    yield Model("rtdl_revisiting_models/resnet", resnet, {"x": Input(("batch", 6))}, BATCHES)
    yield Model(
        "tab-transformer-pytorch/tab_transformer", tab_transformer, {"x_categ": categories, "x_cont": numbers}, BATCHES
    )
