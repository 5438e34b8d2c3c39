"""A division by a constant becomes a multiplication."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations import modules
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
             of two and the quotient is cut to whole numbers or compared, before it is summed with others, or `exact`
             is set; a division in place, with a rounding mode, or into a given tensor.
             A division of a size (``x.shape[0] / 49``) is none of its business: it must stay exact.
    Exact:   to the bit where c is a power of two; else to one more rounding.
    Inverse: exact; c itself is recorded.

    Attributes:
        exact: Whether to change only what stays equal to the bit.
    """

    exact: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if modules.operator_name(node) not in _NAMES or not node.args:
            return None
        dividend, divisor, *others = (*node.args, *node.kwargs.values())
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
        if divisor == 0 or math.isnan(divisor):
            return Skip(f"the divisor is {divisor}")
        # A subnormal factor has lost the precision that the quotient would have.
        limits = torch.finfo(torch.float32)
        if abs(divisor) > limits.max or not limits.tiny <= abs(1 / divisor) <= limits.max:
            return Skip(f"1 / {divisor} is not a normal float32")
        if abs(math.frexp(divisor)[0]) != 0.5:
            if self.exact:
                return Skip(f"{divisor} is not a power of two")
            if cut := _where_cut(graph_module, node):
                return Skip(
                    f"{divisor} is not a power of two, and {cut.name} cuts the quotient to whole numbers or compares it"
                )
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


# One rounding more or less is the next whole number here, or the other answer, ...
_CUTS = {
    *("floor", "ceil", "trunc", "fix", "round", "frac", "floor_divide", "floordiv", "remainder", "fmod", "mod", "sign"),
    *("eq", "ne", "lt", "le", "gt", "ge", "equal", "isclose", "bucketize", "searchsorted", "histc", "heaviside"),
    *("argmax", "argmin", "argsort", "sort", "topk", "unique", "nonzero"),
}
_MIXING_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.Softmax)
_CASTS = {"int", "long", "short", "char", "byte", "bool", "to", "type", "_to_copy"}
# ... and after these every number is a sum of many, which rounds differently with any transformation.
_MIXES = {
    *("matmul", "bmm", "mm", "addmm", "einsum", "linear", "sum", "mean", "var", "std", "prod", "cumsum", "norm"),
    *("softmax", "_softmax", "log_softmax", "logsumexp", "layer_norm", "group_norm", "batch_norm", "rms_norm"),
    *("scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "convolution", "avg_pool2d"),
}


def _where_cut(graph_module: GraphModule, quotient: Node) -> Node | None:
    """The node that cuts a quotient, or what is computed from it element by element, to whole numbers, if any."""
    seen, ahead = {quotient}, [quotient]
    while ahead:
        for user in ahead.pop().users:
            name = modules.operator_name(user).rstrip("_")
            if name in _CUTS or user.kwargs.get("rounding_mode") or (name in _CASTS and not _gives_fractions(user)):
                return user
            mixes = name in _MIXES or isinstance(modules.called_module(graph_module, user), _MIXING_MODULES)
            if user not in seen and not mixes:
                seen.add(user)
                ahead.append(user)
    return None


def _gives_fractions(cast: Node) -> bool:
    value = cast.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    dtypes = [a for a in (*cast.args, *cast.kwargs.values()) if isinstance(a, torch.dtype)]
    return modules.operator_name(cast) in ("to", "type") and all(dtype.is_floating_point for dtype in dtypes)


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
