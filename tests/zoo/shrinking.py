"""Tiny random models of all transformers types, made from their config classes."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from tests._helpers.models import randomise

# Largest number of parameters in the zoo. A setting with more is skipped for the next one.
MOST_PARAMETERS = 30_000_000

# Auto classes to load a model type with; the base first.
_MAPPINGS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    *sorted(name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", name)),
)


class NotBuiltError(Exception):
    """No setting gives a model of this type."""


@dataclass(frozen=True)
class Setting:
    """One way of shrinking a config.

    Attributes:
        layers: How many layers of each stack remain; None for all.
        divisor: Divides all widths. None sets widths with known names to fixed values.
        fill: True to set sizes that the config leaves open, because some defaults do not work.
    """

    layers: int | None
    divisor: int | None
    fill: bool = False

    def __str__(self) -> str:
        layers = "all" if self.layers is None else str(self.layers)
        filled = ", filled" if self.fill else ""
        return f"{layers} layers, widths {'by name' if self.divisor is None else f'/{self.divisor}'}{filled}"


SETTINGS = (
    Setting(2, None),
    Setting(4, None),
    Setting(2, None, fill=True),
    Setting(2, 8),
    Setting(4, 8),
    Setting(2, 4),
    Setting(None, 8),
    Setting(None, None),
    Setting(4, 2),
    Setting(2, 1),
    Setting(None, 1),
)


def model_types() -> list[str]:
    """Returns all model types with a transformers class, in alphabetical order."""
    return sorted({name for mapping in _MAPPINGS for name in getattr(modeling_auto, mapping)})


def model_class(model_type: str) -> type[nn.Module]:
    """Returns the class for a type: its base, or the first of its heads.

    Raises:
        NotBuiltError: transformers has no such class, or a package for it is missing.
    """
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type)
        if names is not None:
            name = names if isinstance(names, str) else names[0]
            try:
                cls: type[nn.Module] = getattr(transformers, name)
            except Exception as error:  # a module of transformers that needs a missing package
                raise NotBuiltError(f"{name} cannot be imported: {error}") from error
            return cls
    raise NotBuiltError("no class is mapped to it")


def candidates(model_type: str) -> Iterator[tuple[Setting, Callable[[], nn.Module]]]:
    """Returns the settings, each with a function that builds its model: random, reproducible, in eval mode.

    Raises:
        NotBuiltError: Raised by such a function if its setting gives no model, or one too large.
    """
    cls = model_class(model_type)
    for setting in SETTINGS:
        yield setting, lambda setting=setting: _build(model_type, cls, setting)  # type: ignore[misc]


def _build(model_type: str, cls: Any, setting: Setting) -> nn.Module:
    try:
        config = shrunk_config(model_type, setting)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in cls(_copy(config)).parameters())
    except Exception as error:  # an inconsistent config may fail anywhere
        raise NotBuiltError(
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        ) from error
    if count > MOST_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters are left")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, model_type)))
        try:
            model: nn.Module = cls(config)
        except Exception as error:
            raise NotBuiltError(f"{type(error).__name__}: {error}") from error
        return randomise(model.float(), seed=sum(map(ord, model_type)))


def _copy(config: Any) -> Any:
    return type(config).from_dict(config.to_dict())


def shrunk_config(model_type: str, setting: Setting) -> Any:
    """Returns a small config of a type."""
    if model_type in _PAIRS:
        parts = [shrunk_config(part, setting) for part in _PAIRS[model_type]]
        cls = transformers.CONFIG_MAPPING[model_type]
        return cls.from_encoder_decoder_configs(*parts)  # type: ignore[attr-defined]
    cls = transformers.CONFIG_MAPPING[model_type]
    default = cls()
    shrunk = _shrink(default.to_dict(), setting, {})
    config = cls.from_dict(shrunk) if hasattr(cls, "from_dict") else cls(**shrunk)
    model = model_class(model_type)
    if hasattr(model, "get_rope_index") or "mrope_section" in inspect.getsource(sys.modules[model.__module__]):
        for part in _parts(config):  # the default of the class is for heads of 128
            rope = getattr(part, "rope_parameters", None)
            if isinstance(rope, dict) and "mrope_section" not in rope and hasattr(part, "num_attention_heads"):
                rope["mrope_section"] = _sections({"mrope_section": [1, 1, 1], **rope}, part.to_dict())
    return config


_PAIRS = {
    "encoder-decoder": ("bert", "bert"),
    "speech-encoder-decoder": ("wav2vec2", "bert"),
    "vision-encoder-decoder": ("vit", "bert"),
    "vision-text-dual-encoder": ("vit", "bert"),
}


def _parts(config: Any) -> list[Any]:
    inner = [value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)]
    return [config, *(part for value in inner for part in _parts(value))]


# Sizes by name, for settings without a divisor. The first pattern that matches the whole name counts.
_NAMED: tuple[tuple[str, int], ...] = (
    (r"qk_head_dim", 32),
    (r"(.*_)?(num_)?(key_value|kv)_heads", 2),
    (r"(.*_)?num_(key|value)_heads", 2),
    (r"(.*_)?(num_attention_heads|num_heads|attention_heads|n_heads?|num_query_heads|index_n_heads)", 4),
    (r"(.*_)?(head_dim|d_kv|dim_head|d_head|linear_head_dim|attention_head_size)", 16),
    (r"(kv|q|o)_lora_rank", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|feedforward_dim|inner_dim)", 96),
    (
        r"(.*_)?(hidden_size|d_model|embed_dim|n_embd|hidden_dim|embedding_size|model_dim|dim|projection_dim|projection_size)",
        64,
    ),
    (r"(.*_)?(word_embed_proj_dim|embedding_dim|out_dim|output_dim|embed_size|out_hidden_size)", 64),
    (r"(.*_)?(conv_channels|output_channels|encoder_channels|num_filters|base_channels|upsample_initial_channel)", 32),
    (r"(.*_)?(num_)?(local_|routed_)?experts", 4),
    (r"moe_num_experts", 4),
    (r"(.*_)?(num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|moe_top_k)", 2),
    (r"(.*_)?(n_groups?|ngroups|topk_group|num_expert_group)", 1),
)
_WIDTHS = re.compile(
    r"(.*_)?(hidden_sizes?|d_model|embed_dims?|n_embd|hidden_dims?|embedding_size|dims?|intermediate_size|ffn_dim"
    r"|d_ff|channels|filters|rank|expert_size|inner|width|units|proj_dim|output_size|conv_dim|out_features_dim"
    r"|embedding_dim|initial_channel|channel_list|dim_per_stage|size_per_layer_input|state|proj_size)"
)
_LAYERS = re.compile(
    r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|layers|num_blocks"
    r"|num_decoder_layers|num_encoder_layers|attention_layers)"
)
_VOCABULARY = re.compile(r"(.*_)?vocab_size(_.*)?|codebook_size|num_embeddings|head_out_channels")
_TOKEN = re.compile(r"(.*_)?(token_id|token_index|token)s?")
_LAYER_INDEXES = re.compile(
    r"(.*_)?(indexes|indices|indexs|idx|layer_ids?|layers|out_features|return_idx|attn_blocks|blocks|feature_layers?)"
)
_VOCABULARY_SIZE = 128
_POSITIONS = 128
# Values for sizes that a config leaves open.
_FILLS: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "prediction_length": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "pad_token_id": 0,
}
_BOOKKEEPING = (
    "transformers_version",
    "architectures",
    "id2label",
    "label2id",
    "_name_or_path",
    "dtype",
    "label_names",
)


def _shrink(config: Mapping[str, Any], setting: Setting, parent: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the numbers of a config small, and those in its nested configs."""
    config = {str(key): value for key, value in config.items()}
    layers = _layers_left(config, setting)
    small: dict[str, Any] = {}
    if config.get("model_type") == "timm_backbone":
        return _resnet(len(config.get("out_indices") or [1]))
    for key, value in config.items():
        if key not in _BOOKKEEPING and not isinstance(value, dict):
            small[key] = _shrunk_value(key, value, config, setting, layers)
            if value is None and setting.fill and key in _FILLS:
                small[key] = _FILLS[key]
    _fit(small, config, setting)
    for key, value in config.items():
        if isinstance(value, dict) and key not in _BOOKKEEPING:
            small[key] = _shrink(value, setting, {**parent, **small})
            if key == "per_layer_config":  # of the remaining layers
                small[key] = {k: v for k, v in small[key].items() if int(k) < min(layers.values(), default=1 << 30)}
            if value.get("model_type") == "timm_backbone":
                small["use_timm_backbone"] = False
    if "mrope_section" in small:
        small["mrope_section"] = _sections(small, parent)
    _draw_tokens(small, parent)
    return small


