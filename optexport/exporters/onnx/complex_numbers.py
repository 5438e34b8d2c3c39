"""Replaces complex numbers by pairs of real numbers for ONNX files.

ONNX Runtime has no operators for complex numbers. ``torch.onnx`` writes them as an extra axis, but lacks many
operators, for example powers, roots, ``where``, ``einsum`` and products with ``1j``.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.nn import functional
from torch.utils import _pytree as pytree

from optexport.exporters.graph_export import to_program
from optexport.exporters.onnx.refusals import UnsupportedError, naming_node
from optexport.exporters.onnx.replacements.arithmetic import hypot
from optexport.signature.signature import Signature

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor."""

    real: torch.Tensor
    imag: torch.Tensor


def replace_with_pairs(
    program: ExportedProgram, signature: Signature, example: Mapping[str, torch.Tensor]
) -> ExportedProgram:
    """Returns a program that computes with real numbers only.

    Raises:
        ExportError: Caused by an `UnsupportedError`; an operator has no form for pairs.
    """
    if not any(_is_complex(node.meta.get("val")) for node in program.graph.nodes):
        return program
    graph_module = program.module(check_guards=False)
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))  # without the names and the structure of the inputs
    module = _PairModule(graph_module, graph)
    return to_program(module, signature, example)  # type: ignore[arg-type]  # it has a graph, too


class _PairModule(torch.nn.Module):
    """Runs a graph on pairs of real numbers, with the parameters of the graph.

    Not a GraphModule, because ``torch.export`` would run its graph without pairs.
    """

    def __init__(self, graph_module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph
        for table in ("_parameters", "_buffers", "_modules"):
            setattr(self, table, getattr(graph_module, table))
        part_names: dict[str, list[str]] = {}  # by target
        for target in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")):
            if _is_complex(value := operator.attrgetter(target)(graph_module)):
                part_names[target] = [
                    self._store(f"{target.replace('.', '_')}_{part}", getattr(value.detach().resolve_conj(), part))
                    for part in ("real", "imag")
                ]
        names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]

        def forward(*args: torch.Tensor, **kw: torch.Tensor) -> Any:
            with preserve_node_meta():
                interpreter = _PairInterpreter(self, graph, part_names)
                return interpreter.run(*args, *(kw[name] for name in names[len(args) :]))

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # names for torch.export
        self.forward = forward

    def _store(self, name: str, tensor: torch.Tensor) -> str:
        """Stores a copy of a tensor under an unused name, and returns the name."""
        while hasattr(self, name):
            name += "_"
        self.register_buffer(name, tensor.clone())
        return name


class _PairInterpreter(fx.Interpreter):
    """Runs a graph with a `Pair` for each complex tensor."""

    def __init__(self, module: _PairModule, graph: fx.Graph, part_names: Mapping[str, Sequence[str]]) -> None:
        super().__init__(module, graph=graph)
        self._part_names = part_names

    def run_node(self, n: fx.Node) -> Any:
        return naming_node(super().run_node, n)(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self._part_names:
            return super().get_attr(target, args, kwargs)
        return Pair(*(getattr(self.module, name) for name in self._part_names[target]))

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Splits a complex input; ``torch.onnx`` gives it an axis for both parts."""
        value = super().placeholder(target, args, kwargs)
        return Pair(*torch.view_as_real(value).unbind(-1)) if _is_complex(value) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves = _leaves((args, kwargs))
        name = target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else str(target)
        creates = name in ("complex", "polar", "view_as_complex") or any(_makes_complex(leaf) for leaf in leaves)
        if target is operator.getitem or (not creates and not any(isinstance(leaf, Pair) for leaf in leaves)):
            return super().call_function(target, args, kwargs)
        if name.endswith("_") and isinstance(args[0], Pair):
            result = _call(getattr(aten, name[:-1]), name[:-1], args, kwargs)
            args[0].real.copy_(result.real)
            args[0].imag.copy_(result.imag)
            return args[0]
        return _call(target, name, args, kwargs)


def _call(target: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator that has a complex argument or result."""
    kwargs = {**kwargs}
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*args, **kwargs)
    if name.removesuffix("_like").removeprefix("new_") in ("zeros", "ones", "full", "empty"):
        return _fill(name, *args, **kwargs)
    if name in _PRODUCTS:
        return _product(functools.partial(target, **kwargs), *args)
    if name in _LINEAR_IN_ALL:
        like = next(leaf for leaf in _leaves(args) if _is_pair(leaf))
        as_pair = functools.partial(_as_pair, like=like)
        args = pytree.tree_map_only((torch.Tensor, Pair), as_pair, args, is_leaf=_is_pair)
    elif name not in _APPLIED_TO_PARTS:
        raise UnsupportedError(_NO_FORM, "Write it with real and imaginary parts.")
    if kwargs.get("dtype") is not None:
        kwargs["dtype"] = kwargs["dtype"].to_real()
    both = []
    for part in operator.attrgetter("real"), operator.attrgetter("imag"):
        both.append(target(*pytree.tree_map_only(Pair, part, args, is_leaf=_is_pair), **kwargs))
    return pytree.tree_map(Pair, *both)


