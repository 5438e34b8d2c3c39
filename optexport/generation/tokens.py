"""Compares generated tokens of the files with greedy ``model.generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin

from optexport.config.metrics import GENERATION_METRIC
from optexport.errors import ParityError
from optexport.generation.components import Prompt
from optexport.generation.runtime import Parts
from optexport.tracing import dynamo_exporter

# Each of two logits may have an error of one tolerance.
_SIDES = 2
# Settings that make `generate` take another token than the most likely, or end elsewhere than at an end token. Each
# value leaves the result unchanged; so does None. A multilingual Whisper starts with tokens of language and task.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), 0),
    **{name: [] for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings")},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("constraints", "force_words_ids", "forced_decoder_ids", "dola_layers", "max_time"), None),
    **dict.fromkeys(("do_sample", "is_multilingual", "remove_invalid_values", "token_healing"), False),
    **dict.fromkeys(("sequence_bias", "watermarking_config"), None),
}


@dataclass(frozen=True)
class Tie:
    """The end of a row at two nearly equal logits, closer than the tolerance allows to decide.

    Attributes:
        token: The index of the new token, from 0; later tokens of this row are not compared.
        gap: The original's logit of the expected token, minus its logit of the file's token.
    """

    row: int
    token: int
    gap: float


@dataclass(frozen=True)
class TokenComparison:
    """The comparison of one format's tokens for one prompt.

    Attributes:
        prompt: The index of the prompt, and which of its rows.
        compared: How many new tokens were compared, in all rows; all of them are equal without lower precision.
        agreeing: How many of them a file of lower precision predicts, each after the model's own tokens; None for other
            files.
    """

    format: str
    prompt: str
    rows: int
    tokens: int
    compared: int
    ties: tuple[Tie, ...]
    agreeing: int | None = None


def cases(prompts: Sequence[Prompt]) -> Iterator[tuple[str, Prompt]]:
    """Yields each prompt, and the first row of prompts with several, without its padding."""
    for index, prompt in enumerate(prompts):
        rows = next(iter(prompt.values())).shape[0]
        yield f"prompt {index}", prompt
        if rows > 1:
            first_row = {name: tensor[:1] for name, tensor in prompt.items()}
            if "attention_mask" in first_row:
                is_token = first_row["attention_mask"][0] != 0
                first_row = {
                    name: tensor[:, is_token] if tensor.shape[:2] == (1, len(is_token)) else tensor
                    for name, tensor in first_row.items()
                }
            yield f"prompt {index}, first row", first_row


def likeliest_tokens(model: nn.Module, prompt: Prompt, tokens: int) -> torch.Tensor:
    """Returns the new tokens of greedy ``generate`` without end tokens: [batch, tokens].

    Other settings of the model's generation config are ignored; `ignored_settings` lists them.
    """
    own: Any = model.generation_config
    plain = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=tokens,
        use_cache=True,
        pad_token_id=max(0, own.pad_token_id or 0),
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    model.generation_config = plain  # type: ignore[assignment]  # generate() takes missing settings from it
    try:
        with torch.no_grad(), dynamo_exporter.quiet():
            # Not the model's method: Whisper's also splits long audio and forces tokens.
            ids = GenerationMixin.generate(model, **dict(prompt), generation_config=plain)  # type: ignore[arg-type]
    finally:
        model.generation_config = own
    assert isinstance(ids, torch.Tensor)
    return ids[:, -tokens:]


def ignored_settings(model: nn.Module) -> tuple[str, ...]:
    """Returns the settings that `generate` uses, but `likeliest_tokens` and the files ignore.

    The names are fields of ``transformers.GenerationConfig``.
    """
    own = vars(model.generation_config)
    return tuple(name for name, neutral in _NEUTRAL.items() if own.get(name) not in (None, neutral))


def compare(
    original: Parts, candidate: Parts, file_format: str, case: tuple[str, Prompt], expected: torch.Tensor, limit: float
) -> TokenComparison:
    """Compares the tokens of the files with the tokens of the original.

    Args:
        original: The parts of the original model, for the logits if tokens differ.
        expected: The new tokens of the original, [batch, tokens].
        limit: The tolerance of a logit.

    Raises:
        ParityError: A token differs, and its logit is not close enough to the best for rounding to explain it.
    """
    name, prompt = case
    actual = candidate.generate(prompt, expected.shape[1])
    ties, compared = [], 0
    for row in range(expected.shape[0]):
        differing = (actual[row] != expected[row]).nonzero().flatten()
        first = int(differing[0]) if len(differing) else expected.shape[1]
        compared += first
        if not len(differing):
            continue
        logits = _logits(original, prompt, expected[:, :first])[row, -1]
        expected_token, actual_token = int(expected[row, first]), int(actual[row, first])
        gap = float(logits[expected_token] - logits[actual_token])
        if not gap <= _SIDES * limit:
            raise ParityError(
                f"token {first} of row {row} differs from model.generate (expected {expected_token}, found "
                f"{actual_token}; their logits differ by {gap:.2g}, rounding explains {_SIDES * limit:.2g})",
                location=f"{file_format}: {name}",
                hint="The check of the decoder alone passed. Please report this with the model's config.",
            )
        ties.append(Tie(row, first, gap))
    return TokenComparison(file_format, name, expected.shape[0], expected.shape[1], compared, tuple(ties))


def count_agreeing(
    candidate: Parts, file_format: str, case: tuple[str, Prompt], expected: torch.Tensor
) -> TokenComparison:
    """Counts the tokens of the original that files of lower precision predict after the original's earlier tokens.

    Their own tokens are not compared: after the first different token, all others may differ.

    Args:
        expected: The new tokens of the original, [batch, tokens].
    """
    name, prompt = case
    rows, new = expected.shape
    predicted = _logits(candidate, prompt, expected[:, :-1])[:, -new:].argmax(-1)
    return TokenComparison(file_format, name, rows, new, rows * new, (), int((predicted == expected).sum()))


def check_agreement(comparisons: Sequence[TokenComparison], minimum: float) -> None:
    """Checks the share of tokens that files of lower precision predict, over all prompts.

    Raises:
        ParityError: The share is below the minimum.
    """
    lowered = [comparison for comparison in comparisons if comparison.agreeing is not None]
    agreeing, compared = sum(one.agreeing or 0 for one in lowered), sum(one.compared for one in lowered)
    if lowered and agreeing / compared < minimum:
        raise ParityError(
            f"{GENERATION_METRIC} of the new tokens is {agreeing / compared:.6g} ({agreeing} of {compared} agree); "
            f"the gate is {minimum:g}",
            location=f"{lowered[0].format}: tokens",
            hint=f"Lower {GENERATION_METRIC} in [parity.metrics], or add layers to precision.keep_float32.",
        )


def _logits(parts: Parts, prompt: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a prompt and more tokens, [batch, sequence, vocabulary]."""
    inputs = parts.begin(prompt)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], 1)
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    return parts.decoder(inputs)["logits"]
