"""Tiny random generative models of several families, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from optexport.tracing.dynamo_exporter import quiet

_VOCABULARY = 64
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_DECODER: dict[str, Any] = {
    **_SPECIAL,
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
# Not tied: a random model with tied embeddings repeats its last token.
_GEMMA: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
_T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 3.0,
    "tie_word_embeddings": False,
}
_WHISPER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 128,
    "init_std": 1.0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
}

_GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256, "initializer_range": 0.3}

_FACTORIES: dict[str, Callable[..., PreTrainedModel]] = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_DECODER, **_GEMMA, head_dim=4)),
    "gpt2": lambda **options: GPT2LMHeadModel(
        GPT2Config(**_SPECIAL, **{**_GPT2, **options}, vocab_size=_VOCABULARY),
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_DECODER)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=4)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(**{**_SPECIAL, **_T5, "vocab_size": _VOCABULARY, "decoder_start_token_id": 0})
    ),
    "whisper": lambda: WhisperForConditionalGeneration(
        WhisperConfig(**_SPECIAL, **_WHISPER, vocab_size=_VOCABULARY, decoder_start_token_id=2)
    ),
}
FAMILIES = tuple(_FACTORIES)
WITHOUT_ENCODER = ("gemma3", "gpt2", "llama", "qwen3")


def make(family: str, **options: Any) -> PreTrainedModel:
    """Returns a new model of a family, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _FACTORIES[family](**options).eval()


def phi3(turn: int) -> PreTrainedModel:
    """Returns a model that changes its rotary factors after `turn` positions."""
    rope = {"rope_type": "longrope", "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.0], "rope_theta": 10000.0}
    scaling = {**rope, "original_max_position_embeddings": turn, "factor": 256 / turn}
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        config = Phi3Config(**_DECODER, original_max_position_embeddings=turn, rope_parameters=scaling)
        return Phi3ForCausalLM(config).eval()


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Returns a prompt with rows of several lengths, left-padded with 0."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) >= longest - lengths).long()}


def prompts(family: str) -> list[dict[str, torch.Tensor]]:
    """Returns two prompts: several rows, which are padded for text models, and a single row."""
    if family == "whisper":
        times = torch.arange(2 * 8 * 40) * 0.37
        return [
            {"input_features": times.sin().reshape(2, 8, 40)},
            {"input_features": (3 * times[:320]).cos().reshape(1, 8, 40)},
        ]
    return [left_padded([[5, 6, 7, 9], [3, 4, 5, 6, 7, 8], [8, 22, 33, 44, 55]]), left_padded([[11, 12, 13]])]
