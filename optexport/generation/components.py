"""The exported parts of a generative model, as functions of tensors, and their batches.

A decoder with its cache as input and output is prefill and decode in one: prefill is a call with a cache of length 0.
Therefore one file has all weights. A model with an encoder has a second part. It returns the keys and values of the
encoder for all steps of the decoder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from optexport.errors import TraceError, describe_error, first_line
from optexport.generation import caches
from optexport.generation.caches import Tensors
from optexport.generation.names import next_past, past_name
from optexport.loading.train_mode import find_training_module
from optexport.signature.resizing import resize_tensor
from optexport.signature.signature import Dim, Dynamic
from optexport.tracing import dynamo_exporter

Prompt = Mapping[str, torch.Tensor]

# Arguments of the decoder that the parts compute, or do not need.
_COMPUTED = {"attention_mask", "cache_position", "decoder_attention_mask", "position_ids"}
_TOKENS = {"input_ids", "decoder_input_ids"}
# torch.export fixes a dimension of size 0 or 1.
_MIN_SIZE = 2
# How many tokens are added to each prompt, to get caches for the checks.
STEPS = 4


@dataclass(frozen=True)
class Component:
    """A part of a model.

    Attributes:
        batches: The batch to trace with, then the batches to check, computed from the prompts.
    """

    name: str
    module: nn.Module
    batches: tuple[Tensors, ...]
    dynamic: Dynamic


class Decoder(nn.Module):
    """A model without an encoder, as a function of tokens, mask and cache.

    Inputs: ``input_ids`` [batch, sequence] and ``attention_mask`` [batch, past_sequence + sequence], int64, and for
    each layer ``past_key_values_I_key`` and ``_value`` [batch, heads, past_sequence, size of a head].
    Outputs: ``logits`` [batch, sequence, vocabulary], and ``present_I_key`` and ``_value``, longer by the sequence.

    Positions are counted as in ``generate``, from the first token that is not padding.
    """

    def __init__(self, model: nn.Module, layers: int, *, takes_positions: bool) -> None:
        super().__init__()
        self.model, self.layers, self.takes_positions = model, layers, takes_positions

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        mask = inputs["attention_mask"]
        cache = caches.to_cache(inputs, range(self.layers))
        positions: dict[str, torch.Tensor] = {}
        if self.takes_positions:
            counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
            # A slice would add an assertion that its length differs from the total length.
            new = cache.get_seq_length() + torch.arange(inputs["input_ids"].shape[1])
            positions["position_ids"] = counted.index_select(1, new)
        outputs = self.model(
            input_ids=inputs["input_ids"], attention_mask=mask, past_key_values=cache, use_cache=True, **positions
        )
        return {"logits": outputs.logits, **caches.to_tensors(outputs.past_key_values)}


class Encoder(nn.Module):
    """An encoder, with keys and values of all steps: ``present_I_encoder_key``, ``_value``.

    They come from the cache after the decoder's first step. The graph contains nothing else of this step.
    """

    def __init__(self, model: nn.Module, start: int) -> None:
        super().__init__()
        self.model, self.start = model, start

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        rows = next(iter(inputs.values())).shape[0]
        start = torch.full((rows, 1), self.start, dtype=torch.int64)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        outputs = self.model(**inputs, decoder_input_ids=start, past_key_values=cache, use_cache=True)
        return caches.to_tensors(outputs.past_key_values.cross_attention_cache, "encoder_")


class CrossDecoder(nn.Module):
    """The decoder of a model with an encoder, as a function of tokens and caches.

    Inputs: ``input_ids`` [batch, sequence] int64, and for each layer ``past_key_values_I_key`` and ``_value``
    [batch, heads, past_sequence, size of a head]. From the encoder: ``past_key_values_I_encoder_key`` and ``_value``
    [batch, heads, encoder_sequence, size of a head], and ``encoder_attention_mask`` [batch, encoder_sequence] int64 if
    the encoder has a mask. Outputs: as of `Decoder`.
    """

    def __init__(self, model: nn.Module, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        own = caches.to_cache(inputs, range(self.layers))
        cache = EncoderDecoderCache(own, DynamicCache())
        cache.cross_attention_cache = caches.to_cache(inputs, range(self.layers), "encoder_")
        cache.is_updated = dict.fromkeys(range(self.layers), True)
        keys = inputs[past_name(0, "encoder_key")]
        # Only its shape is used, because the keys and values of all layers exist.
        config: Any = self.model.config
        hidden = keys.new_zeros(keys.shape[0], keys.shape[2], config.hidden_size)
        mask = {"attention_mask": inputs["encoder_attention_mask"]} if "encoder_attention_mask" in inputs else {}
        outputs = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=inputs["input_ids"],
            past_key_values=cache,
            use_cache=True,
            **mask,
        )
        return {"logits": outputs.logits, **caches.to_tensors(outputs.past_key_values.self_attention_cache)}


def components(model: nn.Module, prompts: Sequence[Prompt]) -> list[Component]:
    """Returns the parts of a model, with their inputs for some prompts.

    Args:
        model: A transformers model, in eval mode.
        prompts: Arguments of ``model.generate``: ``input_ids`` and ``attention_mask``, padded on the left, or
            ``input_features``.

    Raises:
        TraceError: The model cannot generate, or has an unsupported cache.
    """
    name = type(model).__name__
    if find_training_module(model) is not None:
        raise TraceError(
            "the model, or a module of it, is in train mode, where its outputs may be random",
            location=name,
            hint="Call model.eval() first.",
        )
    if not getattr(model, "can_generate", bool)():
        raise TraceError(
            "the model cannot generate text",
            location=f"generation: {name}",
            hint='Load it with task = "text-generation".',
        )
    decode = _decode_inputs(model, prompts[0])
    parts = caches.check_cache(decode.get("past_key_values"), name)
    unsupported = [
        key
        for key, value in decode.items()
        if isinstance(value, torch.Tensor) and key not in _COMPUTED | _TOKENS | {"encoder_outputs"}
    ]
    if unsupported:
        raise TraceError(
            f"the decoder needs inputs that are not supported: {', '.join(unsupported)}",
            location=f"generation: {name}",
            hint="Use prompts with tokens only, or remove [generation].",
        )
    try:
        with torch.no_grad():
            if len(parts) == 2:
                return _with_encoder(model, parts[0], prompts)
            return [_decoder_alone(model, parts[0], prompts, takes_positions="position_ids" in decode)]
    except TraceError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise TraceError(
            f"the model fails on one of the prompts: {describe_error(error)}",
            location=f"generation: {name}",
            hint="Give prompts that model.generate(**prompt) takes.",
        ) from error


def find_recompute_length(model: nn.Module) -> int | None:
    """Returns the number of tokens after which ``generate`` recomputes the cache, or None.

    Phi-3 does so: beyond this length, it rotates the positions of all tokens by other factors.
    """
    generative: Any = model
    length = getattr(generative.config.get_text_config(decoder=True), "original_max_position_embeddings", None)
    if length is None or generative.config.is_encoder_decoder:
        return None
    ids = torch.zeros(1, length + 1, dtype=torch.int64)
    cache = DynamicCache(config=generative.config)
    step = generative.prepare_inputs_for_generation(ids, past_key_values=cache, attention_mask=torch.ones_like(ids))
    return None if step.get("past_key_values") is cache else int(length)


def _decode_inputs(model: nn.Module, prompt: Prompt) -> dict[str, Any]:
    """Returns the arguments of the decoder in ``generate``, at a step after the first."""
    name = type(model).__name__
    try:
        parts = dynamo_exporter.decompose(model, prompt)
    except Exception as error:  # the model's own code may raise anything
        raise TraceError(
            f"generate() fails on the first prompt: {first_line(error.__cause__ or error)}",
            location=f"generation: {name}",
            hint="Give prompts that model.generate(**prompt) takes.",
        ) from error
    if set(parts) != {"prefill", "decode"}:
        raise TraceError(
            f"the model has unsupported parts: {', '.join(sorted(set(parts) - {'decode'}))}",
            location=f"generation: {name}",
            hint="Only models of text or of audio features can be exported with a cache.",
        )
    return parts["decode"]


def _decoder_alone(
    model: nn.Module, cache: DynamicCache, prompts: Sequence[Prompt], *, takes_positions: bool
) -> Component:
    module = Decoder(model, len(cache.layers), takes_positions=takes_positions).eval()
    batches = []
    for prompt in [_traceable(prompts[0]), *prompts]:
        batches.append(_steps(module, {**prompt, **caches.empty_past(cache, prompt["input_ids"].shape[0])}))
    dynamic = _dynamic(batches[0][1], {"attention_mask": {0: Dim("batch", 1), 1: "past_sequence + sequence"}})
    return Component("decoder", module, _select_batches(batches), dynamic)


def _with_encoder(model: nn.Module, cache: DynamicCache, prompts: Sequence[Prompt]) -> list[Component]:
    config: Any = model.generation_config
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    if not isinstance(start, int):
        raise TraceError(
            f"the start of the decoder must be one token (found {start})",
            location=f"generation: {type(model).__name__}",
            hint="Set decoder_start_token_id in its generation config.",
        )
    encoder, decoder = Encoder(model, start).eval(), CrossDecoder(model, len(cache.layers)).eval()
    encoded, batches = [], []
    for prompt in [_traceable(prompts[0]), *prompts]:
        inputs = dict(prompt)
        encoded.append(inputs)
        rows = next(iter(inputs.values())).shape[0]
        ids = torch.full((rows, 1), start, dtype=torch.int64)
        mask = {"encoder_attention_mask": prompt["attention_mask"]} if "attention_mask" in prompt else {}
        batches.append(
            _steps(
                decoder,
                {"input_ids": ids, **mask, **caches.empty_past(cache, rows), **next_past(encoder(**inputs))},
            )
        )
    length = Dim("encoder_sequence", 1)
    sequences = {"input_ids", "attention_mask"} & set(encoded[0])
    axes = {name: {0: Dim("batch", 1)} | ({1: length} if name in sequences else {}) for name in encoded[0]}
    dynamic = _dynamic(batches[0][1], {"encoder_attention_mask": {0: Dim("batch", 1), 1: length}})
    if "input_ids" in sequences:
        dynamic = {name: {**of, **({2: length} if "_encoder_" in name else {})} for name, of in dynamic.items()}
    return [
        Component("encoder", encoder, tuple(encoded), axes),
        Component("decoder", decoder, _select_batches(batches), dynamic),
    ]


def _traceable(prompt: Prompt) -> Prompt:
    """Returns a prompt with at least two rows, and two tokens."""
    return {
        name: resize_tensor(
            tensor,
            {0: max(tensor.shape[0], _MIN_SIZE)}
            | ({1: max(tensor.shape[1], _MIN_SIZE)} if name in ("input_ids", "attention_mask") else {}),
        )
        for name, tensor in prompt.items()
    }


def _steps(module: nn.Module, inputs: Tensors) -> list[Tensors]:
    """Returns the decoder's inputs at its first steps, each with the most likely next token.

    The second item joins two steps, with a past of at least two tokens if the prompt has them.
    """
    taken = [inputs]
    for _ in range(STEPS - 1):
        outputs = module(**inputs)
        token = outputs["logits"][:, -1:].argmax(-1)
        inputs = {**inputs, "input_ids": token, **next_past(outputs)}
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(token)], 1)
        taken.append(inputs)
    *_, before, last = taken
    both = {**before, "input_ids": torch.cat([before["input_ids"], last["input_ids"]], 1)}
    if "attention_mask" in last:
        both["attention_mask"] = last["attention_mask"]
    return [taken[0], both, *taken[1:]]


def _select_batches(batches: Sequence[Sequence[Tensors]]) -> tuple[Tensors, ...]:
    """Returns the batch to trace with, then the prefill and the first step of each prompt."""
    enlarged, *prompts = batches
    return (enlarged[1], *itertools.chain.from_iterable((steps[0], steps[2]) for steps in prompts))


def _dynamic(batch: Tensors, masks: Mapping[str, Mapping[int, str | Dim]]) -> dict[str, dict[int, str | Dim]]:
    named: dict[str, dict[int, str | Dim]] = {}
    for name in batch:
        named[name] = {0: Dim("batch", 1)}
        if name == "input_ids":
            named[name][1] = Dim("sequence", 1)
        elif name in masks:
            named[name] = dict(masks[name])
        elif "_encoder_" not in name:
            named[name][2] = Dim("past_sequence", 0)
    return named
