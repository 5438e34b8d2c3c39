"""Whether the functions of an ONNX file come to an end, before ONNX Runtime writes them out in place of their calls.

Of forty functions that each call the next one twice come 2^40 nodes. Needs onnx, and imports it for files alone that
hold functions.
"""

from __future__ import annotations

import graphlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from optexport.errors import SourceError, first_line

# ONNX Runtime writes out one level of calls after the other, and looks at all nodes each time: this many take minutes.
_MOST_LOOKS = 4_000_000
# The field of a model that holds them, in onnx.proto.
_FUNCTIONS = 25
# What protobuf takes, in bytes.
_LARGEST = (1 << 31) - 1
_MEND = "Only load files that you or people you trust have made."


def check(path: Path) -> None:
    """Checks that the functions of an ONNX file can be written out in place of their calls.

    Raises:
        SourceError: One calls itself, they are more than can be written out, or it is no ONNX file.
        OSError: It cannot be read.
    """
    try:
        if not _holds_functions(path):
            return
        import onnx

        model: Any = onnx.load_model(path, load_external_data=False)
    except OSError:
        raise
    except ImportError as error:
        raise SourceError(
            "it holds functions, which onnx alone can count", location=path.name, hint="pip install onnx"
        ) from error
    except Exception as error:  # protobuf's errors share no base class with those of files
        raise SourceError(f"it is no ONNX file: {first_line(error)}", location=path.name, hint=_MEND) from error
    functions: dict[str, list[Any]] = {}
    for function in model.functions:
        functions.setdefault(_name(function, function.name), []).append(function)
    calls = {
        name: _calls((node for function in bearing for node in function.node), functions, path)
        for name, bearing in functions.items()
    }
    calls[""] = _calls(model.graph.node, functions, path)
    try:
        ordered = [*graphlib.TopologicalSorter(calls).static_order()]
    except graphlib.CycleError as error:
        raise SourceError(f"its function {error.args[1][0]} calls itself", location=path.name, hint=_MEND) from error
    nodes: dict[str, int] = {}
    levels: dict[str, int] = {}
    for name in ordered:
        # What is no function is one node, and of no level.
        called = calls.get(name)
        nodes[name] = 1 if called is None else sum(nodes[each] * count for each, count in called.items())
        levels[name] = 0 if called is None else 1 + max((levels[each] for each in called), default=0)
        if nodes[name] * levels[name] > _MOST_LOOKS:
            raise SourceError(
                f"its functions, written out in place of their calls, are more than {_MOST_LOOKS // levels[name]:,} "
                f"nodes on {levels[name]} levels",
                location=path.name,
                hint=_MEND,
            )


def _holds_functions(path: Path) -> bool:
    """Whether a file holds functions, told without reading its weights.

    Raises:
        ValueError: It is not as protobuf writes models.
    """
    with path.open("rb") as file:
        while (key := _number(file)) is not None:
            field, kind = key >> 3, key & 7
            if kind not in (0, 1, 2, 5) or key >= 1 << 32:  # of which other readers may take the last bits
                raise ValueError(f"it holds a field {field} of kind {kind}")
            if field == _FUNCTIONS:
                return True
            value = _number(file) or 0 if kind in (0, 2) else 0
            if kind == 2 and value > _LARGEST:
                raise ValueError(f"it holds a field {field} of {value} bytes")
            file.seek({0: 0, 1: 8, 2: value, 5: 4}[kind], os.SEEK_CUR)
    return False


def _number(file: IO[bytes]) -> int | None:
    """The number that stands next, of 7 bits in each byte; None at the file's end.

    Raises:
        ValueError: It has more bits than such a number.
    """
    number = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number
    raise ValueError("it holds a number of more than 64 bits")


def _name(owner: Any, name: str) -> str:
    """What ONNX Runtime knows a function by, and what a node calls."""
    domain = "" if owner.domain == "ai.onnx" else owner.domain
    return ":".join([domain, name, owner.overload] if owner.overload else [domain, name])


def _calls(nodes: Iterable[Any], functions: dict[str, list[Any]], path: Path) -> Counter[str]:
    """How often each function is called in nodes and in the graphs that they hold; the other nodes as "node"."""
    calls: Counter[str] = Counter()
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            name = _name(node, node.op_type)
            calls[name if name in functions else "node"] += 1
            for attribute in node.attribute:
                graphs = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
                if graphs and name in functions:  # which it could hold any number of times
                    raise SourceError(f"it gives a graph to its function {name}", location=path.name, hint=_MEND)
                waiting += [graph.node for graph in graphs]
    return calls
