"""Models in float64, either as a full copy or with large weights upcast on use."""

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

# Parameters smaller than this many bytes are copied.
_LARGE_PARAMETER = 1 << 20


def copy_to_float64(model: nn.Module) -> nn.Module:
    """Returns a copy of a model in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates the way it copies its output pytrees
        return copy.deepcopy(model).double()


def copy_upcasting_weights(model: nn.Module) -> nn.Module:
    """Returns a float64 copy of a model that shares the large weights and upcasts them on use.

    Its outputs equal the outputs of `copy_to_float64`, up to float64 rounding, unless the model writes to a weight. An
    operation that needs a copied weight raises at run time. Code that bypasses ``__torch_function__`` reads NaN.

    Raises:
        RuntimeError: A submodule is TorchScript, whose weights cannot be replaced.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RuntimeError("a part of the model is TorchScript")
    replacements: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_shared(tensor):  # keyed by id, so that references in lists are replaced too
            replacements[id(tensor)] = _Weight(tensor)
        elif type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            # Copied one by one, because a copy of a view copies its whole storage, which is all weights of a mapped
            # file.
            copied = _copy_in_float64(tensor)
            replacements[id(tensor)] = (
                nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        double = copy.deepcopy(model, dict(replacements))
        weights = [
            (module, name, weight)
            for module in double.modules()
            for name, weight in module._parameters.items()
            if isinstance(weight, _Weight)
        ]
        for module, name, _ in weights:  # double() would upcast them permanently, although they act as float64
            module._parameters[name] = None
        double.double()
    for module, name, weight in weights:
        setattr(module, name, weight)
    return double


class _Float32AsFloat64(TorchFunctionMode):
    """Mode that replaces float32 by float64, for example in masks created with ``.float()``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        new_args, new_kwargs = pytree.tree_map(_replace_float32, (tuple(args), dict(kwargs or {})))
        return (_T.double if func is _T.float else func)(*new_args, **new_kwargs)


def _replace_float32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Replaces float32 by float64 within the context, also as the default dtype."""
    before = torch.get_default_dtype()
    if before is torch.float32:
        torch.set_default_dtype(torch.float64)
    try:
        with _Float32AsFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


class Float32Detector(TorchDispatchMode):
    """Mode that records if any operation returns float32.

    Attributes:
        detected: True if an operation returned a float32 tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.detected = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        values = pytree.tree_leaves(result)
        self.detected |= any(isinstance(value, torch.Tensor) and value.dtype is torch.float32 for value in values)
        return result


def is_shared(tensor: torch.Tensor) -> bool:
    """Returns True if `copy_upcasting_weights` shares a tensor instead of copying it."""
    plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and tensor.nbytes >= _LARGE_PARAMETER and not tensor.is_meta


def weight_versions(model: nn.Module) -> list[int] | None:
    """Returns the version counter of each parameter; one changes if a parameter is written to.

    Returns:
        None if a parameter is an inference tensor, which has no counter.
    """
    parameters = list(model.parameters())
    return None if any(parameter.is_inference() for parameter in parameters) else [p._version for p in parameters]


def _copy_in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


_T = torch.Tensor
# Attributes that need no values. Everything else computes with the upcast weight.
_METADATA: frozenset[Any] = frozenset(
    getattr(attribute, "__get__", attribute)
    for attribute in (
        *(_T.dtype, _T.shape, _T.ndim, _T.layout, _T.requires_grad, _T.grad_fn, _T.grad, _T.is_leaf),
        *(_T.is_quantized, _T.is_sparse, _T.is_nested, _T.is_mkldnn, _T.itemsize),
        *(_T.device, _T.is_cpu, _T.is_cuda, _T.is_meta),
        *(_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.element_size, _T.__len__),
    )
)
# Functions that expose the memory, which could then be written to.
_MEMORY_ACCESS: frozenset[Any] = frozenset(
    (_T.data.__get__, _T.data.__set__, _T.set_, _T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage)  # type: ignore[attr-defined]
)


class _Weight(torch.Tensor):
    """Float64 parameter stored in another precision; code that bypasses it reads NaN."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> _Weight:
        nan = torch.full((), math.nan, dtype=torch.float64, device=stored.device).expand(stored.shape)
        weight = torch.Tensor._make_subclass(cls, nan, stored.requires_grad)
        weight.stored = stored.detach()
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
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _MEMORY_ACCESS:
            raise RuntimeError("the memory of a weight that is stored in another precision cannot be accessed")
        new_args, new_kwargs = pytree.tree_map(_upcast, (tuple(args), dict(kwargs or {})))
        return func(*new_args, **new_kwargs)


def _upcast(value: Any) -> Any:
    return value.stored.double() if type(value) is _Weight else value
