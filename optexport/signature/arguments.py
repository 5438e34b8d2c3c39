"""Maps nested call arguments of a model to flat tensor names and constants.

``forward(x, states=(h, c), features={"pitch": p}, reverse=False)`` takes the tensors ``x``, ``states.0``, ``states.1``
and ``features.pitch``. All other code uses flat names only; constants are part of the exported graph.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optexport._utils.tensors import outside_of_traces
from optexport.errors import ConfigError
from optexport.signature.signature import as_argument, call_signature, path_name, unused

Constant = bool | int | float | str | torch.Tensor


@dataclass(frozen=True)
class Arguments:
    """Arguments of a model, with a name in place of each tensor.

    Attributes:
        leaves: Flattened arguments; each leaf is the name of a tensor, or a constant.
        spec: Structure of the leaves: a tuple of positional arguments and a dict of keyword arguments.
        constants: Fixed values by name, without None, which usually stands for an omitted argument.
    """

    leaves: tuple[_Slot | Constant | None, ...]
    spec: pytree.TreeSpec
    constants: Mapping[str, Constant]

    def fill(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments with tensors in their places.

        Args:
            tensors: Tensors by the names that `as_argument` returns.
        """
        leaves = [tensors[leaf.argument] if isinstance(leaf, _Slot) else _copied(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in their order."""
        return [leaf.name for leaf in self.leaves if isinstance(leaf, _Slot)]


def _copied(constant: Constant | None) -> Constant | None:
    """Returns a copy of a constant, because a model may write to its arguments."""
    if not isinstance(constant, torch.Tensor):
        return constant
    with outside_of_traces():
        return constant.clone()


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor."""

    name: str

    @property
    def argument(self) -> str:
        return as_argument(self.name)


def flat_inputs(model: nn.Module, inputs: Any) -> tuple[dict[str, torch.Tensor], Arguments | None]:
    """Returns the tensors in a model's arguments by flat names, and their places.

    Args:
        inputs: Arguments by name, a tuple of them in order, or a single tensor. Dicts, lists and tuples may be nested.

    Returns:
        The tensors, and their places. The places are None if the model accepts the tensors by these names directly.

    Raises:
        ConfigError: The arguments contain no tensors, are too many, or contain a value of another type.
    """
    signature = call_signature(model)
    parameters = signature.parameters
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        if kwargs and set(kwargs) <= set(named):
            return kwargs, None
        if args and len(args) <= len(named) == len(parameters):
            return dict(zip(named, args, strict=False)), None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{_model_name(model)} cannot be called with these inputs: {error}",
            location="inputs",
            hint=f"Pass its arguments: {', '.join(str(p) for p in parameters.values())}.",
        ) from error
    return _flattened(bound, parameters)


def _flattened(
    bound: inspect.BoundArguments, parameters: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, torch.Tensor], Arguments]:
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():  # arguments in **kwargs already have names
        named |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    leaves, _ = pytree.tree_flatten_with_path(named)
    names: list[str] = []
    for path, _ in leaves:
        names.append(unused_argument(path_name(path), names))
    tensors: dict[str, torch.Tensor] = {}
    slots: list[_Slot | Constant | None] = []
    constants: dict[str, Constant] = {}
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            tensors[name] = leaf
            slots.append(_Slot(name))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            slots.append(leaf)
            if leaf is not None:
                constants[name] = leaf
        else:
            raise ConfigError(
                f"neither a tensor nor a constant (found {type(leaf).__name__})",
                location=f"inputs: {name}",
                hint="Pass tensors, numbers, strings, or dicts, lists and tuples of them.",
            )
    if not tensors:
        raise ConfigError(
            "the inputs contain no tensor", location="inputs", hint=f"Pass tensors for {', '.join(parameters)}."
        )
    filled = pytree.tree_unflatten(slots, pytree.tree_structure(named))
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: filled[key] for key in value}
        else:
            bound.arguments[name] = filled[name]
    flat, spec = pytree.tree_flatten((bound.args, bound.kwargs))
    return tensors, Arguments(tuple(flat), spec, constants)


def as_constants(settings: Mapping[str, Any]) -> dict[str, Constant]:
    """Returns the constants of a config; lists become int64 or float32 tensors."""
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in settings.items()}


def unused_argument(name: str, taken: Iterable[str]) -> str:
    """Returns the name, with a number if it is taken, also as a Python argument."""
    arguments = {as_argument(other_name) for other_name in taken}
    return unused(name, arguments) if as_argument(name) in arguments else name


def nested(names: Iterable[str], constants: Mapping[str, Constant], parameters: Container[str]) -> dict[str, Any]:
    """Builds nested arguments from flat names.

    ``states.0`` is the first element of a tuple, and ``features.x`` is an entry of a dict.

    Returns:
        The arguments by name, with a placeholder for each tensor.

    Raises:
        ConfigError: Names do not fit together, such as ``states.0`` and ``states.2``, or ``x`` and ``x.0``.
    """
    tree: dict[str, Any] = {}
    for name in (*names, *constants):
        *path, last = [name] if name in parameters else name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise ConfigError("the name conflicts with another input", location=f"inputs: {name}")
        inner[last] = constants[name] if name in constants else _Slot(name)
    return {name: _as_sequences(value, name) for name, value in tree.items()}


