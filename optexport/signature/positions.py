"""How many positions a model of transformers has, as its config tells."""

from __future__ import annotations

from typing import Any


def most_tokens(config: Any, *, decoder: bool = False) -> int | None:
    """The most tokens that a model takes; None where nothing limits them, as XLNet says by -1.

    Args:
        config: The model's; one that is none of transformers tells nothing.
        decoder: Whether of its decoder, if it has one.
    """
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config(decoder=decoder)
    names = ("max_target_positions", "max_position_embeddings") if decoder else ("max_position_embeddings",)
    found = [limit for name in names if isinstance(limit := getattr(text, name, None), int) and limit > 0]
    return found[0] if found else None
