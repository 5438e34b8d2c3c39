"""Models of time series."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tests.zoo.libraries.model import Input, Model

_BATCHES = ({"batch": 2}, {"batch": 1}, {"batch": 5})


def models() -> Iterator[Model]:
    """Yields the models."""

    def tcn() -> nn.Module:
        from pytorch_tcn import TCN

        return TCN(num_inputs=4, num_channels=[8, 8], kernel_size=3, causal=True)

    def nbeats() -> nn.Module:
        from nbeats_pytorch.model import NBeatsNet

        return NBeatsNet(
            stack_types=(NBeatsNet.TREND_BLOCK, NBeatsNet.SEASONALITY_BLOCK, NBeatsNet.GENERIC_BLOCK),
            nb_blocks_per_stack=2,
            forecast_length=5,
            backcast_length=20,
            hidden_layer_units=16,
            thetas_dim=(4, 8, 4),
        )

    yield Model(
        "pytorch-tcn/tcn",
        tcn,
        {"x": Input(("batch", 4, "time"))},
        ({"batch": 2, "time": 20}, {"batch": 3, "time": 9}, {"batch": 1, "time": 50}),
    )
    yield Model("nbeats-pytorch/nbeats", nbeats, {"backcast": Input(("batch", 20))}, _BATCHES)
