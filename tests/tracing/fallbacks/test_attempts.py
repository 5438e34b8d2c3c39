"""Constant inputs of transformers models that the exporter could compute itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, VideoLlama3VisionConfig

from optexport.errors import TraceError
from optexport.inputs.dummy import dummy_inputs
from optexport.tracing import trace


@pytest.mark.slow
def test_constant_input_is_not_recomputed_from_other_inputs() -> None:
    config = VideoLlama3VisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4
    )
    model = AutoModel.from_config(config).eval()
    example = dummy_inputs(model)
    traced = trace.trace(model, example)
    assert set(traced.constants) == {"cu_seqlens", "grid_thw", "merge_sizes"}
    taken = {name: torch.randn_like(v) if v.is_floating_point() else v for name, v in example.items()}
    want = model(**taken).last_hidden_state
    inputs = [taken[spec.name] for spec in traced.signature.inputs]
    got = traced.graph_module(*inputs)
    torch.testing.assert_close(next(iter(got.values())) if isinstance(got, dict) else got[0], want)


@pytest.mark.nightly
def test_input_too_long_to_be_a_constant_is_refused() -> None:
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:length] for length in lengths.tolist() if length > 1])

    example = {"x": torch.randn(9, 3), "lengths": torch.randint(2, 9, (300,))}
    with pytest.raises(TraceError, match="branches on values more than 8 times in one call"):
        trace.trace(Cut(), example)
