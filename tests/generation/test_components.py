"""Tests that the parts of a model, with a cache as input, give the outputs of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from optexport import export_generation
from optexport.errors import ConfigError, OptexportError, TraceError
from optexport.generation.components import components
from optexport.generation.names import next_past
from optexport.signature.resizing import resize
from optexport.signature.signature import Dim, Signature, TensorSpec
from tests.generation import models


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", models.WITHOUT_ENCODER)
def test_text_split_anywhere_gives_the_logits_of_the_full_text(family: str) -> None:
    model = models.make(family)
    prompt = models.left_padded([list(range(5, 25)), list(range(30, 44))])  # longer than the window of any layer
    (part,) = components(model, [prompt])
    empty = {name: tensor[:2, :, :0] for name, tensor in part.batches[0].items() if name.startswith("past_key")}
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        for cut in (0, 1, 7, 12, 19):
            past = empty
            if cut:
                past = next_past(part.module(input_ids=ids[:, :cut], attention_mask=mask[:, :cut], **empty))
            rest = part.module(input_ids=ids[:, cut:], attention_mask=mask, **past)
            real = mask[:, cut:, None] == 1
            torch.testing.assert_close(rest["logits"] * real, expected[:, cut:] * real, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name not in models.WITHOUT_ENCODER])
def test_encoder_and_decoder_give_the_logits_of_the_model(family: str) -> None:
    model = models.make(family)
    prompt = models.prompts(family)[0]
    encoder, decoder = components(model, [prompt])
    rows = next(iter(prompt.values())).shape[0]
    ids = torch.arange(9).repeat(rows, 1) + 5
    empty = {
        name: tensor[:rows, :, :0]
        for name, tensor in decoder.batches[0].items()
        if name.startswith("past_key") and "encoder" not in name
    }
    mask = {"encoder_attention_mask": prompt["attention_mask"]} if "attention_mask" in prompt else {}
    with torch.no_grad():
        expected = model(**prompt, decoder_input_ids=ids).logits
        cross = next_past(encoder.module(**prompt))
        first = decoder.module(input_ids=ids[:, :4], **mask, **empty, **cross)
        rest = decoder.module(input_ids=ids[:, 4:], **mask, **cross, **next_past(first))
    torch.testing.assert_close(torch.cat([first["logits"], rest["logits"]], 1), expected, rtol=1e-4, atol=1e-4)


def test_batches_have_the_caches_of_the_prompts() -> None:
    model, prompts = models.make("gpt2"), models.prompts("gpt2")
    (part,) = components(model, prompts)
    prefills = [batch for batch in part.batches if not batch["past_key_values_0_key"].shape[2]]
    assert [batch["input_ids"].tolist() for batch in prefills] == [p["input_ids"].tolist() for p in prompts]
    step = part.batches[2]
    with torch.no_grad():
        outputs: Any = model(**prompts[0], position_ids=(prompts[0]["attention_mask"].cumsum(-1) - 1).clamp(min=0))
    real = prompts[0]["attention_mask"][:, None, :, None]
    torch.testing.assert_close(step["past_key_values_0_key"] * real, outputs.past_key_values.layers[0].keys * real)
    assert min(*part.batches[0]["input_ids"].shape, *part.batches[0]["past_key_values_0_key"].shape) >= 2


def test_model_is_not_changed() -> None:
    model = models.make("gpt2")
    before, config = {n: t.clone() for n, t in model.state_dict().items()}, model.generation_config
    components(model, models.prompts("gpt2"))
    assert model.generation_config is config
    assert "forward" not in vars(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def _static() -> torch.nn.Module:
    model = models.make("gpt2")
    model.generation_config.cache_implementation = "static"
    return model


def _without_cache() -> torch.nn.Module:
    model = models.make("gpt2")
    model.generation_config.use_cache = False
    model.config.use_cache = False
    return model


def _mamba() -> torch.nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2)).eval()


def _with_convolutions() -> torch.nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    return Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=2)).eval()


def _encoder() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(**sizes, vocab_size=64)).eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (_static, TraceError, r"unsupported cache \(expected DynamicCache, found StaticCache\)"),
        (_without_cache, TraceError, "the model does not use a key/value cache"),
        (_mamba, TraceError, "the model does not use a key/value cache"),
        (
            _with_convolutions,
            TraceError,
            r"unsupported layer 0 of the cache \(expected keys and values, found LinearAttentionLayer\)",
        ),
        (_encoder, ConfigError, r"has no method generate\(\)"),
        (lambda: models.make("gpt2").train(), TraceError, "train mode"),
    ],
)
def test_unsupported_models_are_refused_with_a_reason(
    make: Callable[[], torch.nn.Module], error: type[OptexportError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text) as raised:
        export_generation(make(), models.prompts("gpt2"), tmp_path / "out")
    assert raised.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "the list of prompts is empty"),
        (None, r"expected a prompt or a list of prompts \(found NoneType\)"),
        ("a text", r"expected a prompt or a list of prompts \(found str\)"),
        ([{}], "expected a dict of tensors that are not empty"),
        ([[5, 6, 7]], "expected a dict of tensors that are not empty"),
        (
            [{"input_ids": torch.ones(1, 253).long(), "attention_mask": torch.ones(1, 253).long()}],
            r"the prompt is too long \(found \d+ tokens, the model takes 256\)",
        ),
        (
            [{"input_ids": torch.ones(1, 3).long(), "token_type_ids": torch.ones(1, 3).long()}],
            r"\(expected input_ids, attention_mask, found attention_mask, input_ids, token_type_ids\)",
        ),
        (
            [{"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 1, 0]])}],
            "a row has padding at its end",
        ),
        (
            [{"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2).long()}],
            "must both have the shape",
        ),
    ],
)
def test_invalid_prompt_is_refused(prompts: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        export_generation(models.make("gpt2"), prompts, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_axis_may_be_a_sum_of_dimensions() -> None:
    spec = TensorSpec("mask", "int64", ("batch", "past + new"))
    dims = {name: Dim(name, 0) for name in ("batch", "past", "new")}
    signature = Signature((spec, TensorSpec("ids", "int64", ("batch", "new"))), (), dims)
    batch = {"mask": torch.ones(2, 7), "ids": torch.ones(2, 3)}
    assert signature.sizes(batch) == {"batch": 2, "new": 3}
    resized = resize(batch, signature, {"batch": 1, "past": 0, "new": 4})
    assert {name: list(tensor.shape) for name, tensor in resized.items()} == {"mask": [1, 4], "ids": [1, 4]}
