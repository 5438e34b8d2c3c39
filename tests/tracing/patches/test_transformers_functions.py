"""Replacements of transformers functions in a trace compute what the originals compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel, masking_utils

from optexport.tracing.trace import Traced, trace
from tests._helpers.models import randomise


class Attends(PreTrainedModel):
    """A model that makes a mask with a transformers function for attention without a causal default."""

    config_class = LlamaConfig
    _supports_sdpa = True
    is_causal = False

    def __init__(self, make_mask: Any) -> None:
        super().__init__(LlamaConfig(vocab_size=12, hidden_size=4, num_attention_heads=1, attn_implementation="sdpa"))
        self.layer, self.make_mask = nn.Linear(4, 4), make_mask
        self.post_init()

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        more = {} if self.make_mask is masking_utils.create_bidirectional_mask else {"past_key_values": None}
        mask = self.make_mask(self.config, x, attention_mask, **more)
        x = self.layer(x)
        attend = AttentionInterface()["sdpa"]
        result: torch.Tensor = attend(self, x[:, None], x[:, None], x[:, None], mask, is_causal=self.is_causal)[0]
        return result


def _traced(model: nn.Module, *inputs: torch.Tensor) -> Traced:
    return trace(model, dict(zip(("x", "attention_mask"), inputs, strict=False)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("masked", [True, False])
def test_causal_mask_left_out_by_the_model_is_left_out(masked: bool) -> None:
    model: Any = randomise(Attends(masking_utils.create_causal_mask))
    x = torch.linspace(-1, 2, 40).reshape(2, 5, 4)
    mask = torch.ones(2, 5, dtype=torch.int64)
    padded = mask.clone()
    padded[1, 3:] = 0
    batch = (mask,) if masked else ()
    graph_module = _traced(model, x, *batch).graph_module
    for masks in ((mask,), (padded,)) if masked else ((),):
        with torch.no_grad():
            assert torch.allclose(graph_module(x, *masks), model(x, *masks), atol=1e-6)


class AttendsOfTwo(Attends):
    """Takes batches of two only."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x + torch.ones(2, 1, 1), attention_mask)


@pytest.mark.slow
def test_mask_has_the_batch_size_even_if_it_hides_nothing() -> None:
    model = randomise(AttendsOfTwo(masking_utils.create_bidirectional_mask))
    traced = _traced(model, torch.rand(2, 5, 4), torch.ones(2, 5, dtype=torch.int64))
    assert {"x[0] = 2", "attention_mask[0] = 2"} <= set(traced.fixed)
