"""Effect of one additional rounding: finds later operations that may amplify it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, folding, modes, modules

# Casts, with the dtype that the name implies.
_CASTS: dict[str, torch.dtype | None] = {
    **dict.fromkeys(("to", "type", "tocopy")),  # to a dtype in the arguments
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Operations that return some or all of the same numbers in other places.
_MOVES = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "T", "mT", "movedim", "swapaxes"),
    *("viewas", "reshapeas", "ravel", "moveaxis", "swapdims", "tile", "repeatinterleave", "gather", "pixelshuffle"),
    *("unsqueeze", "squeeze", "expand", "expandas", "repeat", "contiguous", "clone", "detach", "alias", "slice"),
    *("select", "getitem", "narrow", "chunk", "split", "unbind", "cat", "concat", "stack", "pad", "tril", "triu"),
    *("roll", "flip", "indexselect", "dropout", "identity", "real", "imag", "conj", "viewasreal", "viewascomplex"),
}
# Operations after which a rounding changes neither a sign nor whether a number is zero ...
_KEEPS_SIGN = {
    *("mul", "truediv", "div", "truedivide", "divide", "neg", "abs", "square", "relu", "sigmoid", "exp", "exp2"),
    *("pow", "sqrt", "rsqrt", "reciprocal"),
    *(_CASTS.keys() | _MOVES),
}
# ... so that these, which start at zero or have a pole there, do not amplify it.
_FROM_ZERO = {"sqrt", "rsqrt", "reciprocal", "log", "log2", "log10"}
# Divisions have a pole at zero of their divisors: the arguments from this index on.
_DIVISORS = {"truediv": 1, "itruediv": 1, "div": 1, "truedivide": 1, "divide": 1, "addcdiv": 2}
# Operations that change by about as much as their input, as methods, functions, ATen operators or layers. They are
# continuous and defined for every number. So log1p and arcsin are not among them, where a rounding may produce NaN,
# and nothing that jumps.
_SMOOTH = {
    *("add", "sub", "rsub", "mul", "truediv", "div", "truedivide", "divide", "iadd", "isub", "imul", "itruediv"),
    *("neg", "abs", "square", "exp", "exp2", "expm1", "sin", "cos", "sinc", "sinh", "cosh", "tanh"),
    *("erf", "erfc", "sigmoid", "logsigmoid", "hypot", "deg2rad", "rad2deg", "lerp", "addcmul", "addcdiv"),
    *("amax", "amin", "maxpool1d", "maxpool2d", "maxpool3d"),
    *("relu", "relu6", "leakyrelu", "prelu", "elu", "selu", "celu", "gelu", "silu", "glu", "mish", "softplus"),
    *("softsign", "softshrink", "tanhshrink", "hardtanh", "hardsigmoid", "hardswish"),
    *("clamp", "clampmin", "clampmax", "minimum", "maximum", "where", "maskedfill"),
    *("batchnorm", "batchnorm1d", "batchnorm2d", "batchnorm3d"),
    *(_CASTS.keys() | _MOVES),
}
# Smooth operations that combine many numbers. Sums of zeros and integers are integers, so later jumps still matter ...
_SUMS = {
    *("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "linear", "bilinear", "sum", "mean", "var", "std", "prod"),
    *("cumsum", "norm", "convolution"),
    *(f"{kind}{rank}d" for kind in ("conv", "convtranspose", "avgpool", "adaptiveavgpool") for rank in (1, 2, 3)),
}
# ... but after these, hardly any result is an integer or another number where a later operation jumps.
_MIXES = {
    *("softmax", "logsoftmax", "logsumexp", "layernorm", "groupnorm", "instancenorm", "rmsnorm"),
    *("scaleddotproductattention", "multiheadattention", "lstm", "gru", "rnntanh", "rnnrelu"),
}
_STABLE = _SMOOTH | _SUMS | _MIXES


def find_sensitive_reader(graph_module: GraphModule, quotient: Node) -> Node | None:
    """Returns a node that may amplify one rounding of a quotient, also through others.

    None if none can.
    """
    reached, ahead = {quotient}, set(quotient.users)
    # Values that a rounding may change in sign, or from or to zero. The sign of an imaginary part matters to complex
    # roots and logarithms, even the sign of zero.
    unsigned = {quotient} if is_complex(quotient) else set()
    while ahead:
        user = min(ahead)  # so that all its inputs were visited before
        ahead.remove(user)
        if user.op == "output" or modules.measures(user):
            continue
        name, mutated = _name(graph_module, user), effects.mutated_inputs(graph_module, user)
        keeps_sign = unsigned.isdisjoint(user.all_input_nodes)
        if not _is_stable(user, name, unsigned) or not _returns_fractions(user, name):
            return user
        if modes.casts(graph_module, user) or _narrows(user, name, reached):
            return user
        if not reached.issuperset(mutated):
            return user  # it writes to memory whose other readers are not visited here
        if name not in _MIXES:
            reached.add(user)
            if not keeps_sign or name not in _KEEPS_SIGN:
                unsigned.update(reached if mutated else [user])
            ahead.update(reader for reader in user.users if reader not in reached)
    return None


def _is_stable(node: Node, name: str, unsigned: set[Node]) -> bool:
    """Returns True if one rounding of a node's input changes its result by about one rounding.

    `unsigned` are the values that a rounding may change in sign, or from or to zero.
    """
    keeps_sign = unsigned.isdisjoint(node.all_input_nodes)
    if name in _DIVISORS:
        return unsigned.isdisjoint([*node.args[_DIVISORS[name] :], *node.kwargs.values()])
    if name == "norm":  # a norm of order zero counts
        order = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
        return order in (None, "fro") or (isinstance(order, int | float) and order >= 1)
    if name == "pow" and len(node.args) == 2 and not node.kwargs:
        base, exponent = node.args
        if isinstance(exponent, int | float):
            return keeps_sign or (exponent >= 0 and exponent == int(exponent))
        return isinstance(base, int | float) and base > 0
    return name in _STABLE or (name in _FROM_ZERO and keeps_sign)


def _name(graph_module: GraphModule, node: Node) -> str:
    """Returns the name of an operation as in the tables above; empty for foreign layers."""
    module = modules.called_module(graph_module, node)
    if module is not None:
        cls = type(module)
        plain = cls.__module__.startswith("torch.nn.modules.") and folding.find_plain_problem(module, cls) is None
        returns_indices = getattr(module, "return_indices", False)
        return cls.__name__.lower() if plain and not returns_indices else ""
    if node.target is getattr:
        return str(node.args[1])
    return modules.operator_name(node).replace("_", "")


def _returns_fractions(node: Node, name: str) -> bool:
    """Returns False if a node may return integers, bits or positions because of its arguments."""
    options = [*node.args[1:], *node.kwargs.values()]
    dtypes = [option for option in options if isinstance(option, torch.dtype)]
    if name == "view" and dtypes:
        return False  # reinterprets bits
    if name == "where" and len(options) < 2:
        return False  # returns positions
    if node.kwargs.get("rounding_mode") or any(not dtype.is_floating_point for dtype in dtypes):
        return False
    if result_dtypes := _dtypes(node):
        return all(dtype.is_floating_point or dtype.is_complex for dtype in result_dtypes)
    if name in _CASTS:
        return all(isinstance(o, (torch.dtype, torch.device, torch.memory_format, bool)) for o in options)
    return not isinstance(node.kwargs.get("dtype"), Node)


def _narrows(node: Node, name: str, reached: set[Node]) -> bool:
    """Returns True if a node may convert to a lower precision, which amplifies a rounding."""
    sources = [_dtypes(source) for source in node.all_input_nodes if source in reached]
    before = {dtype for dtypes in sources for dtype in dtypes} if all(sources) else {torch.float64}
    after = {argument for argument in (*node.args[1:], *node.kwargs.values()) if isinstance(argument, torch.dtype)}
    after |= _dtypes(node) | {dtype for cast, dtype in _CASTS.items() if cast == name and dtype is not None}
    return max((torch.finfo(dtype).eps for dtype in after), default=0.0) > min(torch.finfo(d).eps for d in before)


def _dtypes(node: Node) -> set[torch.dtype]:
    """Returns the dtypes of a node's result tensors; empty if unknown."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}


def is_complex(node: Node) -> bool:
    """Returns True if a node is known to return complex numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()
