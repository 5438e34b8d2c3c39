"""Patterns that an adapter brings, which peft matches against the names of layers: none may take for ever.

``re`` tries every way that a pattern can be laid on a name: of ``(a+)+X`` there are as many as there are subsets.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # where Python itself reads a pattern
from typing import Any

from optexport.errors import SourceError, first_line
from optexport.loading.pretrained_files import find_all

CONFIG = "adapter_config.json"
_FORMS = ("{}", "({})", r"(^|.*\.){}($|\..*)")  # alone, and as peft puts it between others
_MOST = 10.0**6
_FEW = 16  # what may come more often counts as coming without an end
_MANY = 10.0  # the ways of `.*`, as far as they matter: of several, each takes what the ones before leave
_NO_PATTERNS = {"base_model_name_or_path", "parent_library", "revision"}


def check_beside(name: str, options: Mapping[str, Any]) -> None:
    """Checks the adapters that lie beside a model, and in the folders of its parts.

    Args:
        name: A folder, or a hub id.
        options: As for ``from_pretrained``.

    Raises:
        SourceError: As for `check`.
    """
    for path in find_all(name, CONFIG, options):
        check(path)


def check(path: Path) -> None:
    """Checks that every pattern of an adapter's config can be matched in a short time, and that it imports nothing.

    Args:
        path: That of ``adapter_config.json``.

    Raises:
        SourceError: One cannot, or the file is no JSON.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.get("megatron_config") is not None:
            raise SourceError(
                "megatron_config has peft import a module that the file names, which is not done", location=str(path)
            )
        for key, text in _texts(settings):
            if any(_ways_of(form.format(text)) > _MOST * _ways_of(form.format("")) for form in _FORMS):
                raise SourceError(
                    f"{key} holds a pattern that could take for ever: a repetition of repetitions, or too many",
                    location=str(path),
                    hint='Write it without, such as ".*\\.(q|v)_proj", or give the names of the layers as a list.',
                )
    except (ValueError, OSError, RecursionError) as error:
        raise SourceError(f"it is no JSON: {first_line(error)}", location=str(path)) from error


def _texts(value: Any, key: str = "it") -> Iterator[tuple[str, str]]:
    """All texts that may be patterns, each with the setting that it is of."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, key)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in _NO_PATTERNS:
                outer = name if key == "it" else key
                yield outer, name
                yield from _texts(each, outer)


def _ways_of(pattern: str) -> float:
    """In how many ways a pattern can be laid on a name, at most and roughly; 0 where it is no pattern."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _ways(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError):
        return 0.0


def _ways(sequence: Any) -> float:
    ways = 1.0
    for operator, value in sequence:
        if operator is _parser.BRANCH:
            ways *= _ways_of_branches(value[1])
        elif operator in (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT):
            least, most, inner = value
            each = _ways(inner)
            if most > _FEW:
                ways *= _MANY if each == 1 else float("inf")
            else:
                ways *= (most - least + 1) * min(each, _MOST * _MANY) ** most
        else:  # groups and what looks ahead; all else holds nothing inside
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, _parser.SubPattern):
                    ways *= _ways(part)
    return ways


def _ways_of_branches(variants: Any) -> float:
    """Those that start with different letters cannot both be tried at the same place."""
    starting: defaultdict[Any, float] = defaultdict(float)
    anywhere = 0.0
    for branch in variants:
        first = branch[0] if len(branch) else None
        if first is not None and first[0] is _parser.LITERAL:
            starting[first[1]] += _ways(branch)
        else:
            anywhere += _ways(branch)
    return anywhere + max(starting.values(), default=0)