def _resnet(count: int) -> dict[str, Any]:
    """Returns a backbone that needs no further package, with a given number of outputs."""
    widths = [16, 24, 32, 48]
    stages = [f"stage{i}" for i in range(1, 5)][-count:]
    depths = [1] * len(widths)
    return {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": widths,
        "depths": depths,
        "out_features": stages,
    }


def _layers_left(config: Mapping[str, Any], setting: Setting) -> dict[int, int]:
    """Returns how many layers of a stack remain, so that each kind has at least one."""
    if setting.layers is None:
        return {}
    counts = {v for k, v in config.items() if _LAYERS.fullmatch(k) and isinstance(v, int) and not isinstance(v, bool)}
    left = {}
    for count in counts:
        kinds = [
            len(dict.fromkeys(map(str, v))) for v in config.values() if isinstance(v, list) and 0 < len(v) == count
        ]
        left[count] = min(count, max(setting.layers, min(max(kinds, default=1), 4)))
    return left


def _shrunk_value(key: str, value: Any, config: Mapping[str, Any], setting: Setting, layers: Mapping[int, int]) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, list | tuple):
        return _shrunk_list(key, list(value), config, setting, layers)
    if not isinstance(value, int):
        return value
    if _LAYERS.fullmatch(key):
        return layers.get(value, value)
    if _VOCABULARY.fullmatch(key):
        return min(value, _VOCABULARY_SIZE)
    if re.fullmatch(
        r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions)", key
    ):
        return min(value, _POSITIONS)
    if key == "context_length":  # length of a series, which some models process patch by patch
        return min(value, 512)
    if re.fullmatch(r"(.*_)?(image_size|input_size|img_size)", key) and value >= 32:
        return _image_size(config)
    if key == "patch_size" and value > 8 and setting.divisor is None:
        return 8
    if re.fullmatch(r"(.*_)?(image_seq_length|num_image_tokens|mm_tokens_per_image)", key):
        return min(value, 16)
    if key in ("sliding_window", "attention_chunk_size", "local_attention", "sliding_window_size") and value > 8:
        return 8
    if re.fullmatch(r"(.*_)?(num_queries|two_stage_num_proposals|num_query_tokens|num_object_queries)", key):
        return min(value, 12)
    if key in ("full_attention_interval", "sliding_window_pattern", "first_k_dense_replace", "no_rope_layer_interval"):
        return min(value, 2) if key != "first_k_dense_replace" else min(value, 1)
    if _LAYER_INDEXES.fullmatch(key) and value > 0 and layers:
        return min(value, min(layers.values()) - 1)
    if setting.divisor is None and isinstance(config.get("num_heads"), list) and _WIDTHS.fullmatch(key):
        return _divided(value, 4)  # heads of each stage: the width must be a multiple
    if setting.divisor is None:
        for pattern, size in _NAMED:
            if re.fullmatch(pattern, key):
                return min(value, size) if value > 1 else value
        return value
    return _divided(value, setting.divisor) if _WIDTHS.fullmatch(key) else value


