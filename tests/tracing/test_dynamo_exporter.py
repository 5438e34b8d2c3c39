"""Patches of transformers during the trace of one of its models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from optexport.tracing.trace import trace
from tests.zoo import stages


class Halving(PreTrainedModel):
    """Like Informer's encoder: one mask for all layers, and the layers after the first accept only None."""

    config_class = PreTrainedConfig
    _supports_sdpa = True

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=None)
        for _ in range(2):
            if mask is not None and mask.shape[-1] != x.shape[1]:
                raise ValueError(f"a mask of {mask.shape[-1]} for {x.shape[1]}")
            x = nn.functional.scaled_dot_product_attention(x, x, x, None if mask is None else mask[:, 0])[:, ::2]
        return x * self.scale


@pytest.mark.slow
def test_no_mask_is_made_without_padding() -> None:
    model = Halving().eval()
    traced = trace(model, {"x": torch.randn(3, 9, 4)})
    batch = torch.randn(2, 14, 4)
    with torch.no_grad():
        torch.testing.assert_close(traced.graph_module(batch), model(batch))


@pytest.mark.slow
def test_attention_within_segments_normalizes_queries_and_keys() -> None:
    built = stages.build(stages.Outcome("glm_ocr_vision"))
    assert built is not None
    model, inputs = built
    graph_module = trace(model, inputs, {}).graph_module
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(graph_module(**inputs)["last_hidden_state"], expected)
