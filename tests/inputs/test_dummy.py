"""Tests of inputs that are generated from the config of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    LayoutLMConfig,
    LayoutLMModel,
    UnivNetConfig,
    UnivNetModel,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperModel,
)

from optexport.errors import TraceError
from optexport.inputs.dummy import dummy_inputs
from optexport.signature.signature import conventional_axes
from tests._helpers import models
from tests._helpers.inputs import TINY
from tests.tiers import examples
from tests.zoo import shrinking

SIDE: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def clip() -> nn.Module:
    text = {**SIDE, "vocab_size": 30, "max_position_embeddings": 12, "eos_token_id": 29}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**SIDE, "image_size": 16, "patch_size": 8}))


def whisper() -> nn.Module:
    sizes = {
        f"{side}_{field}": 1 for side in ("encoder", "decoder") for field in ("layers", "attention_heads", "ffn_dim")
    }
    return WhisperModel(
        WhisperConfig(vocab_size=30, d_model=8, max_source_positions=20, num_mel_bins=4, pad_token_id=0, **sizes)
    )


FURTHER = {
    "clip": (clip, {"input_ids", "attention_mask", "pixel_values"}),
    "whisper": (whisper, {"input_features", "decoder_input_ids"}),
    "wav2vec2": (
        lambda: Wav2Vec2Model(Wav2Vec2Config(**SIDE, conv_dim=(4,) * 7, vocab_size=9, num_conv_pos_embedding_groups=2)),
        {"input_values"},
    ),
    "layoutlm": (lambda: LayoutLMModel(LayoutLMConfig(**TINY)), {"input_ids", "attention_mask"}),
    "oblong vit": (
        lambda: ViTModel(ViTConfig(**SIDE, image_size=[16, 24], patch_size=8, num_channels=1)),
        {"pixel_values"},
    ),
}


@pytest.mark.parametrize("name", models.NAMES)
def test_model_accepts_its_generated_inputs(name: str) -> None:
    model = models.model(name)
    with torch.no_grad():
        assert model(**dummy_inputs(model))


@pytest.mark.parametrize("name", FURTHER)
def test_audio_or_image_model_accepts_its_generated_inputs(name: str) -> None:
    make, names = FURTHER[name]
    model = make().eval()
    inputs = dummy_inputs(model)
    assert set(inputs) == names
    with torch.no_grad():
        assert model(**inputs)


@pytest.mark.parametrize("name", models.NAMES)
def test_dynamic_axes_are_at_least_two_and_shared_sizes_agree(name: str) -> None:
    sizes: dict[str, set[int]] = {}
    for key, tensor in dummy_inputs(models.model(name)).items():
        for axis, size in zip(conventional_axes(key, tensor.dim()), tensor.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    assert all(len(values) == 1 and min(values) >= 2 for values in sizes.values())


@settings(max_examples=examples(100))
@given(st.integers(1, 300))
def test_token_ids_are_inside_any_vocabulary(size: int) -> None:
    model = nn.Linear(1, 1)
    model.config = BertConfig(vocab_size=size)  # type: ignore[assignment]
    model.forward = lambda input_ids: input_ids  # type: ignore[method-assign]
    ids = dummy_inputs(model)["input_ids"]
    assert 0 <= int(ids.min()) <= int(ids.max()) < size
    assert size < 200 or len(ids.unique()) == ids.numel()


def test_generated_inputs_are_reproducible() -> None:
    first, second = (dummy_inputs(models.model("groupvit")) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_float_inputs_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    inputs = dummy_inputs(clip().to(dtype))
    assert inputs["pixel_values"].dtype is dtype
    assert inputs["input_ids"].dtype is torch.int64


def test_inputs_are_made_by_name_in_the_order_given() -> None:
    names = ["attention_mask", "token_type_ids", "position_ids", "input_ids"]
    model = BertModel(BertConfig(**TINY)).eval()
    inputs = dummy_inputs(model, names)
    assert list(inputs) == names
    with torch.no_grad():
        assert model(**inputs)


def test_corners_of_boxes_are_ordered() -> None:
    box = dummy_inputs(LayoutLMModel(LayoutLMConfig(**TINY)), ["input_ids", "bbox"])["bbox"]
    assert bool((box[..., 0] <= box[..., 2]).all())
    assert bool((box[..., 1] <= box[..., 3]).all())


def test_unknown_or_ungeneratable_input_is_refused() -> None:
    model = models.model("bert")
    with pytest.raises(TraceError, match="input pixel_values: BertModel has no input of this name"):
        dummy_inputs(model, ["pixel_values"])
    with pytest.raises(TraceError, match="input inputs_embeds: the model's config does not determine this input"):
        dummy_inputs(model, ["inputs_embeds"])


def test_sequences_fit_the_positions_of_the_model() -> None:
    """A model with five positions must not get nine tokens."""
    model = BertModel(BertConfig(**{**TINY, "max_position_embeddings": 5})).eval()
    with torch.no_grad():
        assert model(**dummy_inputs(model))


KINDS = {
    "llava": {"input_ids", "attention_mask", "pixel_values"},
    "qwen2_vl": {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids", "position_ids"},
    "wav2vec2-bert": {"input_features"},
    "patchtst": {"past_values"},
    "timesformer": {"pixel_values"},
    "encodec": {"input_values"},
    "vilt": {"input_ids", "attention_mask", "pixel_values"},
}


@pytest.mark.parametrize("model_type", KINDS)
def test_multimodal_model_accepts_its_generated_inputs(model_type: str) -> None:
    model = next(shrinking.candidates(model_type))[1]()
    inputs = dummy_inputs(model)
    assert set(inputs) == KINDS[model_type]
    with torch.no_grad():
        assert model(**inputs)


def test_text_has_one_image_token_for_each_image_feature() -> None:
    model: Any = next(shrinking.candidates("llava"))[1]()
    inputs = dummy_inputs(model)
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"]).pooler_output
    tokens = (inputs["input_ids"] == model.config.image_token_id).sum(1)
    assert tokens.tolist() == [len(row) for row in features]


def test_noise_is_an_input_if_the_model_accepts_it() -> None:
    sizes = {"model_in_channels": 4, "model_hidden_channels": 4, "kernel_predictor_hidden_channels": 4}
    model = UnivNetModel(UnivNetConfig(num_mel_bins=6, **sizes)).eval()
    inputs = dummy_inputs(model)
    assert inputs["noise_sequence"].shape == (*inputs["input_features"].shape[:2], 4)
    with torch.no_grad():
        assert torch.equal(model(**inputs).waveforms, model(**inputs).waveforms)


def test_noise_for_the_choice_of_patches_is_an_input() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = ViTMAEModel(ViTMAEConfig(image_size=8, patch_size=2, **sizes)).eval()
    inputs = dummy_inputs(model)
    assert inputs["noise"].shape == (2, 16)
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_model_that_accepts_no_generated_inputs_is_an_error() -> None:
    model = next(shrinking.candidates("udop"))[1]()
    with pytest.raises(TraceError, match="the model fails on all .* sets of inputs") as raised:
        dummy_inputs(model)
    assert raised.value.hint
