"""The table of what the zoo came to, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.zoo.stages import DONE

FORMATS = ("onnx", "torchscript", "pt2")
Record = Mapping[str, Any]


def passed(record: Record) -> bool:
    """Whether every stage was done and proven."""
    return all(record["stages"].get(stage) == DONE for stage in ("built", "eager", "traced", "graph", *FORMATS))
