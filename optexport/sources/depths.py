"""How many layers a model's config asks for: each is made before the weights tell that there are fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optexport.errors import SourceError

_MOST = 4096  # the deepest models have some hundreds
_COUNTS = re.compile(r"(layers?|depths?|blocks)$")  # num_hidden_layers, n_layer, depths, num_blocks


def check(path: Path) -> None:
    """Checks that a model has no more layers than can be made in a short time.

    Args:
        path: That of ``config.json``.

    Raises:
        SourceError: It has.
    """
    try:
        counts = list(_counts(json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, OSError, RecursionError):  # which transformers tells
        return
    for key, count in counts:
        if count > _MOST:
            raise SourceError(
                f"{key} is {count:,}, and no model has more than {_MOST} layers",
                place=str(path),
                mend="Give the number of layers that the weights are of.",
            )


def _counts(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of layers, also in configs of the parts of a model; with the setting that each is of."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _counts(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _counts(each, key)
    elif isinstance(value, int | float) and _COUNTS.search(key):
        yield key, value
