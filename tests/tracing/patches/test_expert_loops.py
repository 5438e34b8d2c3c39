"""Loops over the experts that tokens chose: one graph for all choices and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from optexport.errors import TraceError
from optexport.tracing.trace import trace

EXPERTS, WIDTH = 4, 3


class LoopExperts(nn.ModuleDict):
    """Like transformers models without another implementation; three ways to get an expert's number."""

    def __init__(self) -> None:
        super().__init__({f"expert_{index}": nn.Linear(WIDTH, WIDTH) for index in range(EXPERTS)})

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, EXPERTS).T
        for expert in (mask.sum(-1) > 0).nonzero():
            (tokens,) = torch.where(mask[expert[0]])
            if tokens.numel() == 0 or expert[0] == EXPERTS:
                continue
            has_tokens = self[f"expert_{expert[0]}"](x[tokens]) * (int(expert.item()) + 1)
            result.index_add_(0, tokens, has_tokens)
        return result


class Mixture(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, experts: nn.Module) -> None:
        super().__init__(PreTrainedConfig())
        self.experts = experts

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.experts(x, chosen)


@pytest.mark.slow
def test_loop_over_chosen_experts_holds_for_every_choice() -> None:
    torch.manual_seed(0)
    model = Mixture(LoopExperts()).eval()
    traced = trace(model, {"x": torch.randn(5, WIDTH), "chosen": torch.tensor([0, 1, 1, 3, 0])})
    for chosen in ([2, 2], [3, 1, 2, 0, 1, 2, 3], [0]):
        batch = {"x": torch.randn(len(chosen), WIDTH), "chosen": torch.tensor(chosen)}
        with torch.no_grad():
            torch.testing.assert_close(traced.graph_module(**batch), model(**batch))


@pytest.mark.slow
def test_other_loop_over_nonzero_results_is_refused() -> None:
    """Such a loop may have an effect without tokens."""

    class Loop(LoopExperts):
        pass

    with pytest.raises(TraceError, match=r"test_expert_loops\.py:\d+: for expert in"):
        trace(Mixture(Loop()).eval(), {"x": torch.randn(5, WIDTH), "chosen": torch.tensor([0, 1, 1, 3, 0])})
