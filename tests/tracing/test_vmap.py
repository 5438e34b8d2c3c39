"""``torch.vmap`` becomes calls on whole batches, in the masks of transformers and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from transformers import LlamaConfig, PreTrainedModel, masking_utils

from optexport.api import export
from optexport.exporters import targets
from optexport.tracing.graph_checks import check_writable
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


class Rows(nn.Module):
    """Maps functions of one row, with a layer and a size from outside, over two axes, and within each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        rows = torch.vmap(lambda row: self.linear(row) * row.sum() + self.linear.bias.view(2, 2).T.reshape(-1))(x)
        columns = vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(x)
        pairs = vmap(vmap(lambda a, b: (a * b).sum(), in_dims=(None, 0)), in_dims=(0, None))(x, y)
        chosen = torch.vmap(lambda row: torch.where(row > 0, row, -row).softmax(0))(y)
        return rows, columns, pairs, chosen


def test_vmap_in_the_models_own_code_is_traced_for_any_size() -> None:
    model = randomise(Rows())
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "batch"}})
    check_writable(traced.graph_module.graph)
    for size in (1, 2, 7):
        x = torch.randn(size, 4)
        with torch.no_grad():
            for got, want in zip(traced.graph_module(x), model(x), strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_files_of_a_model_with_vmap_are_right(tmp_path: Path) -> None:
    model = randomise(Rows())
    result = export(model, {"x": torch.randn(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: "batch"}}, effort="quick")
    names = [spec.name for spec in result.manifest.outputs]
    for size in (2, 7):
        x = torch.randn(size, 4)
        want = [output.detach() for output in model(x)]
        for file_format, path in result.files.items():
            for _, run in targets.open_file(path, file_format, names):
                for got, expected in zip(run({"x": x}).values(), want, strict=True):
                    torch.testing.assert_close(got, expected)
