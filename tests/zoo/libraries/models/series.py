"""Models of time series."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.libraries.model import Input, Model, network
from tests.zoo.libraries.models.images import BATCHES

_LENGTHS = ({"batch": 2, "time": 20}, {"batch": 3, "time": 9}, {"batch": 1, "time": 50})


class _Windows(nn.Module):
    """Calls a model of neuralforecast with the windows of one series."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, insample_y: torch.Tensor) -> Any:
        windows = {"insample_y": insample_y, "insample_mask": torch.ones_like(insample_y)}
        return self.model(windows | dict.fromkeys(("hist_exog", "futr_exog", "stat_exog")))


# Options by class of neuralforecast; the classes of _MULTIVARIATE take several series.
_FORECASTERS: dict[str, dict[str, Any]] = {
    "MLP": {"hidden_size": 16},
    "NBEATS": {"mlp_units": [[16, 16]] * 3, "n_harmonics": 2, "n_polynomials": 2},
    "NHITS": {"mlp_units": [[16, 16]] * 3},
    "DLinear": {"moving_avg_window": 5},
    "NLinear": {},
    "TCN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "TiDE": {"hidden_size": 16, "decoder_output_dim": 4, "temporal_decoder_dim": 8},
    "PatchTST": {
        "encoder_layers": 1,
        "n_heads": 2,
        "hidden_size": 16,
        "linear_hidden_size": 32,
        "patch_len": 8,
        "stride": 4,
    },
    "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8, "encoder_layers": 1, "num_kernels": 2, "top_k": 2},
    "VanillaTransformer": {
        "hidden_size": 16,
        "n_head": 2,
        "conv_hidden_size": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
    },
    "KAN": {"hidden_size": 16},
    "BiTCN": {"hidden_size": 8},
    "LSTM": {"encoder_hidden_size": 16, "decoder_hidden_size": 16},
    "DilatedRNN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8, "dilations": [[1, 2]]},
}
_MULTIVARIATE: dict[str, dict[str, Any]] = {
    "TSMixer": {"n_block": 1, "ff_dim": 16},
    "iTransformer": {"hidden_size": 16, "n_heads": 2, "e_layers": 1, "d_ff": 16},
    "SOFTS": {"hidden_size": 16, "d_core": 8, "e_layers": 1, "d_ff": 16},
    "StemGNN": {"n_stacks": 2, "multi_layer": 1},
    "TimeMixer": {"d_model": 8, "d_ff": 8, "e_layers": 1, "down_sampling_layers": 1, "top_k": 2},
}


def _forecaster(name: str, **options: Any) -> Any:
    make = network(f"neuralforecast.models:{name}", h=4, input_size=24, max_steps=1, **options)
    return lambda: _Windows(make())


def models() -> Iterator[Model]:
    """Yields the models."""
    for name, options in _FORECASTERS.items():
        windows = {"insample_y": Input(("batch", 24, 1))}
        yield Model(f"neuralforecast/{name.lower()}", _forecaster(name, **options), windows, BATCHES)
    for name, options in _MULTIVARIATE.items():
        windows = {"insample_y": Input(("batch", 24, 3))}
        yield Model(f"neuralforecast/{name.lower()}", _forecaster(name, n_series=3, **options), windows, BATCHES)
    tcn = {"num_inputs": 4, "num_channels": [8, 8], "kernel_size": 3}
    for name, options in {"tcn": {"causal": True}, "tcn_skip": {"use_skip_connections": True, "causal": False}}.items():
        make = network("pytorch_tcn:TCN", **tcn, **options)
        yield Model(f"pytorch-tcn/{name}", make, {"x": Input(("batch", 4, "time"))}, _LENGTHS)
    yield Model(
        "nbeats-pytorch/nbeats",
        network(
            "nbeats_pytorch.model:NBeatsNet",
            stack_types=("trend", "seasonality", "generic"),
            nb_blocks_per_stack=2,
            forecast_length=5,
            backcast_length=20,
            hidden_layer_units=16,
            thetas_dim=(4, 8, 4),
        ),
        {"backcast": Input(("batch", 20))},
        BATCHES,
    )
    variates = {
        "num_variates": 3,
        "lookback_len": 24,
        "pred_length": 4,
        "depth": 1,
        "dim": 16,
        "dim_head": 8,
        "heads": 2,
    }
    for name, options in {"iTransformer": {}, "iTransformer2D": {"num_time_tokens": 4}, "iTransformerFFT": {}}.items():
        make = network(f"iTransformer:{name}", **variates, **options)
        yield Model(f"itransformer/{name.lower()}", make, {"x": Input(("batch", 24, 3))}, BATCHES)
