"""Padding of masks, so that every kind of padding is checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from optexport.signature.signature import Batch

# Padding kinds, which alternate over the rows of a batch.
PADDINGS = ("right", "left", "whole")
UNTRACED_PADDING = ("none", "right", "left", "none", "whole")
# Padding that every model with padded rows accepts.
LESS_PADDING = ("right", "none")
_LEAST_PADDED = 3

IsMask = Callable[[str, torch.Tensor], bool]


def is_padding_mask(name: str, tensor: torch.Tensor) -> bool:
    """Returns True if an input is an attention mask, with 1 for every token that is not padding.

    Args:
        name: Name of the input.
        tensor: Its values, of any dtype; only shape [batch, sequence] qualifies.
    """
    named = name == "mask" or name.endswith("attention_mask")
    return named and tensor.dim() == 2 and is_mask(name, tensor)


def is_mask(name: str, tensor: torch.Tensor) -> bool:
    """Returns True if an input is a mask, by its name and by its values of 0 and 1.

    Args:
        name: Name of the input.
        tensor: Its values, of any dtype, with at least two axes.
    """
    return "mask" in name and tensor.dim() >= 2 and bool(((tensor == 0) | (tensor == 1)).all())


def with_padding(batch: Batch, kinds: Sequence[str], is_padded: IsMask = is_padding_mask) -> Batch:
    """Pads the rows of every mask in a batch, alternating the kinds of padding.

    Existing padding stays. Rows of fewer than three tokens are unchanged. Each mask starts with another kind, so that
    no mask can replace another unnoticed.

    Args:
        kinds: Kinds of padding per row: "right", "left", "whole" or "none".
        is_padded: Predicate that selects the masks. Masks with more than two axes never get "whole", because image
            masks and attention masks leave something visible in every row.

    Returns:
        A new batch. Inputs that are not masks are shared with the old one.
    """
    masks = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in batch.items()
        if is_padded(name, tensor)
    }
    for index, mask in enumerate(masks.values()):
        allowed_kinds = [kind for kind in kinds if kind != "whole" or mask.dim() == 2]
        row_kinds = itertools.islice(itertools.cycle(allowed_kinds), index, None)
        for row, kind in zip(mask.flatten(0, -2), row_kinds, strict=False):
            tokens = row.nonzero().flatten()
            if (length := len(tokens)) >= _LEAST_PADDED:
                row[
                    {"right": tokens[(length + 1) // 2 :], "left": tokens[: length // 3], "whole": tokens}.get(kind, [])
                ] = 0
    return {**batch, **masks}
