"""Bundles of tiny models for several tasks. Tests share them and must not change them."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from tests._helpers import folders
from tests._helpers.inputs import TINY, WORDS

_PLACE = tempfile.TemporaryDirectory(prefix="optexport-applications-")
_MOODS = {"id2label": {0: "good", 1: "bad", 2: "neither"}}
_IMAGE = {"image_size": 16, "patch_size": 8, "id2label": {0: "cat", 1: "dog"}}
_VIT = {key: value for key, value in TINY.items() if key not in ("vocab_size", "max_position_embeddings")}

_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "text-classification": lambda: BertForSequenceClassification(BertConfig(**TINY, **_MOODS)),
    "token-classification": lambda: BertForTokenClassification(BertConfig(**TINY, **_MOODS)),
    "fill-mask": lambda: BertForMaskedLM(BertConfig(**TINY)),
    "text-generation": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS), n_positions=16, n_embd=8, n_layer=1, n_head=1, eos_token_id=3)
    ),
    "image-classification": lambda: ViTForImageClassification(ViTConfig(**_VIT, **_IMAGE)),
}


def model(task: str) -> PreTrainedModel:
    """Returns a new model for a task."""
    return _MODELS[task]()


@functools.cache
def source(task: str) -> Path:
    """Returns the folder of a model with its tokenizer and image processor."""
    return folders.save(model(task), Path(_PLACE.name) / task)


@functools.cache
def bundle(task: str) -> Path:
    """Returns the bundle of a model. Its config has no task, so the task comes from the model."""
    formats = '["onnx", "torchscript", "pt2"]' if task == "text-classification" else '["pt2"]'
    if task == "image-classification":
        inputs = '[inputs.tensors.pixel_values]\nshape = ["batch", 3, 16, 16]\n[inputs.dynamic]\nbatch = [1, 4]'
        return folders.export(source(task), formats=formats, inputs=inputs).output
    return folders.export(source(task), formats=formats).output


@functools.cache
def sentences() -> tuple[Path, npt.NDArray[Any]]:
    """Returns a sentence-transformers bundle with every pooling, and the expected embeddings."""
    folder = folders.save_sentences(Path(_PLACE.name) / "sentences", Pooling.POOLING_MODES)
    expected = folders.encode(folder).numpy()
    output = folders.export(folder, formats='["torchscript", "onnx", "pt2"]').output
    shutil.rmtree(folder)
    return output, expected