def _image_size(config: Mapping[str, Any]) -> int:
    patch = config.get("patch_size")
    if "depths" in config and "window_size" in config:  # every stage needs at least one window
        return 224
    return 32 if isinstance(patch, int) and patch >= 8 else 64


def _divided(value: int, divisor: int) -> int:
    return value if value < 32 else max(value // divisor, 8)


def _shrunk_list(
    key: str, value: list[Any], config: Mapping[str, Any], setting: Setting, layers: Mapping[int, int]
) -> list[Any]:
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if re.fullmatch(r"(.*_)?(image_size|img_size)", key) and numbers and value and min(value) >= 32:
        return [_image_size(config)] * len(value)
    if key == "depths" and setting.layers is not None:
        return [min(v, 1 if setting.layers == 2 else 2) for v in value]
    if len(value) in layers and len(value) > 4:
        shortened = _representatives(value, layers[len(value)])
        return [_shrunk_value(key, v, config, setting, {}) for v in shortened] if numbers else shortened
    if numbers and value and layers and _LAYER_INDEXES.fullmatch(key) and max(value) >= 0:
        old, new = max(layers), layers[max(layers)]
        return list(dict.fromkeys(min(round(v * new / old), new - 1) if v >= 0 else v for v in value))
    if numbers and setting.divisor not in (None, 1) and _WIDTHS.fullmatch(key):
        return [_divided(v, setting.divisor) for v in value]  # type: ignore[arg-type]
    if numbers and setting.divisor is None and _WIDTHS.fullmatch(key) and value and max(value) > 64:
        return [_divided(v, 8) for v in value]
    return value


def _representatives(value: list[Any], count: int) -> list[Any]:
    """Returns a number of entries of a list, in their order, with each kind represented first."""
    firsts = sorted({str(v): i for i, v in reversed(list(enumerate(value)))}.values())[:count]
    alternatives = [i for i in range(len(value)) if i not in firsts]
    return [value[i] for i in sorted(firsts + alternatives[: count - len(firsts)])]


def _fit(small: dict[str, Any], config: Mapping[str, Any], setting: Setting) -> None:
    """Makes sizes consistent that were shrunk separately."""
    heads, kv = small.get("num_attention_heads"), small.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv, int):
        if config["num_key_value_heads"] == config["num_attention_heads"]:
            small["num_key_value_heads"] = heads
        elif heads % kv:
            small["num_key_value_heads"] = 1
    if {"mamba_n_heads", "mamba_d_head", "mamba_expand", "hidden_size"} <= small.keys():
        small["mamba_n_heads"] = small["mamba_expand"] * small["hidden_size"] // small["mamba_d_head"]
    # For models that draw new random numbers in each run.
    for key in ("noise_scale", "noise_scale_duration", "vae_std"):
        if key in small:
            small[key] = 0.0
    if "upsample_groups" in small:
        small["upsample_groups"] = small["hidden_size"]
    if "stage_names" in config:  # the config derives this value
        del small["stage_names"]
        if "depths" in config:
            small["out_features"], small["out_indices"] = config.get("out_features"), None
        else:
            small.pop("out_features", None)
    if setting.divisor is not None:
        for width, count in (("hidden_size", "num_attention_heads"), ("d_model", "num_heads"), ("n_embd", "n_head")):
            size, number = small.get(width), small.get(count)
            if isinstance(size, int) and isinstance(number, int) and "head_dim" not in small:
                while number > 1 and (size % number or size // number < 8):
                    number = math.gcd(number // 2, number) or 1
                if number != small[count] and small.get("num_key_value_heads") == small[count]:
                    small["num_key_value_heads"] = number
                small[count] = number


def _sections(small: Mapping[str, Any], parent: Mapping[str, Any]) -> list[int]:
    """Divides half of a head among the axes of a rotary embedding, in the original proportions."""
    old: list[int] = small["mrope_section"]
    heads = parent.get("num_attention_heads") or 1
    head = parent.get("head_dim") or parent.get("hidden_size", 64) // heads
    half = int(head * small.get("partial_rotary_factor", parent.get("partial_rotary_factor") or 1.0)) // 2
    new = [max(1, v * half // sum(old)) for v in old]
    new[-1] += half - sum(new)
    return new


def _draw_tokens(small: dict[str, Any], parent: Mapping[str, Any]) -> None:
    """Gives special tokens distinct ids at the end of the vocabulary. Equal ids stay equal."""
    size = small.get("vocab_size") or parent.get("vocab_size")
    if size is None:
        text = small.get("text_config") or small.get("decoder_config") or small.get("llm_config") or {}
        size = text.get("vocab_size") if isinstance(text, dict) else None
    size = min(int(size), _VOCABULARY_SIZE) if isinstance(size, int) and size > 1 else _VOCABULARY_SIZE
    moved: dict[int, int] = {}
    for key, value in small.items():
        if not _TOKEN.fullmatch(key):
            continue
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= size:
                moved.setdefault(token, size - 1 - (token % 7) - 7 * (len(moved) % 10))
    used: set[int] = set()
    for token in sorted(moved, reverse=True):  # the order stays, because some models compare the ids of two tokens
        new = size - 1 - len(used)
        used.add(new)
        moved[token] = max(new, 0)
    for key, value in small.items():
        if _TOKEN.fullmatch(key):
            small[key] = [moved.get(t, t) for t in value] if isinstance(value, list) else moved.get(value, value)
