"""The inputs that hold the ids of an embedding are known, with how many ids there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport.proof.vocabulary import sized_by_values, vocabularies
from optexport.tracing.trace import trace
from tests import models


class Looks(nn.Module):
    """Looks ids up as they come, reshaped, cast, or only after they were changed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.large, self.small = nn.Embedding(30, 4), nn.Embedding(20, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "as they are":
                found = self.large(ids)
            case "reshaped":
                found = self.large(ids.reshape(-1, ids.shape[-1]).unsqueeze(0)[0])
            case "cast":
                found = self.large(ids.long())
            case "twice":
                found = self.large(ids) + self.small(ids[:, :1])
            case "of one column":
                found = self.small(ids[:, 0])[:, None]
            case "changed":
                found = self.large(ids + 2)
            case _:
                found = ids[..., None].float()
        return found + x[..., None]


@pytest.mark.parametrize(
    ("way", "count"),
    [("as they are", 30), ("reshaped", 30), ("cast", 30), ("twice", 20), ("of one column", 20), ("changed", None),
     ("not at all", None)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding_is_found_through_what_hands_ids_on(way: str, count: int | None, dtype: torch.dtype) -> None:
    example = {"ids": torch.ones(3, 4, dtype=dtype), "x": torch.ones(3, 4)}
    traced = trace(Looks(way).eval(), example)
    assert vocabularies(traced.graph_module, traced.signature) == ({} if count is None else {"ids": count})


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("bert", {"input_ids"}),
        ("bart", {"input_ids", "decoder_input_ids"}),
        ("llama", {"input_ids"}),
        ("vit", set()),
    ],
)
def test_the_ids_of_transformers_are_found(name: str, inputs: set[str]) -> None:
    traced = trace(models.model(name), models.inputs(name))
    assert vocabularies(traced.graph_module, traced.signature) == dict.fromkeys(inputs, 60)


def test_the_kinds_of_tokens_are_a_vocabulary_of_their_own() -> None:
    example = {**models.inputs("bert"), "token_type_ids": torch.zeros(3, 7, dtype=torch.int64)}
    traced = trace(models.model("bert"), example)
    assert vocabularies(traced.graph_module, traced.signature) == {"input_ids": 60, "token_type_ids": 2}


class Repeats(nn.Module):
    def __init__(self, *, by_values: bool) -> None:
        super().__init__()
        self.by_values = by_values

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, 0) if self.by_values else x.repeat_interleave(3, 0) + times.sum()


@pytest.mark.parametrize("by_values", [False, True])
def test_it_is_known_where_sizes_hang_on_values(by_values: bool) -> None:
    """A repetition by a made-up number would ask for more memory than there is."""
    traced = trace(Repeats(by_values=by_values), {"x": torch.ones(2, 3), "times": torch.tensor([1, 2])})
    assert sized_by_values(traced.graph_module) is by_values
