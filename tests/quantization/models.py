"""A model with one layer that int8 breaks, and configs that lower it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests._helpers.models import randomise

# The layer whose input has a value far above the others, so that one scale for all leaves these no digits.
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
    """Layers of 32 features; what one of them is given holds an outlier that its weights take back."""

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
    """One layer of it is given an outlier."""
    return _chain(1e4)


def harmless() -> nn.Module:
    """None is."""
    return _chain(1.0)


class Sharp(nn.Module):
    """Layers of which one takes differences of large numbers, which half precision rounds away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + (layer(x.tanh() + 300.0) if index == 2 else 0.01 * layer(x.tanh()))
        return x


def sharp() -> nn.Module:
    """One layer of it is given numbers that are nearly alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(Sharp())
    with torch.no_grad():
        model.layers[2].weight -= model.layers[2].weight.mean(1, keepdim=True)
    return model.eval()


class Convs(nn.Module):
    """Convolutions of 8 channels, depthwise and not; one of them is given an outlier that its weights take back."""

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
    """One convolution of it is given an outlier."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(Convs(1e4))
    with torch.no_grad():
        model.layers[2].weight[:, 5] /= 1e4
    return model.eval()


class Stacked(nn.Module):
    """A layer, and a product with a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.stack = nn.Parameter(torch.empty(3, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).tanh() @ self.stack).sum(0)


def stacked() -> nn.Module:
    """Not all of its products are with a matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Stacked()).eval()


class Convolved(nn.Module):
    """A convolution, which int8 does not lower and bfloat16 does, and a layer, in two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.layer = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x[:, None])
        return self.layer(y.tanh()), y.sum((1, 2), keepdim=True)


def convolved() -> nn.Module:
    """Each file has layers of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Convolved()).eval()


class Merging(nn.Module):
    """Two layers of one input, which a rule merges, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block["a"](x).tanh() + self.block["b"](x).sigmoid())


def merging() -> nn.Module:
    """Whether its first two layers are one is a rule's choice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Merging()).eval()


def metric(own: object, original: object) -> float:
    """Finds nothing wrong with any file."""
    return 1.0


def write(
    folder: Path, precision: str, *, model: str = "planted", formats: str = '"onnx"', gates: str = "cosine = 0.999"
) -> Path:
    """Writes a config.

    Args:
        precision: What stands in its table ``[precision]``.
        gates: What stands in ``[parity.metrics]``; nothing of either where it is empty.
    """
    text = _CONFIG.format(model=model, formats=formats)
    if precision:
        text += f"[precision]\n{precision}\n"
    if gates:
        text += f"[parity.metrics]\n{gates}\n"
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path
