"""Tests of the comparison of generated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from optexport.errors import ParityError
from optexport.generation import tokens
from optexport.generation.runtime import Parts
from tests.generation import models

_PROMPT = {"input_ids": torch.tensor([[3, 1], [2, 0]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}


def _counting(nearer: float = 0.0, at: int = 6) -> Parts:
    """Returns a decoder that counts up. After token `at`, token 0 has a logit of 1 + `nearer`."""

    def decoder(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = inputs["input_ids"]
        logits = torch.nn.functional.one_hot((ids + 1) % 10, 10).float()
        logits[..., 0] = torch.where(ids == at, 1 + nearer, logits[..., 0])
        return {"logits": logits}

    return Parts(decoder, ())


_EXPECTED = _counting(-1e-7).generate(_PROMPT, 5)


def test_next_token_of_a_padded_row_follows_its_mask() -> None:
    """The decoder gives the number of real tokens, so a wrong mask of a new token gives another token."""

    def decoder(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        count = inputs["attention_mask"].sum(1, keepdim=True).expand(inputs["input_ids"].shape)
        return {"logits": torch.nn.functional.one_hot(count, 10).float()}

    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    prompt = {"input_ids": torch.tensor([[0, 0, 5], [5, 6, 7]]), "attention_mask": mask}
    assert Parts(decoder, ()).generate(prompt, 4).tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]


def test_row_that_ended_continues_with_the_pad_token() -> None:
    actual = _counting(-1.0).generate(_PROMPT, 6, eos=(3,), pad=8)
    assert actual.tolist() == [[2, 3, 8], [1, 2, 3]]
    assert _counting(-1.0).generate(_PROMPT, 2, eos=(9,), pad=8).tolist() == [[2, 3], [1, 2]]


def test_equal_tokens_are_counted() -> None:
    actual = tokens.compare(_counting(-1e-7), _counting(-1e-7), "onnx", ("prompt 0", _PROMPT), _EXPECTED, 1e-6)
    assert _EXPECTED.tolist() == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5]]
    assert actual == tokens.TokenComparison("onnx", "prompt 0", 2, 5, 10, ())


def test_row_is_compared_up_to_a_tie_of_two_logits() -> None:
    expected = _counting(-1e-7).generate(_PROMPT, 7)
    actual = tokens.compare(_counting(-1e-7), _counting(1e-7), "onnx", ("prompt 0", _PROMPT), expected, 1e-6)
    assert [(tie.row, tie.token) for tie in actual.ties] == [(0, 5), (1, 6)]
    assert actual.compared == 5 + 6
    assert all(0 < tie.gap < 2e-7 for tie in actual.ties)


def test_different_token_is_an_error_with_its_place_and_gap() -> None:
    with pytest.raises(
        ParityError,
        match=r"onnx: prompt 0: token 3 of row 0 differs .*expected 5, found 0; .* differ by 1,",
    ):
        tokens.compare(_counting(-1e-7), _counting(0.5, at=4), "onnx", ("prompt 0", _PROMPT), _EXPECTED, 1e-6)


def test_lowered_file_is_counted_after_the_tokens_of_the_original() -> None:
    """Only the token after 4 differs, and it does not change the later ones."""
    actual = tokens.count_agreeing(_counting(0.5, at=4), "onnx", ("prompt 0", _PROMPT), _EXPECTED)
    assert actual == tokens.TokenComparison("onnx", "prompt 0", 2, 5, 10, (), agreeing=8)
    tokens.check_agreement([actual], 0.8)
    with pytest.raises(
        ParityError,
        match=r"onnx: tokens: argmax_agreement of the new tokens is 0.8 \(8 of 10 agree\); the gate is 0.81",
    ):
        tokens.check_agreement([actual], 0.81)


def test_expected_tokens_do_not_depend_on_the_generation_config() -> None:
    model, prompt = models.make("gpt2"), models.prompts("gpt2")[0]
    plain = tokens.likeliest_tokens(model, prompt, 20)
    ids = prompt["input_ids"]
    mask = prompt["attention_mask"]
    for step in range(20):  # the same computation without a cache
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            token = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].argmax(-1)
        assert token.tolist() == plain[:, step].tolist()
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    own = model.generation_config
    own.do_sample, own.repetition_penalty, own.eos_token_id = True, 5.0, [int(plain[0, 0])]
    assert torch.equal(tokens.likeliest_tokens(model, prompt, 20), plain)
    assert model.generation_config is own
    assert own.repetition_penalty == 5.0


def test_each_prompt_and_its_first_row_without_padding_are_cases() -> None:
    named = dict(tokens.cases(models.prompts("llama")))
    assert list(named) == ["prompt 0", "prompt 0, first row", "prompt 1"]
    assert named["prompt 0, first row"]["input_ids"].tolist() == [[5, 6, 7, 9]]


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_greedy_model_has_no_ignored_settings(name: str) -> None:
    assert tokens.ignored_settings(models.make(name)) == ()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 3.0),
        ("no_repeat_ngram_size", 1),
        ("suppress_tokens", "first"),
        ("begin_suppress_tokens", "first"),
        ("bad_words_ids", "first"),
        ("forced_eos_token_id", 3),
        ("sequence_bias", "first"),
        ("num_beams", 4),
    ],
)
def test_settings_that_change_the_tokens_are_reported_as_ignored(name: str, value: Any) -> None:
    """The docs promised the tokens of ``generate(do_sample=False)``, which uses these settings."""
    model, prompt = models.make("gpt2"), models.prompts("gpt2")[0]
    plain = tokens.likeliest_tokens(model, prompt, 20)
    first = int(plain[0, 0])
    values = {"bad_words_ids": [[first]], "sequence_bias": [[[first], -100.0]]}.get(name, [first])
    setattr(model.generation_config, name, values if value == "first" else value)
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    assert tokens.ignored_settings(model) == (name,)
    own = model.generate(**prompt, **settings)[:, prompt["input_ids"].shape[1] :]
    assert own.tolist() != plain.tolist()
