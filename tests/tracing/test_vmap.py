"""``torch.vmap`` is expanded in the masks of transformers and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, masking_utils

from optexport.api import export
from optexport.errors import TraceError
from optexport.tracing.trace import trace
from tests._helpers.models import randomise


class Masked(PreTrainedModel):
    """A model whose mask is joined with its own function, like image models with bidirectional parts."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layer = nn.Embedding(12, 4)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(input_ids)
        mask = masking_utils.create_causal_mask(
            self.config, x, attention_mask, past_key_values=None, or_mask_function=lambda b, h, q, k: k < 2
        )
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)


def test_mask_made_by_transformers_under_vmap_is_traced() -> None:
    config = LlamaConfig(vocab_size=12, hidden_size=4, num_attention_heads=1, attn_implementation="sdpa")
    model: Any = randomise(Masked(config))
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    traced = trace(model, {"input_ids": ids, "attention_mask": mask})
    for batch in ((ids, mask), (ids.repeat(2, 2), mask.repeat(2, 2))):
        with torch.no_grad():
            assert torch.equal(traced.graph_module(*batch), model(*batch))


class Mapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.cumsum(0))(x)


@pytest.mark.slow
def test_vmap_in_the_models_own_code_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"torch\.vmap") as raised:
        export(Mapped().eval(), {"x": torch.ones(3, 4)}, tmp_path / "bundle")
    assert raised.value.exit_code == 3
    assert raised.value.hint
