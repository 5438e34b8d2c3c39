"""Values that hang on no input but those that are held to what they are: known while a model is traced.

``torch.export`` knows no values. A model that asks a buffer for a number, or an input for the sizes of the images,
cannot be traced, though the former is the same in every call, and the latter may be the same in all that are to come.
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
from optexport.errors import ValuesAskedError

# Larger tensors decide no sizes.
_MOST_NUMBERS = 4096
_READS = frozenset(
    {
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__contains__, torch.equal, torch.is_nonzero),
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
    }
)
# What makes tensors of values alone.
_FACTORIES = frozenset({torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.eye})
# The sizes of what these give are values of what they are given.
_SIZED_BY_VALUES = frozenset(
    {
        *(torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere),
        *(torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive),
        *(torch.masked_select, torch.Tensor.masked_select, torch.bincount, torch.Tensor.bincount),
        *(torch.repeat_interleave, torch.Tensor.repeat_interleave),
    }
)
# These take tensors for sizes.
_SIZED_BY_TENSORS = frozenset(
    {
        *(torch.nn.functional.interpolate, torch.nn.functional.pad, torch.split, torch.Tensor.split),
        *(torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace),
        *(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand, torch.Tensor.new_zeros),
        *(torch.Tensor.repeat, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.__getitem__),
    }
)
# These write to arguments other than the first, while they train: whether they do is the sixth, and if it is left out.
_WRITING_STATISTICS = {torch.nn.functional.batch_norm: False, torch.nn.functional.instance_norm: True}


@dataclass(frozen=True)
class _Known:
    """A tensor's values, and the inputs that they hang on.

    Attributes:
        version: How many times the tensor, or what shares its memory, had been written to when these were its values.
    """

    values: torch.Tensor
    version: int
    inputs: frozenset[str] = frozenset()


class KnownValues(TorchFunctionMode):
    """Gives a model that asks for values while it is traced those that hang on none of its inputs.

    Args:
        inputs: Those whose values, where they are asked for, are to be told, by argument.
        changing: Buffers, and tensors that are attributes, which are other ones in the next call.

    Attributes:
        changing: The same, with those that the last call wrote to.

    Raises:
        ValuesAskedError: The model asks for the values of some of these.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], changing: Collection[str] = ()) -> None:
        super().__init__()
        self._inputs = inputs
        self.changing = frozenset(changing)
        self._known: Any = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within it, every call of the model that is traced is made in this mode."""
        buffers = {name: buffer.detach().clone() for name, buffer in _kept(model).items() if _is_small(buffer)}
        entered: dict[str, torch.Tensor] = {}
        outside = torch._C._len_torch_function_stack()

        def enter(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_exporting():
                return
            self._known = WeakIdKeyDictionary()
            entered.update({name: buffer for name, buffer in _kept(module).items() if name in buffers})
            with outside_of_traces():
                for name, buffer in entered.items():
                    is_known = name not in self.changing
                    self._known[buffer] = _Known(buffers[name].clone(), buffer._version) if is_known else None
                for name, value in kwargs.items():
                    if isinstance(value, torch.Tensor) and name in self._inputs:
                        inputs = frozenset({name})
                        self._known[value] = _Known(self._inputs[name].clone(), value._version, inputs)
            self.__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, *_: Any) -> None:
            if torch.compiler.is_exporting():
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                left = _kept(module)
                is_kept = {name: left.get(name) is buffer and self._look_up(buffer) for name, buffer in entered.items()}
                self.changing |= {name for name, is_so in is_kept.items() if not is_so}

        hooks = [
            model.register_forward_pre_hook(enter, with_kwargs=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            while torch._C._len_torch_function_stack() > outside:  # no hook is called where a call was interrupted
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIZED_BY_TENSORS:
            args, kwargs = self._with_sizes(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [self._look_up(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if changed := overwritten(func, args, kwargs):  # with what is not known, or a buffer that lives on
            self._forget(changed)
            return func(*args, **kwargs)
        computed = None
        if _is_determined(func, leaves) and (tensors or func in _FACTORIES) and None not in tensors:
            computed = self._compute(func, args, kwargs)
        if computed is None:
            return func(*args, **kwargs)
        inputs = frozenset[str]().union(*(known.inputs for known in tensors if known is not None))
        if func in _READS:
            _tell(inputs)
            return computed
        if func in _SIZED_BY_VALUES or (func is torch.Tensor.__getitem__ and _has_mask(args[1])):
            _tell(inputs)
            with outside_of_traces():
                result = pytree.tree_map_only(torch.Tensor, torch.clone, computed)
        else:
            result = func(*args, **kwargs)
        self._remember(result, computed, inputs)
        return result

    def _look_up(self, tensor: torch.Tensor) -> _Known | None:
        known: _Known | None = self._known.get(tensor)
        is_new = tensor not in self._known
        if is_new and type(tensor) is torch.Tensor and _is_small(tensor) and not _is_traced(tensor):
            with outside_of_traces():
                known = self._known[tensor] = _Known(tensor.detach().clone(), tensor._version)
        return known if known is not None and known.version == tensor._version else None

    def _with_sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Arguments with numbers in the place of known tensors that stand for sizes."""

        def as_size(value: Any) -> Any:
            if isinstance(value, slice):
                return slice(*map(as_size, (value.start, value.stop, value.step)))
            if isinstance(value, tuple | list):
                return type(value)(map(as_size, value)) if type(value) in (tuple, list) else value
            known = self._look_up(value) if isinstance(value, torch.Tensor) and not value.dim() else None
            if known is None or known.values.dtype.is_floating_point or known.values.dtype.is_complex:
                return value
            _tell(known.inputs)
            return known.values.item()

        first = () if func in _FACTORIES else args[:1]
        return (*first, *map(as_size, args[len(first) :])), {name: as_size(v) for name, v in kwargs.items()}

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives of the values themselves; None where that is more than what may decide a size."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: self._known[tensor].values, (args, kwargs))
        with outside_of_traces(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                computed = func(*args, **kwargs)
            except Exception:  # as the function itself will say
                return None
            if not torch.equal(torch.get_rng_state(), before):  # a function of Python that draws numbers
                return None
        found = [leaf for leaf in pytree.tree_leaves(computed) if isinstance(leaf, torch.Tensor)]
        return computed if all(map(_is_small, found)) else None

    def _remember(self, result: Any, computed: Any, inputs: frozenset[str]) -> None:
        traced, values = pytree.tree_leaves(result), pytree.tree_leaves(computed)
        for leaf, value in zip(traced, values, strict=len(traced) == len(values)):
            if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
                self._known[leaf] = _Known(value, leaf._version, inputs)

    def _forget(self, changed: Sequence[torch.Tensor]) -> None:
        """Forgets tensors that are overwritten, and all that share their memory."""
        for tensor in changed:
            if (known := self._known.get(tensor)) is not None:
                storage = known.values.untyped_storage().data_ptr()
                for other, values in list(self._known.items()):
                    if values is not None and values.values.untyped_storage().data_ptr() == storage:
                        self._known[other] = None
            self._known[tensor] = None


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's buffers, and the tensors that are plain attributes of its modules, by name."""
    plain = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return {**plain, **dict(model.named_buffers())}


def _tell(inputs: frozenset[str]) -> None:
    if inputs:
        raise ValuesAskedError(inputs)


def _has_mask(index: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in pytree.tree_leaves(index))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= _MOST_NUMBERS


def _is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or torch._is_functional_tensor(tensor)


def _is_determined(func: Callable[..., Any], leaves: Collection[Any]) -> bool:
    """Whether the same values give the same result in every call, at all sizes of the inputs."""
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return False
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return True
    return not any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads())


def overwritten(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function writes to, going by its name: its first argument, or what it is given as ``out``."""
    name = getattr(func, "__name__", "").partition(".")[0]  # of add_.Tensor
    changed = [kwargs.get("out")]
    if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
        changed += args[:1]
    elif func in _WRITING_STATISTICS:
        is_training = [*args[5:6], *(kwargs[key] for key in ("training", "use_input_stats") if key in kwargs)]
        if any(is_training or [_WRITING_STATISTICS[func]]):
            changed += [*args, *kwargs.values()]
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, torch.Tensor)]
