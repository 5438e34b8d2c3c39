"""How many layers and labels a model's config asks for: each is made before the weights tell that there are fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from optexport.errors import SourceError
from optexport.loading.pretrained_files import find_all

_FILE = "config.json"
# The deepest models have some hundreds of layers. Each label gets a name, which takes longer than its weights.
_MOST = {"layers": 4096, "labels": 2**20}
_COUNTS = {
    "layers": re.compile(r"(layers?|depths?|blocks)$"),  # num_hidden_layers, n_layer, depths, num_blocks
    "labels": re.compile(r"^_?num_labels$"),
}


def check(name: str, options: Mapping[str, Any]) -> None:
    """Checks that a model has no more layers and labels than can be made in a short time.

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
        for kind, key, count in counts:
            if count > _MOST[kind]:
                raise SourceError(
                    f"{key} is {count:,}, and no model has more than {_MOST[kind]:,} {kind}",
                    location=str(path),
                    hint=f"Give the number of {kind} that the weights are of.",
                )


def _counts(value: Any, key: str = "") -> Iterator[tuple[str, str, float]]:
    """All numbers of layers and labels, also in configs of parts of a model: of which, by which setting, how many."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _counts(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _counts(each, key)
    elif isinstance(value, int | float):
        yield from ((kind, key, value) for kind, pattern in _COUNTS.items() if pattern.search(key))
