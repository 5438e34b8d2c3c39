"""A model with one layer that int8 breaks, and configs that lower it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests._helpers.models import randomise

# The input of this layer has an outlier, so that a common scale leaves no digits for the other values.
HURT = "layers.2"
OTHERS = ("layers.0", "layers.1", "layers.3")

_CONFIG = """
[model]
source = "python:tests.quantization.models:{model}"
[inputs.tensors.x]
shape = ["batch", 32]
[inputs.dynamic]
batch = [1, 16]
[export]
formats = [{formats}]
output = "bundle"
[tracking]
enabled = false
"""


class Chain(nn.Module):
    """Layers of 32 features. The input of one layer may have an outlier, which its weights scale back."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("scale", torch.ones(32))
        self.scale[5] = outlier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            y = x.tanh()
            if index == 2:
                y = y * self.scale
            x = x + layer(y)
        return x


def _chain(outlier: float) -> Chain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(Chain(outlier))
    with torch.no_grad():
        model.layers[2].weight[:, 5] /= outlier
    return model.eval()


def planted() -> nn.Module:
    """Returns a model with an outlier in one layer."""
    return _chain(1e4)


def harmless() -> nn.Module:
    """Returns a model without outliers."""
    return _chain(1.0)


class Sharp(nn.Module):
    """Layers, one of them with differences of large numbers, which half precision rounds away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + (layer(x.tanh() + 300.0) if index == 2 else 0.01 * layer(x.tanh()))
        return x


def sharp() -> nn.Module:
    """Returns a model where one layer gets almost equal numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(Sharp())
    with torch.no_grad():
        model.layers[2].weight -= model.layers[2].weight.mean(1, keepdim=True)
    return model.eval()


class Convs(nn.Module):
    """Convolutions of 8 channels, depthwise and full. One may get an outlier, which its weights scale back."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=bias) for groups, bias in ((1, True), (8, False)) * 2
        )
        self.register_buffer("scale", torch.ones(8, 1, 1))
        self.scale[5] = outlier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            y = nn.functional.relu6(x)
            if index == 2:
                y = y * self.scale
            x = x + layer(y)
        return x.mean((2, 3))


def convs() -> nn.Module:
    """Returns a model with an outlier in one convolution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(Convs(1e4))
    with torch.no_grad():
        model.layers[2].weight[:, 5] /= 1e4
    return model.eval()


def convs_with_head() -> nn.Module:
    """Returns convolutions with a linear layer after them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(nn.Sequential(Convs(1.0), nn.Linear(8, 4))).eval()


class Stacked(nn.Module):
    """A layer, and a product with a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.stack = nn.Parameter(torch.empty(3, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).tanh() @ self.stack).sum(0)


def stacked() -> nn.Module:
    """Returns a model with a product that is not with a single matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Stacked()).eval()


class Repeated(nn.Module):
    """One layer, applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.layer(x.tanh())
        return x


def repeated() -> nn.Module:
    """Returns a model that applies one layer three times."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Repeated()).eval()


class Convolved(nn.Module):
    """A convolution and a layer, in two outputs. Only bfloat16 lowers the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.layer = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x[:, None])
        return self.layer(y.tanh()), y.sum((1, 2), keepdim=True)


def convolved() -> nn.Module:
    """Returns a model with different layers in each file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Convolved()).eval()


class Merging(nn.Module):
    """Two layers of one input, which a rule can merge, and a third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block["a"](x).tanh() + self.block["b"](x).sigmoid())


def merging() -> nn.Module:
    """Returns a model whose first two layers may be merged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Merging()).eval()


class Decoder(nn.Module):
    """A small Llama without a cache."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.llama(input_ids=input_ids, use_cache=False).logits
        return logits


def decoder(*, tied: bool = False) -> nn.Module:
    """Returns a decoder whose output layer may share the weight of the embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(tied=tied).eval()


def metric(own: object, original: object) -> float:
    """A metric that accepts every file."""
    return 1.0


def write(
    folder: Path, precision: str, *, model: str = "planted", formats: str = '"onnx"', gates: str = "cosine = 0.999"
) -> Path:
    """Writes a config, and omits an empty table.

    Args:
        precision: Lines of ``[precision]``.
        gates: Lines of ``[parity.metrics]``.
    """
    text = _CONFIG.format(model=model, formats=formats)
    if precision:
        text += f"[precision]\n{precision}\n"
    if gates:
        text += f"[parity.metrics]\n{gates}\n"
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path
