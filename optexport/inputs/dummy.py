"""Creates inputs for a transformers model from its config."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optexport.errors import OptexportError, TraceError, first_line
from optexport.inputs.dummy_media import BATCH, MEDIA, Maker, find
from optexport.signature.token_limit import find_token_limit
from optexport.tracing.dynamo_exporter import find_computed_inputs, one_pass, quiet

Batch = dict[str, torch.Tensor]

_SEQUENCE = 9
_DECODER_SEQUENCE = 5
# Maximum number of candidates to run a model on.
_MAX_CANDIDATES = 100


def _sequence_length(config: Any, longest: int = _SEQUENCE) -> int:
    return min(longest, find_token_limit(config) or longest)


def _vocabulary(config: Any) -> int:
    size = getattr(config.get_text_config(), "vocab_size", None) or find(config, "vocab_size")
    return size if isinstance(size, int) and size > 0 else 100


def _token_ids(config: Any) -> torch.Tensor:
    # Distinct and deterministic, and above the special tokens at the start of the vocabulary.
    size, length = _vocabulary(config), _sequence_length(config)
    return (torch.arange(BATCH * length) * 7 % max(size - 5, 1) + min(4, size - 1)).reshape(BATCH, length)


def _codes(config: Any) -> torch.Tensor:
    """Returns token ids for several codebooks: ``[batch, sequence, codebooks]``."""
    count = find(config, "num_codebooks", "n_codebooks", "num_quantizers", "n_codes_total")
    return _token_ids(config).unsqueeze(-1).expand(-1, -1, int(count)).clone()


def _codes_first(config: Any) -> torch.Tensor:
    return _codes(config).transpose(1, 2).contiguous()


_MAKERS: dict[str, tuple[Maker, ...]] = {
    **MEDIA,
    "input_ids": (_token_ids, _codes, _codes_first),
    "decoder_input_ids": (
        lambda config: _token_ids(config)[:, :_DECODER_SEQUENCE].clone(),
        lambda config: _codes(config)[:, :_DECODER_SEQUENCE].clone(),
        lambda config: _codes_first(config)[..., :_DECODER_SEQUENCE].clone(),
    ),
    "attention_mask": (lambda config: torch.ones(BATCH, _sequence_length(config), dtype=torch.int64),),
    "decoder_attention_mask": (
        lambda config: torch.ones(BATCH, _sequence_length(config, _DECODER_SEQUENCE), dtype=torch.int64),
    ),
    "token_type_ids": (lambda config: torch.zeros(BATCH, _sequence_length(config), dtype=torch.int64),),
    "position_ids": (lambda config: torch.arange(_sequence_length(config)).expand(BATCH, -1).clone(),),
    "bbox": (lambda config: torch.arange(4).expand(BATCH, _sequence_length(config), 4).clone(),),
    "qformer_input_ids": (_token_ids,),
    "task_inputs": (_token_ids,),
    "inputs": (MEDIA["input_values"][0], _token_ids, *MEDIA["pixel_values"][:1]),
}


def dummy_inputs(model: nn.Module, names: Sequence[str] | None = None) -> Batch:
    """Creates inputs from the model's config.

    A config may not define the layout of an input. Then the model runs on each candidate in turn, and the first one
    that works is returned.

    Args:
        model: A transformers model, in eval mode.
        names: Inputs to create; by default the model's main input and the inputs that it requires.

    Returns:
        Tensors by input name, for a batch of two.

    Raises:
        TraceError: An input cannot be created from a config alone, or the model fails on every candidate.
    """
    accepted = inspect.signature(model.forward).parameters
    chosen = [list(names)] if names is not None else _default_names(model, model.config, accepted)
    for name in chosen[0]:
        if name not in accepted:
            raise TraceError(f"{type(model).__name__} has no input of this name", location=f"input {name}")
        if name not in _MAKERS:
            raise TraceError(
                "the model's config does not determine this input",
                location=f"input {name}",
                hint="Pass example_inputs.",
            )
    candidates = list(itertools.islice(_candidates(model, chosen), _MAX_CANDIDATES))
    if len(candidates) == 1:
        return {**candidates[0], **_find_computed_inputs(model, candidates[0])}
    failures = []
    for batch in candidates:
        failure = _find_failure(model, batch)
        if failure is None:
            return {**batch, **_find_computed_inputs(model, batch)}
        failures.append((batch, failure))
    if not failures:
        raise TraceError(
            "the model's config does not determine the inputs", location="inputs", hint="Pass example_inputs."
        )
    batch, failure = failures[0]
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
    raise TraceError(
        f"the model fails on all {len(failures)} sets of inputs that were made from its config, first on {shapes}: "
        f"{type(failure).__name__}: {first_line(failure)}",
        location=type(model).__name__,
        hint="Pass example_inputs: tensors by input name, as the model's processor makes them.",
    )


def _candidates(model: nn.Module, chosen: Sequence[Sequence[str]]) -> Iterator[Batch]:
    """Yields candidate inputs for which the config has sizes, most likely first."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for names in chosen:
        shapes_tried: list[Mapping[str, torch.Size]] = []
        for makers in itertools.product(*(_MAKERS.get(name, ()) for name in names)):
            try:
                batch = {name: make(model.config) for name, make in zip(names, makers, strict=True)}
            except (AttributeError, TypeError, ValueError, RuntimeError):  # the config lacks a needed field
                continue
            shapes = {name: value.shape for name, value in batch.items()}
            if shapes not in shapes_tried:
                shapes_tried.append(shapes)
                batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
                yield _add_image_tokens(model, batch)


