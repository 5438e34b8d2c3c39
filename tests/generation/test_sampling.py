"""Sampling gives the tokens of ``model.generate`` with the same settings and seed."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from optexport import export_generation
from optexport.errors import ConfigError
from optexport.generation.runtime import Generator
from optexport.generation.sampling import Sampling
from tests.generation import models

# Removed when the tests end.
_PLACE = tempfile.TemporaryDirectory(prefix="optexport-tests-")
_SETTINGS: list[dict[str, Any]] = [
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.5, "top_k": 5},
    {"do_sample": True, "temperature": 2.0, "top_p": 0.7},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.7},
    {"repetition_penalty": 2.5},
]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", "<unk>", *(f"word{number}" for number in range(61))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


@functools.cache
def _exported(family: str) -> Path:
    output = Path(_PLACE.name) / family
    model, prompts = models.make(family), models.prompts(family)
    return export_generation(
        model, prompts, output, formats=["onnx"], new_tokens=4, effort="quick", tokenizer=_tokenizer()
    ).output


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_the_filters_are_those_of_transformers(settings: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(3)
    logits, tokens = torch.randn(40, 64, generator=random) * 3, torch.randint(64, (40, 9), generator=random)
    steps: list[Any] = []
    if (penalty := settings.get("repetition_penalty")) is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    steps.append(TemperatureLogitsWarper(settings.get("temperature", 1.0)))
    steps.append(TopKLogitsWarper(settings.get("top_k", 50)))
    if (top_p := settings.get("top_p")) is not None:
        steps.append(TopPLogitsWarper(top_p))
    expected = LogitsProcessorList(steps)(tokens, logits)
    sampling = Sampling(**settings)
    actual = sampling._filter(sampling._penalize(logits, tokens) / sampling.temperature)
    assert torch.equal(actual, expected)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_files_draw_the_tokens_of_generate(family: str, settings: dict[str, Any]) -> None:
    prompt = models.prompts(family)[0]
    torch.manual_seed(5)
    own = models.make(family).generate(**prompt, max_new_tokens=24, **settings, eos_token_id=None)
    seed = {"seed": 5} if settings.get("do_sample") else {}
    actual = Generator.load(_exported(family)).generate(
        **prompt, max_new_tokens=24, **settings, **seed, eos_token_id=()
    )
    assert actual.tolist() == own.tolist()


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_texts_are_continued_with_the_tokenizer_of_the_bundle(family: str) -> None:
    generator, tokenizer = Generator.load(_exported(family)), _tokenizer()
    texts = ["word5 word6", "word9 word8 word7 word1"]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    own = models.make(family).generate(
        encoded["input_ids"], attention_mask=encoded["attention_mask"], do_sample=False, max_new_tokens=6
    )
    start = 1 if family == "t5" else 4
    assert generator.generate_text(texts, max_new_tokens=6) == tokenizer.batch_decode(
        own[:, start:], skip_special_tokens=True
    )
    (alone,) = generator.generate_text(texts[0], max_new_tokens=6, do_sample=True, temperature=0.7, seed=1)
    assert alone == generator.generate_text(texts[0], max_new_tokens=6, do_sample=True, temperature=0.7, seed=1)[0]
    with pytest.raises(ConfigError, match="expected one or more texts"):
        generator.generate_text([])


@pytest.mark.slow
def test_without_a_seed_draws_differ() -> None:
    generator, prompt = Generator.load(_exported("gpt2")), models.prompts("gpt2")[0]
    first, second = (
        generator.generate(**prompt, max_new_tokens=24, do_sample=True, eos_token_id=()).tolist() for _ in range(2)
    )
    assert first != second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": 0.0}, "temperature: expected a positive number, found 0.0"),
        ({"do_sample": True, "temperature": None}, "temperature: expected a positive number, found None"),
        ({"do_sample": True, "top_k": -1}, "top_k: expected a whole number, and at least 0, found -1"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: expected a number from 0 to 1, found 1.5"),
        ({"do_sample": True, "seed": 1.5}, r"seed: expected a whole number from 0 to 2\*\*63 - 1, found 1.5"),
        ({"repetition_penalty": -1.0}, "repetition_penalty: expected a positive number"),
        ({"temperature": 0.5}, "temperature: has no effect on the most likely token"),
        ({"seed": 3}, "seed: has no effect on the most likely token"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)
