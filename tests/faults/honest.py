"""Correct runs: random models of several families, all exact rules, and every format.

Any failure of a parity check on one of these models is a false alarm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from optexport import export
from optexport.report.result import Result
from optexport.signature.signature import Batch, Dim, Dynamic
from optexport.transformations import Transformation, registry
from tests._helpers.exports import Block
from tests._helpers.models import randomise


@dataclass(frozen=True)
class Honest:
    """A model for a correct export."""

    family: str
    model: nn.Module
    inputs: Batch
    dynamic: Dynamic


class Branches(nn.Module):
    """Parallel convolutions with batch norms, like a RepVGG block in training."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.wide = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.BatchNorm2d(width))
        self.narrow = nn.Sequential(nn.Conv2d(width, width, 1, groups=groups), nn.BatchNorm2d(width))
        self.same = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels).relu()
        x = (self.wide(x) + self.narrow(x) + self.same(x)).relu()
        return self.head(x.mean((-1, -2)) * 0.5)


class Adapted(nn.Module):
    """Linear layers with norms, low-rank adapters and constants, so that every rule has a match."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm, self.bottom = nn.BatchNorm1d(width), nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.gate, self.value = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.shift = nn.Parameter(torch.zeros(2 * width))
        self.affine, self.dropout, self.head = nn.LayerNorm(2 * width), nn.Dropout(), nn.Linear(2 * width, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(x)
        x = self.bottom(x) + self.up(self.down(x)) * 2.0
        y = torch.sigmoid(self.gate(x)) * (self.value(x) + self.shift) / 3.0
        logits = self.head(self.dropout(self.affine(y)))
        return {"logits": logits, "label": logits.argmax(-1)}


_TEXT: Dynamic = {name: {0: Dim("batch", 1, 8), 1: Dim("sequence", 2, 32)} for name in ("input_ids", "attention_mask")}


def _ids(draw: random.Random) -> Batch:
    ids = torch.randint(4, 60, (2, draw.randint(4, 9)), generator=torch.Generator().manual_seed(draw.randint(0, 999)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sizes(draw: random.Random) -> dict[str, int]:
    heads = draw.choice((1, 2, 4))
    return {
        "vocab_size": 60,
        "max_position_embeddings": 40,
        "hidden_size": 8 * heads,
        "intermediate_size": draw.choice((16, 24, 40)),
        "num_hidden_layers": draw.choice((1, 2)),
        "num_attention_heads": heads,
    }


def _bert(draw: random.Random) -> Honest:
    act = draw.choice(("gelu", "relu", "gelu_new", "silu"))
    model = BertForSequenceClassification(BertConfig(**_sizes(draw), hidden_act=act))
    return Honest("bert", model, _ids(draw), _TEXT)


def _albert(draw: random.Random) -> Honest:
    return Honest("albert", AlbertModel(AlbertConfig(**_sizes(draw), embedding_size=8)), _ids(draw), _TEXT)


def _llama(draw: random.Random) -> Honest:
    sizes = _sizes(draw)
    key_value_heads = draw.choice([n for n in (1, 2, 4) if sizes["num_attention_heads"] % n == 0])
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=key_value_heads, attention_bias=draw.random() < 0.5)
    )
    return Honest("llama", model, _ids(draw), _TEXT)


def _bart(draw: random.Random) -> Honest:
    sizes = _sizes(draw)
    heads, width = sizes["num_attention_heads"], sizes["intermediate_size"]
    model = BartModel(
        BartConfig(
            vocab_size=60, max_position_embeddings=40, d_model=sizes["hidden_size"], encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=width, decoder_ffn_dim=width,
        )
    )  # fmt: skip
    inputs = {**_ids(draw), "decoder_input_ids": torch.randint(4, 60, (2, 3))}
    return Honest("bart", model, inputs, {**_TEXT, "decoder_input_ids": {0: "batch", 1: Dim("decoder", 2, 32)}})


def _pixels(size: int, name: str = "pixel_values") -> tuple[Batch, Dynamic]:
    return {name: torch.randn(2, 3, size, size)}, {name: {0: Dim("batch", 1, 8)}}


def _resnet(draw: random.Random) -> Honest:
    width = draw.choice((4, 8))
    kind = draw.choice(("basic", "bottleneck"))
    config = ResNetConfig(embedding_size=width, hidden_sizes=[width, 2 * width], depths=[1, 1], layer_type=kind)
    return Honest("resnet", ResNetForImageClassification(config), *_pixels(32))


def _vit(draw: random.Random) -> Honest:
    sizes = {name: size for name, size in _sizes(draw).items() if name not in ("vocab_size", "max_position_embeddings")}
    return Honest("vit", ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)), *_pixels(16))


def _block(draw: random.Random) -> Honest:
    heads = draw.choice((1, 2, 4))
    width = 4 * heads
    inputs = {"x": torch.randn(2, 5, width), "mask": torch.ones(2, 5, dtype=torch.int64)}
    axes = {0: Dim("batch", 1, 8), 1: Dim("sequence", 2, 32)}
    return Honest("block", Block(width, heads), inputs, {"x": axes, "mask": axes})


def _branches(draw: random.Random) -> Honest:
    model = Branches(draw.choice((4, 8)), draw.choice((1, 2, 4)))
    inputs, dynamic = _pixels(8, "pixels")
    return Honest("branches", model, inputs, {"pixels": {**dynamic["pixels"], 2: Dim("height", 4, 32)}})


def _adapted(draw: random.Random) -> Honest:
    width = draw.choice((4, 8, 32))
    model = Adapted(width, draw.choice((1, 2)))
    return Honest("adapted", model, {"x": torch.randn(4, width)}, {"x": {0: Dim("batch", 1, 64)}})


_FAMILIES: tuple[Callable[[random.Random], Honest], ...] = (
    _adapted, _block, _branches, _bert, _resnet, _vit, _llama, _albert, _block, _adapted, _bart,
)  # fmt: skip


def honest(seed: int) -> Honest:
    """Returns a model with random sizes and weights. The seed selects the family."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = _FAMILIES[seed % len(_FAMILIES)](draw)
        randomise(drawn.model, seed)
        with torch.no_grad():
            for parameter in drawn.model.parameters():  # as in trained models, some weights are larger than others
                parameter *= 4 ** draw.uniform(-0.5, 0.5)
    return drawn


def preserving() -> tuple[Transformation, ...]:
    """Returns all rules that preserve the computation, in the order of the registry."""
    return tuple(
        registry.load(name, {}, Path(), "honest") for name, info in registry.RULES.items() if info.preserves_computation
    )


def run_honestly(seed: int, output: Path) -> Result:
    """Exports the model of a seed with all rules to all formats.

    Raises:
        ParityError: A false alarm.
    """
    subject = honest(seed)
    return export(subject.model, subject.inputs, output, transformations=preserving(), dynamic=subject.dynamic)
