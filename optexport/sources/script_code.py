"""Whether a TorchScript program does nothing but compute, by its text before it is loaded, and by its operators."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

import torch

# The namespaces of torch's operators that do more than compute, and those of "aten" that read and write files.
_NAMESPACES = r"(?:_?c10d\w*|symm_mem|debugprims|inductor\w*|profiler|static_runtime)"
_FILES = r"(?:from_file|save|load_tensor)"
REACHING_OUT = re.compile(rf"\b{_NAMESPACES}\.\w|\b{_FILES}\b")
# Runs as a file is loaded.
_AT_LOADING = re.compile(r"__setstate__")
_OPERATORS = re.compile(rf"{_NAMESPACES}::\w+|\w+::{_FILES}|prim::Print")
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def forbidden_text(code: str) -> str | None:
    """What in the text of a program does more than compute, or hides what it does; None where nothing is seen."""
    if found := REACHING_OUT.search(code) or _AT_LOADING.search(code):
        return found.group()
    if "getattr" not in code:
        return None
    try:
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in _SKIPPED]
    except (tokenize.TokenError, SyntaxError):
        return "getattr in a text that cannot be read"
    for index, token in enumerate(tokens):
        if token.string == "getattr" and not _names_plainly(tokens, index):
            return "getattr of a name that is not written plainly"
    return None


def forbidden_operator(module: torch.jit.ScriptModule) -> str | None:
    """The operator of a loaded program that does more than compute; None where there is none."""
    for part in module.modules():
        held: Any = getattr(part, "_c", None)
        for name in [] if held is None else held._method_names():
            for kind in _kinds(held._get_method(name).inlined_graph):
                if _OPERATORS.fullmatch(kind):
                    return kind
    return None


def _names_plainly(tokens: list[tokenize.TokenInfo], index: int) -> bool:
    """Whether a call of getattr ends with one text as it stands: escapes, and texts in a row, could spell any name."""
    depth = 0
    for place in range(index + 1, len(tokens)):
        depth += (tokens[place].string in ("(", "[")) - (tokens[place].string in (")", "]"))
        if depth == 0:
            comma, name = tokens[place - 2 : place]
            return comma.string == "," and name.string[0] in "\"'" and "\\" not in name.string
    return False


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)
