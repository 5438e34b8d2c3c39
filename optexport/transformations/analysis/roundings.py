"""What becomes of one rounding more or less: where functions that follow may make more of it than a rounding."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, folding, modes, modules

# What gives a number in another precision, by the dtype that the name tells.
_CASTS: dict[str, torch.dtype | None] = {
    **dict.fromkeys(("to", "type", "tocopy")),  # to what they are told
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
# What gives the same numbers in other places, or some of them.
_MOVES = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "T", "mT", "movedim", "swapaxes"),
    *("viewas", "reshapeas", "ravel", "moveaxis", "swapdims", "tile", "repeatinterleave", "gather", "pixelshuffle"),
    *("unsqueeze", "squeeze", "expand", "expandas", "repeat", "contiguous", "clone", "detach", "alias", "slice"),
    *("select", "getitem", "narrow", "chunk", "split", "unbind", "cat", "concat", "stack", "pad", "tril", "triu"),
    *("roll", "flip", "indexselect", "dropout", "identity", "real", "imag", "conj", "viewasreal", "viewascomplex"),
}
# After these no rounding tells what has a sign, or is zero, from what has not, ...
_KEEPS_SIGN = {
    *("mul", "truediv", "div", "truedivide", "divide", "neg", "abs", "square", "relu", "sigmoid", "exp", "exp2"),
    *("pow", "sqrt", "rsqrt", "reciprocal"),
    *(_CASTS.keys() | _MOVES),
}
# ... so that these, of which zero is where they begin, or a pole, do not tell either.
_FROM_ZERO = {"sqrt", "rsqrt", "reciprocal", "log", "log2", "log10"}
# So is zero for what these divide by, their arguments from there on.
_DIVISORS = {"truediv": 1, "itruediv": 1, "div": 1, "truedivide": 1, "divide": 1, "addcdiv": 2}
# These tell of one rounding more or less by as much, or nearly, whether they are methods, functions, ATen operators or
# layers: they are continuous, and defined for every number. So no logarithm of q + 1 is here, nor arcsine of q, for
# which a rounding may be all that lies between a number and NaN; and nothing that jumps.
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
# So do these, of which many numbers make one: a sum of zeros and whole quotients is as whole as they are.
_SUMS = {
    *("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "linear", "bilinear", "sum", "mean", "var", "std", "prod"),
    *("cumsum", "norm", "convolution"),
    *(f"{kind}{rank}d" for kind in ("conv", "convtranspose", "avgpool", "adaptiveavgpool") for rank in (1, 2, 3)),
}
# ... and after these hardly any number is a whole one, or another that what follows could tell from its neighbours.
_MIXES = {
    *("softmax", "logsoftmax", "logsumexp", "layernorm", "groupnorm", "instancenorm", "rmsnorm"),
    *("scaleddotproductattention", "multiheadattention", "lstm", "gru"),
}
_TELLS_LITTLE = _SMOOTH | _SUMS | _MIXES


def where_cut(graph_module: GraphModule, quotient: Node) -> Node | None:
    """The node that may make more than a rounding of one in a quotient, or in what is computed from it, if any."""
    reached, ahead = {quotient}, set(quotient.users)
    # Of complex numbers, roots and logarithms jump where the imaginary part changes its sign, that of a zero too.
    shifted = {quotient} if is_complex(quotient) else set()
    while ahead:
        user = min(ahead)  # so that all it is computed from was seen before
        ahead.remove(user)
        if user.op == "output" or modules.measures(user):
            continue
        name, changed = _name(graph_module, user), effects.mutated(graph_module, user)
        signed = shifted.isdisjoint(user.all_input_nodes)
        if not _tells_little(user, name, shifted) or not _gives_fractions(user, name):
            return user
        if modes.casts(graph_module, user) or _narrows(user, name, reached):
            return user
        if not reached.issuperset(changed):
            return user  # what reads that memory otherwise is not seen here
        if name not in _MIXES:
            reached.add(user)
            if not signed or name not in _KEEPS_SIGN:
                shifted.update(reached if changed else [user])
            ahead.update(reader for reader in user.users if reader not in reached)
    return None


def _tells_little(node: Node, name: str, shifted: set[Node]) -> bool:
    """Whether a rounding of what a node is given stays about one in its result.

    Args:
        shifted: What may be of another sign, or zero, as it is rounded.
    """
    signed = shifted.isdisjoint(node.all_input_nodes)
    if name in _DIVISORS:
        return shifted.isdisjoint([*node.args[_DIVISORS[name] :], *node.kwargs.values()])
    if name == "norm":  # of order zero it counts
        order = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
        return order in (None, "fro") or (isinstance(order, int | float) and order >= 1)
    if name == "pow" and len(node.args) == 2 and not node.kwargs:
        base, exponent = node.args
        if isinstance(exponent, int | float):
            return signed or (exponent >= 0 and exponent == int(exponent))
        return isinstance(base, int | float) and base > 0
    return name in _TELLS_LITTLE or (name in _FROM_ZERO and signed)


def _name(graph_module: GraphModule, node: Node) -> str:
    """What a node does, as it is written here; nothing for a layer that is more than PyTorch's own."""
    module = modules.called_module(graph_module, node)
    if module is not None:
        cls = type(module)
        plain = cls.__module__.startswith("torch.nn.modules.") and folding.why_not_plain(module, cls) is None
        places = getattr(module, "return_indices", False)  # of the greatest
        return cls.__name__.lower() if plain and not places else ""
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
    if known := _dtypes(node):
        return all(dtype.is_floating_point or dtype.is_complex for dtype in known)
    if name in _CASTS:
        return all(isinstance(a, (torch.dtype, torch.device, torch.memory_format, bool)) for a in given)
    return not isinstance(node.kwargs.get("dtype"), Node)


def _narrows(node: Node, name: str, reached: set[Node]) -> bool:
    """Whether a node may round what it is given to a lower precision, of which a rounding may then be a whole step."""
    sources = [_dtypes(source) for source in node.all_input_nodes if source in reached]
    own = {dtype for dtypes in sources for dtype in dtypes} if all(sources) else {torch.float64}
    new = {argument for argument in (*node.args[1:], *node.kwargs.values()) if isinstance(argument, torch.dtype)}
    new |= _dtypes(node) | {dtype for cast, dtype in _CASTS.items() if cast == name and dtype is not None}
    return max((torch.finfo(dtype).eps for dtype in new), default=0.0) > min(torch.finfo(d).eps for d in own)


def _dtypes(node: Node) -> set[torch.dtype]:
    """Those of the tensors that a node gives; none where that is not known."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}


def is_complex(node: Node) -> bool:
    """Whether a node is known to give complex numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()
