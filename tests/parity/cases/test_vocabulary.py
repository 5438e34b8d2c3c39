"""Tests detection of token id inputs, vocabulary sizes and attention masks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optexport.parity.cases.vocabulary import attention_masks, has_value_dependent_sizes, vocabularies
from optexport.pipeline.run import run
from optexport.tracing.trace import trace
from tests._helpers import models
from tests._helpers.exports import quick


class Looks(nn.Module):
    """Looks up ids directly, reshaped, cast, or only after changing them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.large, self.small = nn.Embedding(30, 4), nn.Embedding(20, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "as they are":
                embedded = self.large(ids)
            case "reshaped":
                embedded = self.large(ids.reshape(-1, ids.shape[-1]).unsqueeze(0)[0])
            case "cast":
                embedded = self.large(ids.long())
            case "twice":
                embedded = self.large(ids) + self.small(ids[:, :1])
            case "of one column":
                embedded = self.small(ids[:, 0])[:, None]
            case "changed":
                embedded = self.large(ids + 2)
            case _:
                embedded = ids[..., None].float()
        return embedded + x[..., None]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "count"),
    [("as they are", 30), ("reshaped", 30), ("cast", 30), ("twice", 20), ("of one column", 20), ("changed", None),
     ("not at all", None)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding_is_found_through_reshapes_and_casts(way: str, count: int | None, dtype: torch.dtype) -> None:
    example = {"ids": torch.ones(3, 4, dtype=dtype), "x": torch.ones(3, 4)}
    traced = trace(Looks(way).eval(), example)
    assert vocabularies(traced.graph_module, traced.signature) == ({} if count is None else {"ids": count})


@pytest.mark.sample(1)
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


@pytest.mark.slow
def test_token_type_ids_have_their_own_vocabulary() -> None:
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
def test_output_sizes_set_by_input_values_are_detected(by_values: bool) -> None:
    """Repeating by a made-up number would need more memory than is available."""
    traced = trace(Repeats(by_values=by_values), {"x": torch.ones(2, 3), "times": torch.tensor([1, 2])})
    assert has_value_dependent_sizes(traced.graph_module) is by_values


CONFIG = """
[model]
source = "python:tests.parity.cases.test_vocabulary:make_embedding"
[inputs.tensors.input]
shape = ["batch", 4]
dtype = "int64"
high = {high}
[inputs.dynamic]
batch = [1, 4]
[export]
formats = ["torchscript"]
[tracking]
enabled = false
"""


def make_embedding() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("high", "unchecked"), [(20, []), (2000, ["input from 20: the model has 20 ids, from 0 to 19"])]
)
def test_declared_ids_that_the_model_lacks_are_named(high: int, unchecked: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(high=high))
    left_out = run(tmp_path / "config.toml").manifest.parity.left_out
    assert [reason for reason in left_out if reason.startswith("input ")] == unchecked


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        (lambda m, x: m.encoder(x, src_mask=m.mask), True),
        (lambda m, x: m.encoder(x, src_mask=m.mask) + m.mask[:, :1], False),
        (lambda m, x: x * (1 - m.mask[None, :, :1]) + m.mask[:, :1], False),
        (lambda m, x: x.masked_fill(m.mask[:, :1] > 0, 0), False),
    ],
    ids=["an encoder layer's", "and added", "of an image", "compared"],
)
def test_an_attention_mask_is_detected(body: Any, is_one: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = body(SimpleNamespace(encoder=self.encoder, mask=mask), x)
            return output

    traced = trace(Masked().eval(), {"x": torch.randn(2, 5, 8), "mask": torch.zeros(5, 5)})
    assert attention_masks(traced.graph_module, traced.signature) == ({"mask"} if is_one else set())


@pytest.mark.slow
def test_an_additive_encoder_mask_is_not_tried_with_ones(tmp_path: Path) -> None:
    """Torch treats a 1 as a hidden position in eval mode, but its graph adds it."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    result = quick(layer, {"src": torch.randn(2, 5, 8), "src_mask": torch.zeros(5, 5)}, tmp_path / "out")
    assert "src_mask hiding every second position" in result.manifest.parity.cases
