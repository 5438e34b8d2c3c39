"""Computes values that do not depend on inputs while a model is traced.

``torch.export`` knows no values of tensors, and cannot trace a model that reads a number from a buffer, or image
sizes from an input. The buffer has the same value in every call. The input may become a constant.
The zoo's video_llama_3_vision needs this (tests/zoo/rescues.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from optexport._utils.tensors import outside_of_traces
from optexport._utils.writes import overwritten
from optexport.errors import ValuesAskedError

# Values of larger tensors are not tracked; they do not decide sizes.
_MAX_ELEMENTS = 4096
_READS = frozenset(
    {
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__contains__, torch.equal, torch.is_nonzero),
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
    }
)
# These create tensors from Python values.
_FACTORIES = frozenset({torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.eye})
# The sizes of their results are values of their arguments.
_SIZED_BY_VALUES = frozenset(
    {
        *(torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere),
        *(torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive),
        *(torch.masked_select, torch.Tensor.masked_select, torch.bincount, torch.Tensor.bincount),
        *(torch.repeat_interleave, torch.Tensor.repeat_interleave),
    }
)
# These accept tensors as sizes.
_SIZED_BY_TENSORS = frozenset(
    {
        *(torch.nn.functional.interpolate, torch.nn.functional.pad, torch.split, torch.Tensor.split),
        *(torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace),
        *(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand, torch.Tensor.new_zeros),
        *(torch.Tensor.repeat, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.__getitem__),
    }
)


@dataclass(frozen=True)
class _Value:
    """The values of a tensor.

    Attributes:
        version: The tensor's version counter when it had these values; writing increments it.
        inputs: The inputs that the values depend on.
    """

    values: torch.Tensor
    version: int
    inputs: frozenset[str] = frozenset()


class KnownValues(TorchFunctionMode):
    """Answers a traced model's reads of values that do not depend on inputs.

    Args:
        inputs: The inputs, by argument, whose use is to be reported if the model reads their values.
        changing: Buffers and tensor attributes whose values change between calls.

    Attributes:
        changing: The same, and those that the last call wrote to.

    Raises:
        ValuesAskedError: The model reads values that depend on ``inputs``.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], changing: Collection[str] = ()) -> None:
        super().__init__()
        self._inputs = inputs
        self.changing = frozenset(changing)
        self._known: Any = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def track(self, model: nn.Module) -> Iterator[None]:
        """Enters this mode for every call of the model that is traced within the block."""
        buffers = {name: buffer.detach().clone() for name, buffer in _state(model).items() if _is_small(buffer)}
        state_before: dict[str, torch.Tensor] = {}
        depth = torch._C._len_torch_function_stack()

        def enter(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_exporting():
                return
            self._known = WeakIdKeyDictionary()
            state_before.update({name: buffer for name, buffer in _state(module).items() if name in buffers})
            with outside_of_traces():
                for name, buffer in state_before.items():
                    is_known = name not in self.changing
                    self._known[buffer] = _Value(buffers[name].clone(), buffer._version) if is_known else None
                for name, value in kwargs.items():
                    if isinstance(value, torch.Tensor) and name in self._inputs:
                        inputs = frozenset({name})
                        self._known[value] = _Value(self._inputs[name].clone(), value._version, inputs)
            self.__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, *_: Any) -> None:
            if torch.compiler.is_exporting():
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                state = _state(module)
                self.changing |= {
                    name
                    for name, buffer in state_before.items()
                    if state.get(name) is not buffer or not self._look_up(buffer)
                }

        hooks = [
            model.register_forward_pre_hook(enter, with_kwargs=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            while torch._C._len_torch_function_stack() > depth:  # an interrupted call does not run its hook
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIZED_BY_TENSORS:
            args, kwargs = self._with_sizes(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [self._look_up(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if targets := overwritten(func, args, kwargs):  # the new values may be unknown, or the target a buffer
            self._forget(targets)
            return func(*args, **kwargs)
        computed = None
        if _is_determined(func, leaves) and (tensors or func in _FACTORIES) and None not in tensors:
            computed = self._compute(func, args, kwargs)
        if computed is None:
            return func(*args, **kwargs)
        inputs = frozenset[str]().union(*(value.inputs for value in tensors if value is not None))
        if func in _READS:
            _check_read(inputs)
            return computed
        if func in _SIZED_BY_VALUES or (func is torch.Tensor.__getitem__ and _has_mask(args[1])):
            _check_read(inputs)
            with outside_of_traces():
                result = pytree.tree_map_only(torch.Tensor, torch.clone, computed)
        else:
            result = func(*args, **kwargs)
        self._remember(result, computed, inputs)
        return result

    def _look_up(self, tensor: torch.Tensor) -> _Value | None:
        value: _Value | None = self._known.get(tensor)
        is_new = tensor not in self._known
        if is_new and type(tensor) is torch.Tensor and _is_small(tensor) and not _is_traced(tensor):
            with outside_of_traces():
                value = self._known[tensor] = _Value(tensor.detach().clone(), tensor._version)
        return value if value is not None and value.version == tensor._version else None

    def _with_sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Replaces known tensors that stand for sizes by numbers."""

        def as_size(value: Any) -> Any:
            if isinstance(value, slice):
                return slice(*map(as_size, (value.start, value.stop, value.step)))
            if isinstance(value, tuple | list):
                return type(value)(map(as_size, value)) if type(value) in (tuple, list) else value
            size = self._look_up(value) if isinstance(value, torch.Tensor) and not value.dim() else None
            if size is None or size.values.dtype.is_floating_point or size.values.dtype.is_complex:
                return value
            _check_read(size.inputs)
            return size.values.item()

        first = () if func in _FACTORIES else args[:1]
        return (*first, *map(as_size, args[len(first) :])), {name: as_size(v) for name, v in kwargs.items()}

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Computes a function of known values; None if it fails, is random or returns much."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: self._known[tensor].values, (args, kwargs))
        with outside_of_traces(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                computed = func(*args, **kwargs)
            except Exception:  # the traced call raises it again
                return None
            if not torch.equal(torch.get_rng_state(), before):  # a Python function that is random
                return None
        tensors = [leaf for leaf in pytree.tree_leaves(computed) if isinstance(leaf, torch.Tensor)]
        return computed if all(map(_is_small, tensors)) else None

    def _remember(self, result: Any, computed: Any, inputs: frozenset[str]) -> None:
        traced, values = pytree.tree_leaves(result), pytree.tree_leaves(computed)
        for leaf, value in zip(traced, values, strict=len(traced) == len(values)):
            if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
                self._known[leaf] = _Value(value, leaf._version, inputs)

    def _forget(self, targets: Sequence[torch.Tensor]) -> None:
        """Removes the values of overwritten tensors, and of all tensors that share their memory."""
        for tensor in targets:
            if (value := self._known.get(tensor)) is not None:
                storage = value.values.untyped_storage().data_ptr()
                for alias, values in list(self._known.items()):
                    if values is not None and values.values.untyped_storage().data_ptr() == storage:
                        self._known[alias] = None
            self._known[tensor] = None


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's buffers and the tensors in attributes of its modules, by name."""
    attributes = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {**attributes, **dict(model.named_buffers())}


def _check_read(inputs: frozenset[str]) -> None:
    if inputs:
        raise ValuesAskedError(inputs)


def _has_mask(index: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in pytree.tree_leaves(index))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= _MAX_ELEMENTS


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or torch._is_functional_tensor(tensor)


def _is_determined(func: Callable[..., Any], leaves: Collection[Any]) -> bool:
    """Returns True if a function gives the same result in every call, at all input sizes."""
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return False
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return True
    return not any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads())
