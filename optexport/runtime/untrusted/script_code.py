"""Whether a TorchScript program does nothing but compute, by its text before it is loaded, and by its operators."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

# The namespaces of torch's operators that do more than compute, and those of "aten" that read and write files.
_NAMESPACES = r"(?:_?c10d\w*|symm_mem|debugprims|inductor\w*|profiler|static_runtime)"
_NAMESPACE = re.compile(_NAMESPACES)
_FILES = ("from_file", "save", "load_tensor")
# Print, change what later calls in the process do, or tell where something lies in memory. As words of a text these
# names may well be a model's own, so that only operators are held to them, before any of them has run.
_EFFECTS = (
    "_print|manual_seed|seed|initial_seed|data_ptr|_cufft_(?:set_plan_cache_max_size|clear_plan_cache)"
    "|(?:read|write|\\w+_(?:from|to))_file"
)
# Take indices on trust: by those of a file's choosing they wrote to the memory of the process.
_UNCHECKED = r"_convert_indices_from_\w+|_sobol_engine_\w+|_?(?:cudnn_)?ctc_loss\w*"
_OPERATORS = re.compile(
    rf"(?:{_NAMESPACES}|debug_mode_ops|streams|_dtensor)::\w+|\w+::(?:{'|'.join(_FILES)}|{_EFFECTS}|{_UNCHECKED})"
    r"|prim::(?:Print|id|rpc_\w+|PythonOp|IgnoredPythonOp|TimePoint|AddStatValue)"
)
# torch reads a program by calling itself for each bracket, operator and block: in a stack of 8 MB it ended the process
# between 2,000 and 10,000 of any of them. What it writes itself keeps below a hundred.
_DEEPEST = 500
# Runs as a file is loaded.
_AT_LOADING = "__setstate__"
# As torch's own lexer reads a program, to which blanks and comments may stand anywhere between two tokens.
_TOKEN = re.compile(
    r"""
    (?P<blank> (?: \s | \\\n | \#[^\n]* )+ )
    | (?P<token>
        \"{3} (?: [^"\\] | \\. | "(?!"") )* \"{3} | '{3} (?: [^'\\] | \\. | '(?!'') )* '{3}
        | " (?: [^"\\\n] | \\. )* " | ' (?: [^'\\\n] | \\. )* '
        | [A-Za-z_]\w* | .
    )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def forbidden_name(name: str, after: str) -> str | None:
    """A name in a program, where it is that of what does more than compute.

    Args:
        after: What stands behind it: a namespace is one where it is a dot.
    """
    if name in _FILES or name == _AT_LOADING or (after == "." and _NAMESPACE.fullmatch(name)):
        return name
    return None


def is_forbidden(operator: str) -> bool:
    """Whether an operator does more than compute, by its name: ``aten::save``."""
    return _OPERATORS.fullmatch(operator) is not None


def forbidden_text(code: str) -> str | None:
    """What in the text of a program does more than compute, or hides what it does; None where nothing is seen."""
    words = (found["token"] for found in _TOKEN.finditer(code) if found["token"] is not None)
    of_getattr: list[bool] = []  # of each bracket that is open
    earlier = before = word = ""
    for after in itertools.chain(words, [""]):
        if found := forbidden_name(word, after):
            return found
        # Others may bear the name, as a method or an attribute that is declared.
        if word == "print" and before not in (".", "def") and after != ":":
            return word
        if word == "getattr" and after != "(":
            return "getattr by another name"
        if word in ("(", "[", "{"):
            of_getattr.append(before == "getattr")
        elif word in (")", "]", "}") and of_getattr and of_getattr.pop():
            # Escapes, and texts in a row, could spell any name.
            if earlier != "," or before[0] not in "\"'" or "\\" in before:
                return "getattr of a name that is not written plainly"
            if found := forbidden_name(before.strip("\"'"), after):
                return found
        earlier, before, word = before, word, after
    return None


def check_depth(code: str) -> None:
    """Refuses a program in which so much lies in one another that torch would end the process as it reads it.

    Each token makes a statement deeper, up to the next comma: an operator, an attribute, a call, a bracket.

    Raises:
        ValueError: It does.
    """
    blocks, open_brackets = [0], [0]
    variants = deep = 0  # each elif lies in the one before
    for found in _TOKEN.finditer(code):
        word, blank = found["token"], found["blank"] or ""
        if "\n" in blank.replace("\\\n", "") and len(open_brackets) == 1:
            indent = len(blank.rpartition("\n")[2])
            blocks = [*(block for block in blocks if block < indent), indent]
            open_brackets, deep = [0], 0
        if word in ("elif", "def"):
            variants = variants + 1 if word == "elif" else 0
        if word == "," or (word in (")", "]", "}") and len(open_brackets) > 1):
            deep -= open_brackets[-1]
            open_brackets[-1] = 0
        if word in (")", "]", "}") and len(open_brackets) > 1:
            open_brackets.pop()
        elif word is not None and word != ",":
            open_brackets[-1] += 1
            deep += 1
        if word in ("(", "[", "{"):
            open_brackets.append(0)
        if deep + len(blocks) + variants > _DEEPEST:
            raise ValueError(f"its code nests more than {_DEEPEST} deep")


def forbidden_operator(unit: Any) -> str | None:
    """The operator, or the class, of a loaded program that does more than compute; None where there is none.

    Args:
        unit: The ``torch._C.CompilationUnit`` with all functions that it was loaded with: methods of classes and hooks
            among them, which its modules' own graphs call by a name alone, or not at all.
    """
    for function in unit.get_functions():
        for node in _nodes(function.graph):
            if is_forbidden(node.kind()):
                return str(node.kind())
            if node.kind() == "prim::CreateObject":
                made = node.output().type().annotation_str
                if any(map(forbidden_name, made.split("."), itertools.repeat("."))):
                    return str(made)
    return None


def _nodes(block: Any) -> Iterator[Any]:
    """The nodes of a graph, and those of the blocks and the graphs in them."""
    for node in block.nodes():
        yield node
        for name in node.attributeNames():
            match node.kindOf(name):
                case "g":
                    yield from _nodes(node.g(name))
                case "gs":
                    for graph in node.gs(name):
                        yield from _nodes(graph)
        for inner in node.blocks():
            yield from _nodes(inner)