def _fill(name: str, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Computes ``zeros``, ``ones_like``, ``new_full`` and so on."""
    if name.endswith("_like") or name.startswith("new_"):
        like = args[0].real
        size, rest = (like.shape, args[1:]) if name.endswith("_like") else (args[1], args[2:])
        dtype = dtype or like.dtype.to_complex()
    else:
        size, rest = args[0], args[1:]
    dtype = dtype or torch.get_default_dtype().to_complex()
    number = complex(rest[0]) if "full" in name else complex("ones" in name)
    real = torch.full(size, number.real, dtype=dtype.to_real())
    return Pair(real, torch.full_like(real, number.imag)) if dtype.is_complex else real


_NO_FORM = "it has no form for complex numbers in ONNX"
# Operators that are linear in two arguments; the arguments are tensors, or a formula and tensors.
_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "outer", "linear", "einsum", "conv1d", "conv2d", "conv3d", "inner")
# Operators that are linear in all their tensors together.
_LINEAR_IN_ALL = ("cat", "stack", "copy", "concat", "slice_scatter", "select_scatter", "diagonal_scatter")
# Operators that move, select or sum elements.
_APPLIED_TO_PARTS = frozenset(
    {
        *("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "unsqueeze", "squeeze"),
        *("permute", "transpose", "t", "mT", "numpy_T", "swapaxes", "moveaxis", "movedim", "flip", "roll", "expand"),
        *("select", "slice", "narrow", "index", "index_select", "gather", "diagonal", "unfold", "embedding", "tril"),
        *("split", "split_with_sizes", "chunk", "unbind", "repeat", "tile", "repeat_interleave", "triu"),
        *("sum", "mean", "cumsum", "diff", "neg", "positive", "zero"),
        *("clone", "contiguous", "detach", "alias", "lift_fresh", "lift_fresh_copy", "resolve_conj", "resolve_neg"),
    }
)


def _product(multiply: Callable[..., torch.Tensor], *args: Any) -> Pair:
    """Multiplies by an operator that is linear in both of its tensors."""
    if args and isinstance(args[0], str):
        formula, operands = args[0], args[1]
        if len(operands) != 2:
            raise UnsupportedError(_NO_FORM, "Write it for two tensors at a time.")
        return _product(lambda x, y: multiply(formula, [x, y]), *operands)
    (x, y), rest = args[:2], args[2:]
    if any(_is_pair(argument) for argument in rest):
        raise UnsupportedError("it has no form for a complex bias in ONNX", "Add the bias in a separate line.")
    if not _is_pair(x):
        return Pair(multiply(x, y.real, *rest), multiply(x, y.imag, *rest))
    if not _is_pair(y):
        return Pair(multiply(x.real, y, *rest), multiply(x.imag, y, *rest))
    return Pair(
        multiply(x.real, y.real, *rest) - multiply(x.imag, y.imag, *rest),
        multiply(x.real, y.imag, *rest) + multiply(x.imag, y.real, *rest),
    )


def _multiply(x: Any, y: Any) -> Pair:
    """Multiplies two numbers; one may be a Python number."""
    x, y = (y, x) if isinstance(x, complex) else (x, y)
    return _product(torch.mul, x, Pair(*_parts(y)) if isinstance(y, complex) else y)


def _divide(x: Any, y: Any) -> Pair:
    if _makes_complex(y):
        return _multiply(x, 1 / y)
    if not _is_pair(y):
        return Pair(x.real / y, x.imag / y)
    return _multiply(x, _reciprocal(y))


def _reciprocal(x: Pair) -> Pair:
    """Scales by the larger part first, because squares of large numbers overflow."""
    scale = torch.maximum(x.real.abs(), x.imag.abs())
    real, imag = x.real / scale, x.imag / scale
    square = real * real + imag * imag
    return Pair(real / square / scale, -imag / square / scale)


def _abs(x: Pair) -> torch.Tensor:
    return hypot(x.real, x.imag)


def _angle(x: Pair) -> torch.Tensor:
    return torch.atan2(x.imag, x.real)


def _polar(length: torch.Tensor, angle: torch.Tensor) -> Pair:
    return Pair(length * torch.cos(angle), length * torch.sin(angle))


def _log(x: Pair) -> Pair:
    return Pair(torch.log(_abs(x)), _angle(x))


def _power(x: Any, exponent: Any) -> Pair:
    """Multiplies for small whole exponents, and else uses the logarithm; 0 to a positive power is 0."""
    if isinstance(exponent, int | float) and exponent in range(1, 9) and _is_pair(x):
        power: Pair = functools.reduce(_multiply, [x] * int(exponent))
        return power
    if _is_pair(x) and not _is_pair(exponent) and not _makes_complex(exponent):
        return _polar(_abs(x) ** exponent, _angle(x) * exponent)
    x = _as_pair(x, exponent)
    is_zero = (x.real == 0) & (x.imag == 0) & (exponent.real > 0)
    return _where(is_zero, 0, _exp(_multiply(_log(x), exponent)))


def _exp(x: Pair) -> Pair:
    return _polar(torch.exp(x.real), x.imag)


def _sign(x: Pair) -> Pair:
    length = _abs(x)
    divisor = torch.where(length > 0, length, torch.ones((), dtype=length.dtype))
    return Pair(x.real / divisor, x.imag / divisor)


def _by_parts(function: Callable[[Any, Any], torch.Tensor], x: Any, y: Any) -> Pair:
    """Applies a function to the real parts and to the imaginary parts of two numbers."""
    x, y = _as_pair(x, y), _as_pair(y, x)
    return Pair(function(x.real, y.real), function(x.imag, y.imag))


def _where(condition: torch.Tensor, x: Any, y: Any) -> Pair:
    return _by_parts(lambda real, imag: torch.where(condition, real, imag), x, y)


def _scatter(scatter: Any, x: Any, dim: int, index: torch.Tensor, source: Any, **kw: Any) -> Pair:
    return _by_parts(lambda part, values: scatter(part, dim, index, values, **kw), x, source)


def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Pair:
    return _by_parts(lambda part, value: aten.index_put(part, indices, value, accumulate), x, values)


def _convert(x: Any, *args: Any, **kw: Any) -> Any:
    """Converts to another dtype, or to the dtype of another tensor; a real dtype drops the imaginary part."""
    dtypes = (_dtype(value) for value in (*args, *kw.values()))
    dtype = next((dtype for dtype in dtypes if dtype is not None), None)
    if dtype is None:
        return x
    if dtype is torch.bool:
        return (x.real != 0) | (x.imag != 0)
    if not dtype.is_complex:
        return x.real.to(dtype)
    return Pair(*(part.to(dtype.to_real()) for part in _parts(x if _is_pair(x) else Pair(x, torch.zeros_like(x)))))


def _dtype(value: Any) -> torch.dtype | None:
    if _is_pair(value):
        return value.real.dtype.to_complex()  # type: ignore[no-any-return]
    return value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)


def _add(x: Any, y: Any, alpha: float = 1) -> Pair:
    return _by_parts(lambda first, second: first + second * alpha, x, y)


def _pad(x: Pair, size: Any, value: Any, mode: str = "constant") -> Pair:
    if mode != "constant":
        return Pair(*(functional.pad(part, size, mode) for part in _parts(x)))
    parts = zip(_parts(x), _parts(value or 0), strict=True)
    return Pair(*(functional.pad(part, size, value=number) for part, number in parts))


def _norm(x: Pair, *args: Any, **kw: Any) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(_abs(x), *args, **kw)
    return norm


def _equal(x: Any, y: Any) -> torch.Tensor:
    x, y = _as_pair(x, y), _as_pair(y, x)
    equal: torch.Tensor = (x.real == y.real) & (x.imag == y.imag)
    return equal


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "complex": lambda real, imag: Pair(*torch.broadcast_tensors(real, imag)),
    "polar": _polar,
    "view_as_complex": lambda x: Pair(x.select(-1, 0), x.select(-1, 1)),
    "view_as_real": lambda x: torch.stack([x.real, x.imag], -1),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    **dict.fromkeys(("conj", "_conj", "conj_physical", "_conj_physical"), lambda x: Pair(x.real, -x.imag)),
    "_neg_view": lambda x: Pair(-x.real, -x.imag),
    "mul": _multiply,
    "multiply": _multiply,
    "div": _divide,
    "true_divide": _divide,
    "reciprocal": _reciprocal,
    "abs": _abs,
    "angle": _angle,
    "exp": _exp,
    "log": _log,
    "sqrt": lambda x: _polar(_abs(x).sqrt(), _angle(x) / 2),
    "square": lambda x: _multiply(x, x),
    "pow": _power,
    "sgn": _sign,
    "where": _where,
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "index_add": lambda *a, **kw: _scatter(aten.index_add, *a, **kw),
    "scatter_add": lambda *a: _scatter(aten.scatter_add, *a),
    "index_put": _index_put,
    "eq": _equal,
    "ne": lambda x, y: ~_equal(x, y),
    "isnan": lambda x: x.real.isnan() | x.imag.isnan(),
    "isfinite": lambda x: x.real.isfinite() & x.imag.isfinite(),
    "isinf": lambda x: x.real.isinf() | x.imag.isinf(),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _convert),
    "linalg_vector_norm": _norm,
    "sym_size": lambda x, axis: x.real.shape[axis],
    "add": _add,
    "sub": lambda x, y, alpha=1: _add(x, y, -alpha),
    "rsub": lambda x, y: _add(y, x, -1),
    "pad": lambda x, size, mode="constant", value=None: _pad(x, size, value, mode),
    "constant_pad_nd": lambda x, size, value=0: _pad(x, size, value),
    "expand_as": lambda x, y: Pair(*(part.expand(y.real.shape) for part in _parts(x))),
    "vdot": lambda x, y: _product(torch.dot, Pair(x.real, -x.imag), y),
    "_assert_tensor_metadata": lambda *a, **kw: None,
}


def _as_pair(value: Any, like: Any) -> Pair:
    """Converts a tensor or a number to a pair; whole and Python numbers get the dtype of the other operand."""
    if _is_pair(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return Pair(value, torch.zeros_like(value))
    dtype = _dtype(like)
    dtype = (
        torch.get_default_dtype() if dtype is None else torch.promote_types(dtype, torch.get_default_dtype()).to_real()
    )
    if isinstance(value, torch.Tensor):
        return Pair(value.to(dtype), torch.zeros_like(value, dtype=dtype))
    return Pair(*(torch.full((), part, dtype=dtype) for part in _parts(value)))


def _parts(value: Any) -> tuple[Any, Any]:
    return (value.real, value.imag) if _is_pair(value) or isinstance(value, complex) else (value, 0)


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=_is_pair)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Pair)


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _makes_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, torch.dtype) and value.is_complex)
