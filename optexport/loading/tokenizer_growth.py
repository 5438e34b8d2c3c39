"""How much longer a tokenizer may make a text: a file of a few hundred bytes can ask for more than any memory holds.

Rules that each make ten letters of one, one after the other, make a million letters of one by the sixth.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # where Python itself reads a pattern
from typing import Any

from optexport.loading.pretrained_files import find

# The parts of a tokenizer.json that texts go through, one after the other.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MOST = 1000.0
_BYTES = 4.0  # of a character in UTF-8, each of which becomes a character
_CLASS = re.compile(r"\\[pP]\{[^}]*\}")  # of characters, which Python's patterns lack


def check(name: str | Path, options: Mapping[str, Any]) -> None:
    """Checks that a tokenizer does not make texts longer without bounds, before it is loaded: loading uses it.

    Args:
        name: A folder, or a hub id.
        options: As for ``from_pretrained``.

    Raises:
        ValueError: It does.
    """
    # A folder's settings may name another file of it as its tokenizer's.
    here = sorted(Path(name).rglob("*.json")) if Path(name).is_dir() else [find(str(name), "tokenizer.json", options)]
    for path in here:
        if path is None or not path.is_file():
            continue
        try:
            # Numbers of thousands of digits are none for Python, and for the reader of tokenizers they are.
            read = json.loads(path.read_text(encoding="utf-8"), parse_int=float)
        except (
            ValueError,
            RecursionError,
        ):  # which that reader refuses too; and other files are not its business
            continue
        times = math.prod(_times(read.get(part)) for part in _PARTS) if isinstance(read, dict) else 1.0
        if times > _MOST:
            raise ValueError(f"{path.name} makes a text up to {times:.1g} times as long; {_MOST:g} times is the most")


def _times(part: Any) -> float:
    """How many times as long a text may become, at most. The keys tell what a part is, since its type may be left out.

    Lists are of parts of which each takes what the one before gave.
    """
    if isinstance(part, list):
        return math.prod(map(_times, part))
    if not isinstance(part, dict):
        return 1.0
    if "pattern" in part and "content" in part:
        return _times_of_replacing(part["pattern"], len(str(part["content"])))
    if isinstance(part.get("precompiled_charsmap"), str):
        return _times_of_charsmap(part["precompiled_charsmap"])
    if "prepend" in part:
        return 1.0 + len(str(part["prepend"]))
    if "single" in part:
        return max(1.0, *(len(part[key]) for key in ("single", "pair") if isinstance(part.get(key), list)))
    if part.get("type") == "ByteLevel":
        return _BYTES
    return math.prod(_times(each) for each in part.values() if isinstance(each, list))


def _times_of_replacing(pattern: Any, content: int) -> float:
    """Where a pattern takes up no letters, the content comes before each letter."""
    kind, text = next(iter(pattern.items())) if isinstance(pattern, dict) and pattern else ("String", "")
    least = len(str(text)) if kind == "String" else _least_width(str(text))
    return max(1.0, content / least) if least else 1.0 + content


def _times_of_charsmap(encoded: str) -> float:
    """Of sentencepiece: the length of a table in four bytes, the table, and what is put for letters, between zeros."""
    try:
        read = base64.b64decode(encoded)
    except ValueError:  # which tokenizers refuses too
        return 1.0
    behind = 4 + int.from_bytes(read[:4], "little")
    return max(1.0, *(len(text.decode(errors="replace")) for text in read[behind:].split(b"\0")))


def _least_width(pattern: str) -> int:
    """Of what a regular expression finds; 0 where Python cannot read it."""
    try:
        return int(_parser.parse(_CLASS.sub(".", pattern)).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return 0
