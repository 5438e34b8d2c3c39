"""A division by a constant becomes a multiplication."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.rule import Match, ReversibleRule, Skip

_DIVISIONS: dict[str, tuple[str, Any]] = {
    "operator.truediv": ("call_function", operator.truediv),
    "torch.div": ("call_function", torch.div),
    "torch.true_divide": ("call_function", torch.true_divide),
    "Tensor.div": ("call_method", "div"),
    "Tensor.true_divide": ("call_method", "true_divide"),
}


@dataclass(frozen=True)
class ChangeTrueDivToMulByInverse(ReversibleRule):
    """x / c  ->  x * (1 / c), for a constant number c.

    Skips:   c is 0, infinite or NaN; 1 / c overflows or is subnormal; with `exact`, c is not a power of two.
             A division of a size (``x.shape[0] / 49``) is none of its business: it must stay exact.
    Exact:   to the bit where c is a power of two; else to one more rounding.
    Inverse: exact; c itself is recorded.

    Attributes:
        exact: Whether to change only what stays equal to the bit.
    """

    exact: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if (node.op, node.target) not in _DIVISIONS.values() or len(node.args) != 2 or node.kwargs:
            return None
        dividend, divisor = node.args
        if not isinstance(dividend, Node) or _is_size(dividend) or type(divisor) not in (int, float):
            return None
        assert isinstance(divisor, (int, float))
        if divisor == 0 or math.isnan(divisor):
            return Skip(f"the divisor is {divisor}")
        # A subnormal factor has lost the precision that the quotient would have.
        limits = torch.finfo(torch.float32)
        if abs(divisor) > limits.max or not limits.tiny <= abs(1 / divisor) <= limits.max:
            return Skip(f"1 / {divisor} is not a normal float32")
        if self.exact and abs(math.frexp(divisor)[0]) != 0.5:
            return Skip(f"{divisor} is not a power of two")
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


def _is_size(node: Node) -> bool:
    """Whether a node is a Python number made of sizes: dividing one rounds to a size again, or to none."""
    value = node.meta.get("val")
    if value is not None:
        return not isinstance(value, torch.Tensor)
    if node.op == "call_method" and node.target in (
        *("size", "dim", "ndimension", "numel", "nelement", "item", "stride", "storage_offset", "element_size"),
        *("__len__", "tolist", "get_device"),
    ):
        return True
    if node.op == "call_function" and node.target in (getattr, len, torch.ops.aten.sym_size.int):
        return node.target is not getattr or node.args[1] in ("shape", "ndim")
    if node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "math"):
        return any(_is_size(argument) for argument in node.all_input_nodes)
    return False