def _find_computed_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Returns further inputs for tracing, which some models compute from the values of others."""
    try:
        computed = find_computed_inputs(model, batch)
    except Exception:  # the model's code may raise anything; tracing reports it
        return {}
    return {name: value for name, value in computed.items() if isinstance(value, torch.Tensor)}


def _find_failure(model: nn.Module, batch: Batch) -> Exception | None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # a run may change them
    try:
        with torch.no_grad(), one_pass(model), quiet(), torch.random.fork_rng(devices=[]):
            torch.func.functional_call(model, buffers, (), {name: tensor.clone() for name, tensor in batch.items()})
    except OptexportError:
        raise
    except Exception as error:  # the model's code may raise anything
        return error
    return None


def _default_names(model: nn.Module, config: Any, accepted: Mapping[str, inspect.Parameter]) -> list[list[str]]:
    """Returns the sets of inputs to try: the main input with its companions, then more."""
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] if isinstance(main, str) else list(main)
    names = [name for name in names if name in accepted] or ["input_ids"]
    required = [
        name
        for name, parameter in accepted.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if names == ["input_ids"] and "input_ids" not in accepted and required:
        names = required[:1]
    names += [name for name in ("input_ids", "pixel_values") if name in accepted and hasattr(config, "vision_config")]
    names += required
    if "past_time_features" in names:
        names += ["future_time_features"]
    # The model draws new noise at each run if it gets none.
    if "noise_sequence" in accepted:
        names += ["noise_sequence"]
    if "noise" in accepted and hasattr(config, "mask_ratio") and isinstance(getattr(config, "patch_size", None), int):
        names += ["noise"]

    def with_masks(names: Sequence[str]) -> list[str]:
        masked = list(names)
        if "input_ids" in names and "attention_mask" in accepted:
            masked.append("attention_mask")
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
            masked.append("decoder_input_ids")
        return list(dict.fromkeys(masked))

    sets = [with_masks(names)]
    layout_names = [name for name in _PATCH_LAYOUT if name in accepted]
    if any(name.startswith("pixel_values") for name in names):
        sets += [with_masks([*names, name]) for name in layout_names]
        sets += [with_masks([*names, *layout_names])] if len(layout_names) > 1 else []
        if "input_ids" in names:  # for language models with optional images
            sets.append(with_masks([name for name in names if not name.startswith("pixel_values")]))
    sets += [[*sets[0], name] for name in _EXTRA_INPUTS if name in accepted and name not in sets[0]]
    return [list(dict.fromkeys(names)) for names in sets]


# Inputs that some models need, although neither their main input nor their signature shows it.
_EXTRA_INPUTS = ("pixel_values", "input_features", "input_values", "bbox", "encoder_hidden_states", "decoder_input_ids")
# Inputs that describe the layout of an image's patches.
_PATCH_LAYOUT = ("image_grid_thw", "image_sizes", "pixel_attention_mask", "spatial_shapes", "pixel_position_ids")


# Config fields that contain the id of the image placeholder token.
_TOKENS = ("image_token_id", "image_token_index", "image_token", "img_context_token_id", "image_patch_id")
# Number of text tokens before the image.
_TOKENS_BEFORE_IMAGE = 2


def _add_image_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds the tokens that stand for images to the texts, if the model needs any.

    Args:
        batch: Inputs by name; ``input_ids`` and its mask are ``[batch, sequence]``.

    Returns:
        Inputs with texts and masks that are longer by the number of image features per row.
    """
    token = next((t for name in _TOKENS if isinstance(t := find(model.config, name), int)), None)
    ids = batch.get("input_ids")
    if token is None or ids is None or ids.dim() != 2 or not any(name.startswith("pixel_values") for name in batch):
        return batch
    count = _count_image_features(model, batch)
    if count is None or count % len(ids):
        return batch
    tokens = torch.full((len(ids), count // len(ids)), token)
    longer = dict(batch)
    longer["input_ids"] = torch.cat([ids[:, :_TOKENS_BEFORE_IMAGE], tokens, ids[:, _TOKENS_BEFORE_IMAGE:]], 1)
    if "attention_mask" in batch:
        longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    accepted = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            longer[name] = (longer["input_ids"] == token).to(torch.int64)
            break
    return longer


def _count_image_features(model: Any, batch: dict[str, torch.Tensor]) -> int | None:
    """Returns the number of features of all images, or None if the model cannot compute them."""
    get = getattr(model, "get_image_features", None) or getattr(
        getattr(model, "model", None), "get_image_features", None
    )
    if get is None:
        return None
    accepted = inspect.signature(get).parameters
    try:
        with torch.no_grad(), quiet():
            features = get(**{name: tensor.clone() for name, tensor in batch.items() if name in accepted})
    except Exception:  # the model's code may raise anything; running the model reports it
        return None
    features = getattr(features, "pooler_output", features)
    leaves = [leaf for leaf in pytree.tree_leaves(features) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    return sum(math.prod(leaf.shape[:-1]) for leaf in leaves)
