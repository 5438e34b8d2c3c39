"""A model in float64, of which the large weights are not: each is made float64 where it is used, and let go again."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Parameters of fewer bytes are copied.
_LARGE_PARAMETER = 1 << 20


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its output trees
        return copy.deepcopy(model).double()


def upcasting(model: nn.Module) -> nn.Module:
    """A copy of a model in float64 that holds its large weights as they are, and shares them with the model.

    It computes what `copied` does, to the rounding of float64, as long as the model writes into no weight. What cannot
    be done without a copy raises as it runs; code that does not go by ``__torch_function__`` finds NaN.

    Raises:
        RuntimeError: A part of it is TorchScript, whose weights nothing can stand in for.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RuntimeError("a part of the model is TorchScript")
    kept: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_shared(tensor):  # wherever the model refers to it, in a list too
            kept[id(tensor)] = _Weight(tensor)
        elif type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            # One by one, since a copy of a tensor copies all that lies in its memory: of a mapped file, all weights.
            made = _in_double(tensor)
            kept[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        double = copy.deepcopy(model, dict(kept))
        weights = [
            (module, name, weight)
            for module in double.modules()
            for name, weight in module._parameters.items()
            if isinstance(weight, _Weight)
        ]
        for module, name, _ in weights:  # which are float64 already, and would be made so for good
            module._parameters[name] = None
        double.double()
    for module, name, weight in weights:
        setattr(module, name, weight)
    return double


class _FloatIsDouble(TorchFunctionMode):
    """Within it, code that asks for float32 is given float64, as a mask is that is made with ``.float()``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, named = pytree.tree_map(_double_for_float, (tuple(args), dict(kwargs or {})))
        return (_T.double if func is _T.float else func)(*given, **named)


def _double_for_float(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Within it, code that asks for float32 is given float64, and so is what asks for no dtype of floating point."""
    before = torch.get_default_dtype()
    if before is torch.float32:
        torch.set_default_dtype(torch.float64)
    try:
        with _FloatIsDouble():
            yield
    finally:
        torch.set_default_dtype(before)


class NotesFloat32(TorchDispatchMode):
    """Notes whether anything is computed in float32 within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = pytree.tree_leaves(result)
        self.found |= any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in made)
        return result


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether `upcasting` holds a tensor in its own precision."""
    plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and tensor.nbytes >= _LARGE_PARAMETER and not tensor.is_meta


def versions(model: nn.Module) -> list[int] | None:
    """Numbers of which one changes where a weight is written to; None where nobody counts."""
    parameters = list(model.parameters())
    return None if any(parameter.is_inference() for parameter in parameters) else [p._version for p in parameters]


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


_T = torch.Tensor
# What a weight tells without its numbers. Anything else computes with these.
_DESCRIPTIONS: frozenset[Any] = frozenset(
    getattr(attribute, "__get__", attribute)
    for attribute in (
        *(_T.dtype, _T.shape, _T.ndim, _T.layout, _T.requires_grad, _T.grad_fn, _T.grad, _T.is_leaf),
        *(_T.is_quantized, _T.is_sparse, _T.is_nested, _T.is_mkldnn, _T.itemsize),
        *(_T.device, _T.is_cpu, _T.is_cuda, _T.is_meta),
        *(_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.element_size, _T.__len__),
    )
)
# What gives its memory away, which could then be written to.
_DOORS: frozenset[Any] = frozenset(
    (_T.data.__get__, _T.data.__set__, _T.set_, _T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage)  # type: ignore[attr-defined]
)


class _Weight(torch.Tensor):
    """A parameter of float64 that holds its numbers in another precision. To code that passes it by they are NaN."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _Weight:
        nothing = torch.full((), math.nan, dtype=torch.float64, device=held.device).expand(held.shape)
        weight = torch.Tensor._make_subclass(cls, nothing, held.requires_grad)
        weight.held = held.detach()
        weight._is_param = True  # for isinstance(weight, nn.Parameter)
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _DOORS:
            raise RuntimeError("the memory of a weight is asked for that is held in another precision")
        given, named = pytree.tree_map(_upcast, (tuple(args), dict(kwargs or {})))
        return func(*given, **named)


def _upcast(value: Any) -> Any:
    return value.held.double() if type(value) is _Weight else value
