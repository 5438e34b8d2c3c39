"""Checks by text and by operators that a TorchScript program only computes.

The text is checked before the program is loaded, and the operators afterwards.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

# Namespaces of operators that do more than compute, and the operators of "aten" that read and write files.
_NAMESPACES = r"(?:_?c10d\w*|symm_mem|debugprims|inductor\w*|profiler|static_runtime)"
_NAMESPACE = re.compile(_NAMESPACES)
_FILES = ("from_file", "save", "load_tensor")
# They print, change the state of the process, or return memory addresses. A model may use these names for its own
# methods, so only operators are checked against them, not words of the text.
_EFFECTS = (
    "_print|manual_seed|seed|initial_seed|data_ptr|_cufft_(?:set_plan_cache_max_size|clear_plan_cache)"
    "|(?:read|write|\\w+_(?:from|to))_file"
)
# They do not check indices, so a file could write to the memory of the process.
_UNCHECKED = r"_convert_indices_from_\w+|_sobol_engine_\w+|_?(?:cudnn_)?ctc_loss\w*"
_OPERATORS = re.compile(
    rf"(?:{_NAMESPACES}|debug_mode_ops|streams|_dtensor)::\w+|\w+::(?:{'|'.join(_FILES)}|{_EFFECTS}|{_UNCHECKED})"
    r"|prim::(?:Print|id|rpc_\w+|PythonOp|IgnoredPythonOp|TimePoint|AddStatValue)"
)
# torch parses brackets, operators and blocks recursively. With a stack of 8 MB, the process ended by SIGSEGV without a
# message at 2,000 to 10,000 levels. torch itself writes fewer than a hundred.
_MAX_DEPTH = 500
# torch calls this method while it loads a file.
_LOAD_METHOD = "__setstate__"
# Tokens of torch's own lexer. Blanks and comments may occur between any two of them.
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


def find_forbidden_name(name: str, after: str) -> str | None:
    """Returns the name if it belongs to an operator that does more than compute.

    Args:
        name: A name in a program.
        after: The token after the name: only a name before a dot is a namespace.
    """
    if name in _FILES or name == _LOAD_METHOD or (after == "." and _NAMESPACE.fullmatch(name)):
        return name
    return None


def is_forbidden(operator: str) -> bool:
    """Returns True if an operator, such as ``aten::save``, does more than compute."""
    return _OPERATORS.fullmatch(operator) is not None


def find_forbidden_text(code: str) -> str | None:
    """Returns a forbidden name in a program, or None.

    A name is forbidden if it does more than compute. Text that could hide a name is forbidden too.
    """
    words = (match["token"] for match in _TOKEN.finditer(code) if match["token"] is not None)
    of_getattr: list[bool] = []  # for each open bracket: True if it belongs to getattr
    earlier = before = word = ""
    for after in itertools.chain(words, [""]):
        if name := find_forbidden_name(word, after):
            return name
        # A method or a declared attribute may also be called print.
        if word == "print" and before not in (".", "def") and after != ":":
            return word
        if word == "getattr" and after != "(":
            return "getattr by another name"
        if word in ("(", "[", "{"):
            of_getattr.append(before == "getattr")
        elif word in (")", "]", "}") and of_getattr and of_getattr.pop():
            # Escapes and adjacent texts could form any name.
            if earlier != "," or before[0] not in "\"'" or "\\" in before:
                return "getattr of a name that is not written plainly"
            if name := find_forbidden_name(before.strip("\"'"), after):
                return name
        earlier, before, word = before, word, after
    return None


def check_depth(code: str) -> None:
    """Refuses a program that is nested so deeply that torch's parser would overflow the stack.

    Each token up to the next comma counts as one level: an operator, an attribute, a call, a bracket.

    Raises:
        ValueError: The program is nested too deeply.
    """
    blocks, open_brackets = [0], [0]
    variants = deep = 0  # each elif is nested in the one before
    for match in _TOKEN.finditer(code):
        word, blank = match["token"], match["blank"] or ""
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
        if deep + len(blocks) + variants > _MAX_DEPTH:
            raise ValueError(f"the code is nested more than {_MAX_DEPTH} levels deep")


def find_forbidden_operator(unit: Any) -> str | None:
    """Returns an operator or a class of a loaded program that does more than compute, or None.

    Args:
        unit: The ``torch._C.CompilationUnit`` of the program. It holds all functions, including methods of classes and
            hooks, which the graphs of the modules call by name or not at all.
    """
    for function in unit.get_functions():
        for node in _nodes(function.graph):
            if is_forbidden(node.kind()):
                return str(node.kind())
            if node.kind() == "prim::CreateObject":
                class_name = node.output().type().annotation_str
                if any(map(find_forbidden_name, class_name.split("."), itertools.repeat("."))):
                    return str(class_name)
    return None


def _nodes(block: Any) -> Iterator[Any]:
    """Yields the nodes of a graph, including the nodes of its blocks and subgraphs."""
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
