"""Checks the sizes in a model's config before transformers allocates its weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from optexport.errors import SourceError
from optexport.loading.pretrained_files import find_all

_FILE = "config.json"
# The deepest models have some hundreds of layers. transformers creates a name for each label, which takes longer than
# its weights.
_LIMITS = {"layers": 4096, "labels": 2**20}
_COUNT_KEYS = {
    "layers": re.compile(r"(layers?|depths?|blocks)$"),  # num_hidden_layers, n_layer, depths, num_blocks
    "labels": re.compile(r"^_?num_labels$"),
}
_WEIGHTS_PER_BYTE = 8  # no quantization uses less than one bit per weight
_ALLOWED_MISSING_WEIGHTS = 2**28  # 1 GiB in float32; the loader reports missing weights by name


def check_counts(name: str, options: Mapping[str, Any]) -> None:
    """Checks that a model's configs have no implausible number of layers or labels.

    Args:
        name: A folder, or a hub id.
        options: As for ``from_pretrained``.

    Raises:
        SourceError: A number is implausible.
    """
    # Each part of a sentence-transformers model has a config in its own folder.
    for path in find_all(name, _FILE, options):
        try:
            counts = list(_counts(json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, OSError, RecursionError):  # transformers reports a damaged config
            continue
        for kind, key, count in counts:
            if count > _LIMITS[kind]:
                raise SourceError(
                    f"expected at most {_LIMITS[kind]:,} {kind}, found {key} = {count:,}",
                    location=str(path),
                    hint=f"Set {key} to the number of {kind} in the weights.",
                )


def check_weights(cls: Any, config: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Checks that a folder's files can hold the weights that its config asks for.

    Args:
        cls: The model's class, or an ``AutoModel`` class of transformers.
        config: A config of transformers.
        folder: The folder with the weights.
        trust_remote_code: True if code in the folder may run.

    Raises:
        SourceError: The files are far too small, so that random weights would fill the memory.
    """
    options = {"trust_remote_code": True} if trust_remote_code else {}
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config), **options)
            expected = sum(parameter.numel() for parameter in model.parameters())
    except Exception:  # loading the model reports the error
        return
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if expected > _ALLOWED_MISSING_WEIGHTS + _WEIGHTS_PER_BYTE * size:
        raise SourceError(
            f"the config.json needs {expected:,} weights, but the files of the folder have only {size:,} bytes",
            location=str(folder),
            hint="Correct the sizes in config.json, or add the missing weights files.",
        )


def _counts(value: Any, key: str = "") -> Iterator[tuple[str, str, float]]:
    """Yields the kind, key and value of every count in a config and its parts."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _counts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _counts(item, key)
    elif isinstance(value, int | float):
        yield from ((kind, key, value) for kind, pattern in _COUNT_KEYS.items() if pattern.search(key))
