"""A division by a constant becomes a multiplication."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations import effects, folding, modules
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
             of two and `exact` is set, or the quotient reaches anything that is not known to take one rounding more
             or less as it is, before it is summed with others: what cuts to whole numbers or compares, a cast to an
             unknown dtype, memory of another tensor, a function of one's own; a division in place, with a rounding
             mode, or into a given tensor.
             A division of a size (``x.shape[0] / 49``) is none of its business: it must stay exact.
    Exact:   to the bit where c is a power of two and x is real; else to one more rounding.
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
        if abs(math.frexp(divisor)[0]) != 0.5:
            if self.exact:
                return Skip(f"{divisor} is not a power of two")
            if cut := _where_cut(graph_module, node):
                return Skip(f"{divisor} is not a power of two, and {cut.name} may cut the quotient to whole numbers")
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


# One rounding more or less stays one here, or nearly, whether by a method, a function, an ATen operator or a layer, ...
_SMOOTH = {
    *("add", "sub", "rsub", "mul", "truediv", "div", "truedivide", "divide", "iadd", "isub", "imul", "itruediv"),
    *("amax", "amin", "glu", "maxpool1d", "maxpool2d", "maxpool3d", "roll", "flip", "indexselect"),
    *("neg", "abs", "square", "exp", "sin", "cos", "tanh", "sigmoid", "erf", "lerp", "addcmul", "dropout", "identity"),
    *("relu", "relu6", "leakyrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "hardtanh", "clamp"),
    *("hardsigmoid", "hardswish", "clampmin", "clampmax", "minimum", "maximum", "where", "maskedfill"),
    *("batchnorm", "batchnorm1d", "batchnorm2d", "batchnorm3d", "float", "double", "half", "bfloat16"),
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "T", "mT", "movedim", "swapaxes"),
    *("unsqueeze", "squeeze", "expand", "expandas", "repeat", "contiguous", "clone", "detach", "alias", "slice"),
    *("select", "getitem", "narrow", "chunk", "split", "unbind", "cat", "concat", "stack", "pad", "tril", "triu"),
}
_CASTS = {"to", "type", "tocopy"}
# ... and after these every number is a sum of many, which rounds differently with any transformation.
_MIXES = {
    *("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "linear", "bilinear", "sum", "mean", "var", "std", "prod"),
    *("cumsum", "norm", "softmax", "logsoftmax", "logsumexp", "layernorm", "groupnorm", "instancenorm", "rmsnorm"),
    *("scaleddotproductattention", "multiheadattention", "lstm", "gru", "convolution"),
    *(f"{kind}{rank}d" for kind in ("conv", "convtranspose", "avgpool", "adaptiveavgpool") for rank in (1, 2, 3)),
}
_KNOWN = _SMOOTH | _CASTS | _MIXES


def _where_cut(graph_module: GraphModule, quotient: Node) -> Node | None:
    """The node that may cut a quotient, or what is computed from it number by number, to whole numbers, if any."""
    seen, ahead = {quotient}, [quotient]
    while ahead:
        for user in ahead.pop().users:
            if user in seen or user.op == "output" or modules.measures(user):
                continue
            name = _name(graph_module, user)
            if name not in _KNOWN or not _gives_fractions(user, name):
                return user
            if not seen.issuperset(effects.mutated(graph_module, user)):
                return user  # what reads that memory otherwise is not seen here
            if name not in _MIXES:
                seen.add(user)
                ahead.append(user)
    return None


def _name(graph_module: GraphModule, node: Node) -> str:
    """What a node does, as it is written here; nothing for a layer that is more than PyTorch's own."""
    module = modules.called_module(graph_module, node)
    if module is not None:
        cls = type(module)
        plain = cls.__module__.startswith("torch.nn.modules.") and folding.why_not_plain(module, cls) is None
        return cls.__name__.lower() if plain else ""
    if node.target is getattr:
        return str(node.args[1])
    return modules.operator_name(node).replace("_", "")


def _gives_fractions(node: Node, name: str) -> bool:
    """Whether what a node gives is not of whole numbers by an argument of its own, or may be as far as is known."""
    given = [*node.args[1:], *node.kwargs.values()]
    dtypes = [argument for argument in given if isinstance(argument, torch.dtype)]
    if name == "view" and dtypes:
        return False  # of bits
    if name == "where" and len(given) < 2:
        return False  # of places
    if node.kwargs.get("rounding_mode") or any(not dtype.is_floating_point for dtype in dtypes):
        return False
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    if name in _CASTS:
        return all(isinstance(a, (torch.dtype, torch.device, torch.memory_format, bool)) for a in given)
    return not isinstance(node.kwargs.get("dtype"), Node)


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
