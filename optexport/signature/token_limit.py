"""Reads the number of positions from the config of a transformers model."""

from __future__ import annotations

from typing import Any


def find_token_limit(config: Any, *, decoder: bool = False) -> int | None:
    """Returns the maximum number of tokens that a model takes.

    Args:
        config: Config of the model; any other object has no limit.
        decoder: True for the limit of the decoder, if the model has one.

    Returns:
        The limit, or None if there is none. XLNet writes -1 for no limit.
    """
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config(decoder=decoder)
    names = ("max_target_positions", "max_position_embeddings") if decoder else ("max_position_embeddings",)
    limits = [limit for name in names if isinstance(limit := getattr(text, name, None), int) and limit > 0]
    return limits[0] if limits else None
