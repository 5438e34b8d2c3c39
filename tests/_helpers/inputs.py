"""Makes inputs from an ``[inputs]`` table, for a tiny BERT with a tokenizer of a few words."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, BertTokenizerFast

from optexport.config.inputs import InputsConfig
from optexport.errors import ConfigError
from optexport.inputs.preparation import Inputs, prepare
from optexport.loading.loader import Pretrained

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far"]
LONGEST = 16
TINY: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "max_position_embeddings": LONGEST,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}


class Rows(nn.Module):
    """A plain module with two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x


@functools.cache
def bert() -> BertModel:
    return BertModel(BertConfig(**TINY)).eval()


def save_processors(folder: Path, **options: Any) -> Pretrained:
    """Saves a tokenizer and an image processor into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    BertTokenizerFast(str(folder / "words.txt"), **options).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    return Pretrained(str(folder), {"local_files_only": True})


def give_backtracking(folder: Path) -> None:
    """Gives a tokenizer a regular expression that needs exponential time on a long run of "x"."""
    settings = json.loads((folder / "tokenizer.json").read_bytes())
    pattern = {"Regex": "(x+x+)+y|\\s+"}
    settings["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # BERT's own tokenizer splits words itself
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Maker:
    """Makes inputs from an ``[inputs]`` table of a config in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beside = save_processors(folder / "beside")

    def __call__(self, model: nn.Module | None = None, beside: Pretrained | None = None, **table: Any) -> Inputs:
        config = InputsConfig.model_validate(table)
        return prepare(config, self.folder, model or bert(), beside or self.beside, seed=0)

    def refusal(self, model: nn.Module | None = None, beside: Pretrained | None = None, **table: Any) -> str:
        """Returns the error for inputs that cannot be made."""
        with pytest.raises(ConfigError) as caught:
            self(model, beside, **table)
        assert str(caught.value.location).startswith("inputs")
        return str(caught.value)

    def refusal_without_processors(self, **table: Any) -> str:
        """Returns the error for a model folder without a tokenizer or processor."""
        with pytest.raises(ConfigError) as caught:
            prepare(InputsConfig.model_validate(table), self.folder, bert(), None, seed=0)
        return str(caught.value)

    def lines(self, *records: Any) -> str:
        """Writes a file of JSON lines."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (self.folder / "lines.jsonl").write_text(text, encoding="utf-8")
        return "lines.jsonl"


def shapes(inputs: Inputs) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in inputs.example.items()}
