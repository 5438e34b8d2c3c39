"""Adds image placeholder tokens to texts, as many as the model has image features."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optexport.inputs.dummy_media import find
from optexport.tracing.transformers_exporter import quiet

# Config fields that contain the id of the image placeholder token.
_TOKENS = ("image_token_id", "image_token_index", "image_token", "img_context_token_id", "image_patch_id")
# Number of text tokens before the image.
_BEFORE = 2


def with_image_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    count = _features(model, batch)
    if count is None or count % len(ids):
        return batch
    tokens = torch.full((len(ids), count // len(ids)), token)
    longer = dict(batch)
    longer["input_ids"] = torch.cat([ids[:, :_BEFORE], tokens, ids[:, _BEFORE:]], 1)
    if "attention_mask" in batch:
        longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    accepted = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            longer[name] = (longer["input_ids"] == token).to(torch.int64)
            break
    return longer


def _features(model: Any, batch: dict[str, torch.Tensor]) -> int | None:
    """Returns the number of features of all images, or None if the model cannot compute them."""
    get = getattr(model, "get_image_features", None) or getattr(
        getattr(model, "model", None), "get_image_features", None
    )
    if get is None:
        return None
    accepted = inspect.signature(get).parameters
    try:
        with torch.no_grad(), quiet():
            made = get(**{name: tensor.clone() for name, tensor in batch.items() if name in accepted})
    except Exception:  # the model's code may raise anything; running the model reports it
        return None
    made = getattr(made, "pooler_output", made)
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    return sum(math.prod(leaf.shape[:-1]) for leaf in leaves)
