"""ChangeTrueDivToMulByInverse: a division by a constant becomes a multiplication."""

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
    """Replaces a division by a constant number by a multiplication.

    x / c  ->  x * (1 / c)

    A division of a size, such as ``x.shape[0] / 49``, does not match: it must stay exact.

    Skips:   a c that is 0, infinite, NaN, a bool, a parameter or a buffer; a 1 / c that overflows or is subnormal; a
             division in place, with a rounding mode, or with `out`. If c is not a power of two, or x is complex: all
             divisions if `exact` is set, else those whose quotient may reach an operation that amplifies a rounding.
             Such operations round or compare, take a root, logarithm or power of a number that may become negative,
             divide by one that may become zero, cast to a lower or unknown precision, write to other memory, or are
             not PyTorch's own. The search ends at a softmax, a normalization or a recurrent layer.
    Exact:   bit-exact if c is a power of two and x is real, else to one more rounding of the quotient. Later
             functions see that rounding: the sine of a million may differ by 0.1 in float32.
    Inverse: exact; c itself is recorded.

    Attributes:
        exact: Change only divisions whose result stays bit-exact.
    """

    exact: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        arguments = (*node.args, *node.kwargs.values())
        if modules.operator_name(node) not in _NAMES or len(arguments) < 2:
            return None
        dividend, divisor, *rest = arguments
        if not isinstance(dividend, Node) or _is_size(dividend):
            return None
        if isinstance(divisor, Node) and divisor.op != "get_attr":
            return None
        if (node.op, node.target) not in _DIVISIONS.values():
            return Skip("the division is in place, or uses an unsupported function")
        if rest or node.kwargs:
            return Skip("the division has keyword arguments, or more than a dividend and a divisor")
        if reason := _find_divisor_problem(divisor):
            return Skip(reason)
        assert isinstance(divisor, int | float)
        if reason := _find_rounding(node, divisor):
            if self.exact:
                return Skip(reason)
            if reader := roundings.find_sensitive_reader(graph_module, node):
                return Skip(f"{reason}, and {reader.name} may amplify the rounding of the quotient")
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


def _find_divisor_problem(divisor: Any) -> str | None:
    if not isinstance(divisor, (int, float)) or isinstance(divisor, bool):
        return f"the divisor is {'a tensor' if isinstance(divisor, Node) else divisor}, not a number"
    if divisor == 0 or divisor != divisor:
        return f"the divisor is {divisor}"
    # A subnormal factor has lost the precision of the quotient.
    limits = torch.finfo(torch.float32)
    if abs(divisor) > limits.max or not limits.tiny <= abs(1 / divisor) <= limits.max:
        return f"1 / {divisor} is not a normal float32"
    return None


def _find_rounding(node: Node, divisor: float) -> str | None:
    """Returns why the product with the inverse may not be bit-exact, or None if it is."""
    if roundings.is_complex(node):
        return "complex products are rounded differently from quotients"
    return None if abs(math.frexp(divisor)[0]) == 0.5 else f"{divisor} is not a power of two"


def _is_size(node: Node) -> bool:
    """Returns True if a node is a Python number that is computed from sizes."""
    visited, ahead = {node}, [node]
    while ahead:
        part = ahead.pop()
        value = part.meta.get("val")
        if modules.measures(part) or (part.op == "call_method" and part.target in ("item", "tolist")):
            return True
        if value is not None and not isinstance(value, torch.Tensor):
            return True
        if value is None and part.op == "call_function" and _is_python_function(part.target):
            new = [source for source in part.all_input_nodes if source not in visited]
            visited.update(new)
            ahead += new
    return False


def _is_python_function(function: Any) -> bool:
    return getattr(function, "__module__", None) in ("_operator", "math")
