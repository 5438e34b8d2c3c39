"""Tiny models of several families, with random values in all weights, biases and running statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    GroupViTConfig,
    GroupViTModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from optexport.api import symbolic_trace

_TEXT: dict[str, Any] = {"vocab_size": 60, "max_position_embeddings": 40}
_LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_BART: dict[str, Any] = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
}

_FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "albert": lambda: AlbertModel(AlbertConfig(**{**_TEXT, **_LAYERS, "embedding_size": 8, "num_hidden_layers": 3})),
    "bart": lambda: BartModel(BartConfig(**_TEXT, **_BART, d_model=16, encoder_layers=1, decoder_layers=2)),
    "bert": lambda: BertModel(BertConfig(**_TEXT, **_LAYERS)),
    "groupvit": lambda: GroupViTModel(
        GroupViTConfig(
            text_config={**_TEXT, **_LAYERS, "num_hidden_layers": 1, "eos_token_id": 59},
            vision_config={
                **_LAYERS,
                "num_hidden_layers": 2,
                "depths": [1, 1],
                "num_group_tokens": [4, 0],
                "num_output_groups": [4, 0],
                "image_size": 16,
                "patch_size": 8,
            },
            projection_dim=8,
            projection_intermediate_dim=12,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**{**_TEXT, **_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2})
    ),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, image_size=32)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "vit": lambda: ViTForImageClassification(ViTConfig(**_LAYERS, image_size=16, patch_size=8)),
}

NAMES = sorted(_FACTORIES)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every parameter and running statistic of a module random values, and puts it in eval mode.

    The weights keep the scale of a signal, so that an error in any layer is visible in the outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(parameter + 0.5 * noise)  # biases stay around 0, gains around 1
            else:
                parameter.copy_(noise / max(1, parameter.shape[1:].numel()) ** 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return module.eval()


@functools.cache
def model(name: str) -> nn.Module:
    """Returns a tiny model in eval mode. Tests share it and must not change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(_FACTORIES[name]())


@functools.cache
def traced(name: str) -> fx.GraphModule:
    """Returns the graph of a tiny model. Tests share it and must not change it."""
    return symbolic_trace(model(name))


def inputs(name: str, batch: int = 3, sequence: int = 7) -> dict[str, torch.Tensor]:
    """Returns a batch for a tiny model, with padding and random pixels, of other sizes than the traced ones."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 60, (batch, sequence), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, sequence // 2 :] = 0
    image = {"resnet": 64}.get(name, 16)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(4, 60, (batch, sequence - 1), generator=generator),
        "pixel_values": torch.randn(batch, 3, image, image, generator=generator),
    }
    names = [node.target for node in traced(name).graph.find_nodes(op="placeholder")]
    return {target: batch[target] for target in names}
