"""How many weights a model's config asks for, beside what its files can hold: the others are made before it is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from optexport.errors import SourceError

_WEIGHTS_OF_A_BYTE = 8  # no kind of quantisation has less than a bit
_ALWAYS_ROOM_FOR = 2**28  # 1 GiB in float32: that many may be missing, which is told with their names


def check(cls: Any, config: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Checks that a folder's files can hold about as many weights as its config asks for.

    Args:
        cls: The model's class, or an ``AutoModel`` class of transformers.
        config: A config of transformers.
        folder: Where the weights lie.
        trust_remote_code: Whether code beside the weights may run.

    Raises:
        SourceError: There are far fewer, so that making the others might take all memory.
    """
    options = {"trust_remote_code": True} if trust_remote_code else {}
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        with torch.device("meta"):
            asked = sum(parameter.numel() for parameter in make(copy.deepcopy(config), **options).parameters())
    except Exception:  # of many kinds, which loading tells
        return
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if asked > _ALWAYS_ROOM_FOR + _WEIGHTS_OF_A_BYTE * held:
        raise SourceError(
            f"its config asks for {asked:,} weights, and all files beside it are {held:,} bytes",
            location=str(folder),
            hint="Give the sizes that the weights are of.",
        )
