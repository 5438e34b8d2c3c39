"""A division by a constant becomes a multiplication."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import modules, roundings
from optexport.transformations.rule import Match, ReversibleRule, Skip

_DIVISIONS: dict[str, tuple[str, Any]] = {
    "operator.truediv": ("call_function", operator.truediv),
    "torch.div": ("call_function", torch.div),
    "torch.true_divide": ("call_function", torch.true_divide),
    "Tensor.div": ("call_method", "div"),
    "Tensor.true_divide": ("call_method", "true_divide"),
}
_NAMES = {"truediv", "itruediv", "div", "div_", "true_divide", "true_divide_", "divide", "divide_"}


@dataclass(frozen=True)
class ChangeTrueDivToMulByInverse(ReversibleRule):
    """x / c  ->  x * (1 / c), for a constant number c.

    Skips:   c is 0, infinite, NaN, a bool, or a parameter or buffer; 1 / c overflows or is subnormal; c is not a power
             of two, or x known to be complex, and `exact` is set, or the quotient reaches, also by sums and products
             with others, anything that is not known to take one rounding more or less as it is, before a softmax, a
             normalisation or a recurrent layer: what cuts to whole numbers or compares, a root, logarithm or power of
             what a rounding may make negative, a division by what it may make zero, a cast to a lower precision than
             its own or to an unknown dtype, memory of another tensor, a function of one's own; a division in place,
             with a rounding mode, or into a given tensor.
             A division of a size (``x.shape[0] / 49``) is none of its business: it must stay exact.
    Exact:   to the bit where c is a power of two and x is real; else to one more rounding. What functions give that
             follow is that of an argument within one rounding: the sine of a quotient of a million may differ by 0.1
             in float32, as it would after any other rounding of the quotient.
    Inverse: exact; c itself is recorded.

    Attributes:
        exact: Whether to change only what stays equal to the bit.
    """

    exact: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        given = (*node.args, *node.kwargs.values())
        if modules.operator_name(node) not in _NAMES or len(given) < 2:
            return None
        dividend, divisor, *others = given
        if not isinstance(dividend, Node) or _is_size(dividend):
            return None
        if isinstance(divisor, Node) and divisor.op != "get_attr":
            return None
        if (node.op, node.target) not in _DIVISIONS.values():
            return Skip("it divides in place, or in a way of its own")
        if others or node.kwargs:
            return Skip("it takes more than a dividend and a divisor, or one by keyword")
        if not isinstance(divisor, (int, float)) or isinstance(divisor, bool):
            return Skip(f"the divisor is {'a tensor' if isinstance(divisor, Node) else divisor}, not a number")
        if divisor == 0 or divisor != divisor:
            return Skip(f"the divisor is {divisor}")
        # A subnormal factor has lost the precision that the quotient would have.
        limits = torch.finfo(torch.float32)
        if abs(divisor) > limits.max or not limits.tiny <= abs(1 / divisor) <= limits.max:
            return Skip(f"1 / {divisor} is not a normal float32")
        if reason := _why_rounded(node, divisor):
            if self.exact:
                return Skip(reason)
            if reader := roundings.where_cut(graph_module, node):
                return Skip(f"{reason}, and {reader.name} is not known to take a quotient that is rounded otherwise")
        return Match((node,))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        (name,) = [name for name, division in _DIVISIONS.items() if division == (node.op, node.target)]
        dividend, divisor = node.args
        node.op, node.target = "call_function", operator.mul
        node.args = (dividend, 1 / divisor)  # type: ignore[operator]
        return [(node, {"division": name, "divisor": divisor})]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        node.op, node.target = _DIVISIONS[record["division"]]
        node.args = (node.args[0], record["divisor"])


def _why_rounded(node: Node, divisor: float) -> str | None:
    """Why a product with the inverse may be rounded otherwise than the quotient; None if it is the same to the bit."""
    if roundings.is_complex(node):
        return "complex numbers are multiplied otherwise than divided"
    return None if abs(math.frexp(divisor)[0]) == 0.5 else f"{divisor} is not a power of two"


def _is_size(node: Node) -> bool:
    """Whether a node is a Python number made of sizes: dividing one rounds to a size again, or to none."""
    seen, ahead = {node}, [node]
    while ahead:
        part = ahead.pop()
        value = part.meta.get("val")
        if modules.measures(part) or (part.op == "call_method" and part.target in ("item", "tolist")):
            return True
        if value is not None and not isinstance(value, torch.Tensor):
            return True
        if value is None and part.op == "call_function" and _of_python(part.target):
            new = [source for source in part.all_input_nodes if source not in seen]
            seen.update(new)
            ahead += new
    return False


def _of_python(function: Any) -> bool:
    return getattr(function, "__module__", None) in ("_operator", "math")
