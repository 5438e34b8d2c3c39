"""Folders of tiny models with their tokenizers and processors, and exports of these folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel

from optexport.pipeline import run
from optexport.report.result import Result
from optexport.tracing.dynamo_exporter import quiet
from tests._helpers.inputs import LONGEST, TINY, save_processors
from tests._helpers.models import randomise

TEXTS = ("the cat sat on the mat", "a dog", "the dog ran far on a mat on a mat on a mat on a mat", "far")


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Saves a model with random weights, a tokenizer and an image processor into a folder."""
    save_processors(folder, **options)
    randomise(model)
    model.save_pretrained(folder)
    return folder


def save_sentences(
    folder: Path,
    pooling: str | Sequence[str] = "mean",
    *,
    behind: Sequence[nn.Module] = (),
    include_prompt: bool = True,
    **options: Any,
) -> Path:
    """Saves a model of sentence-transformers: a tiny BERT, pooling, a dense layer and normalization."""
    transformer = save(BertModel(BertConfig(**TINY)), folder.with_name(f"{folder.name}-transformer"))
    with quiet():
        modules: list[nn.Module] = [Transformer(str(transformer), max_seq_length=LONGEST - 3)]
    modules.append(Pooling(8, pooling, include_prompt))  # type: ignore[arg-type]
    modules += behind or [randomise(Dense(modules[-1].get_embedding_dimension(), 6), 1), Normalize()]
    SentenceTransformer(modules=modules, device="cpu", **options).save_pretrained(str(folder), create_model_card=False)
    return folder


def encode(folder: Path, texts: Sequence[str] = TEXTS) -> torch.Tensor:
    """Returns the embeddings that sentence-transformers computes."""
    with quiet():
        return SentenceTransformer(str(folder), device="cpu").encode(list(texts), convert_to_tensor=True)


def export(
    source: Path, *, task: str | None = None, formats: str = '["onnx"]', inputs: str = "", more: str = ""
) -> Result:
    """Runs a config for a model folder, and writes the bundle next to it."""
    config = source.with_name(f"{source.name}.toml")
    config.write_text(
        f'[model]\nsource = "{source.name}"\n'
        + (f'task = "{task}"\n' if task else "")
        + f"{more}[inputs]\n{inputs or f'texts = {list(TEXTS[:2])}'}\n"
        + f'[parity]\neffort = "quick"\n[export]\nformats = {formats}\noutput = "{source.name}-bundle"\n'
        + "[tracking]\nenabled = false\n",
        encoding="utf-8",
    )
    return run.run(config)