def _as_sequences(value: Any, path: str) -> Any:
    """Replaces dicts with keys 0, 1, 2 by tuples."""
    if not isinstance(value, dict):
        return value
    items = {key: _as_sequences(inner, f"{path}.{key}") for key, inner in value.items()}
    if not all(key.isdecimal() for key in items):
        return items
    if sorted(map(int, items)) != list(range(len(items))):
        missing = next(index for index in range(len(items)) if str(index) not in items)
        raise ConfigError(f"{path}.{missing} is missing", location=f"inputs: {path}")
    return tuple(items[key] for key in sorted(items, key=int))


def find_arguments(model: nn.Module, names: Sequence[str], constants: Mapping[str, Constant]) -> Arguments | None:
    """Finds the places of tensors and constants from their flat names.

    Returns:
        The places, or None if the model accepts the tensors by these names directly.

    Raises:
        ConfigError: Names do not fit together, or the model does not take them.
    """
    if not constants and all("." not in name for name in names):
        return None
    signature = call_signature(model)
    tree = nested(names, constants, signature.parameters)
    bound = inspect.BoundArguments(signature, OrderedDict())
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: value for key, value in tree.items() if key not in signature.parameters}
        elif name in tree:
            bound.arguments[name] = tree[name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(
                "the input is missing", location=f"inputs: {name}", hint=f"Add it: {_model_name(model)} requires it."
            )
    leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs))
    return Arguments(tuple(leaves), spec, constants)


def _model_name(model: nn.Module) -> str:
    return str(getattr(model, "original_name", type(model).__name__))


class _TakesTensors(nn.Module):
    """Mixin for a model's class that makes it take tensors by flat names."""

    _arguments: Arguments

    def forward(self, /, **tensors: torch.Tensor) -> Any:
        args, kwargs = self._arguments.fill(tensors)
        return super().forward(*args, **kwargs)


class _Calls(nn.Module):
    """Module that calls a model whose class cannot be combined with the mixin."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.model, self._arguments = model, arguments
        self.training = False

    def forward(self, /, **tensors: torch.Tensor) -> Any:
        args, kwargs = self._arguments.fill(tensors)
        return self.model(*args, **kwargs)


def plain(graph_module: fx.GraphModule, name: str = "GraphModule") -> nn.Module:
    """Returns a graph's code as an ordinary module that shares weights and submodules."""
    cls = type(name, (nn.Module,), {"forward": type(graph_module).forward})
    module: nn.Module = nn.Module.__new__(cls)
    module.__dict__.update({key: value for key, value in vars(graph_module).items() if key not in ("_graph", "_code")})
    return module


def take_flat_tensors(model: nn.Module, arguments: Arguments) -> nn.Module:
    """Returns the model as a module that takes only tensors, by flat names in Python's form.

    The module shares all parts of the model under the same paths. The model does not change.
    """
    if isinstance(model, fx.GraphModule):  # each copy of a GraphModule gets a new class
        model = plain(model)
    cls = type(model)
    takes_tensors = isinstance(vars(model).get("_arguments"), Arguments)
    if not takes_tensors and (isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model)):
        calls: nn.Module = _subclass(cls, (_Calls,), arguments)(model, arguments)
        return calls
    module = copy.copy(model)
    module.__class__ = _subclass(cls, (cls,) if takes_tensors else (_TakesTensors, cls), arguments)
    module.__dict__["_arguments"] = arguments
    return module


def fix_inputs(model: nn.Module, names: Sequence[str], fixed: Mapping[str, torch.Tensor]) -> nn.Module:
    """Returns the model with some input tensors fixed to values.

    Args:
        names: Names of all inputs.
        fixed: Fixed values by input name.
    """
    if not fixed:
        return model
    arguments = vars(model).get("_arguments")
    if not isinstance(arguments, Arguments):
        arguments = find_arguments(model, names, {})
    if arguments is None:
        arguments = find_arguments(model, [name for name in names if name not in fixed], fixed)
        assert arguments is not None  # not None, because fixed is not empty
        return take_flat_tensors(model, arguments)
    leaves = tuple(fixed.get(leaf.name, leaf) if isinstance(leaf, _Slot) else leaf for leaf in arguments.leaves)
    return take_flat_tensors(model, Arguments(leaves, arguments.spec, {**arguments.constants, **fixed}))


def find_fixed_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that are fixed in a model, by input name."""
    arguments = vars(model).get("_arguments")
    constants = arguments.constants if isinstance(arguments, Arguments) else {}
    return {name: value for name, value in constants.items() if isinstance(value, torch.Tensor)}


def _subclass(cls: type[nn.Module], bases: tuple[type[nn.Module], ...], arguments: Arguments) -> type[nn.Module]:
    """Creates a subclass with the model's class name and a signature of flat tensor names."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += [inspect.Parameter(as_argument(n), inspect.Parameter.KEYWORD_ONLY) for n in arguments.names]

    def forward(self: Any, /, **tensors: torch.Tensor) -> Any:
        return bases[0].forward(self, **tensors)

    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # any function may have one
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    return type(cls.__name__, bases, names)
