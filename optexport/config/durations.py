"""Durations such as ``5m`` in configs and options."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600}


def in_seconds(text: str) -> int:
    """Returns the seconds of a duration such as ``5m``.

    Raises:
        ValueError: The text is not a duration. The message shows the syntax.
    """
    if not re.fullmatch(r"[0-9]{1,6}[smh]", text) or int(text[:-1]) == 0:
        raise ValueError(f'"{text}" is no time: write "90s", "5m" or "1h"')
    return int(text[:-1]) * _UNITS[text[-1]]
