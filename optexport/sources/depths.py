"""How many layers a model's config asks for: each is made before the weights tell that there are fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from optexport.applications.pretrained_files import find_all
from optexport.errors import SourceError

_FILE = "config.json"
_MOST = 4096  # the deepest models have some hundreds
_COUNTS = re.compile(r"(layers?|depths?|blocks)$")  # num_hidden_layers, n_layer, depths, num_blocks


def check(name: str, options: Mapping[str, Any]) -> None:
    """Checks that a model has no more layers than can be made in a short time.

    Args:
        name: A folder, or a hub id.
        options: As for ``from_pretrained``.

    Raises:
        SourceError: It has.
    """
    # Sentence-transformers have one in a folder of each part.
    for path in find_all(name, _FILE, options):
        try:
            counts = list(_counts(json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, OSError, RecursionError):  # which transformers tells
            continue
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
