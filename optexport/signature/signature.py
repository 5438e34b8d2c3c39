"""Inputs and outputs of a model: names, dtypes, and shapes with named dynamic dimensions."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from optexport._utils.size_ranges import describe_range, round_up
from optexport.errors import ConfigError, SourceError
from optexport.signature.index_values import IndexValues
from optexport.signature.outputs import named_leaves

T = TypeVar("T")


@dataclass(frozen=True)
class Dim:
    """Dimension of variable size: ``min <= size <= max``; max=None means no upper bound.

    Attributes:
        multiple_of: Every size is a multiple of this number. The ends of the range are rounded to multiples.
        has_assumed_max: True if neither the user nor the model limits the size: the maximum is one that can be tried.
    """

    name: str
    min: int = 1
    max: int | None = None
    multiple_of: int = 1
    has_assumed_max: bool = field(default=False, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.multiple_of) is not int or self.multiple_of < 2:
            return
        least = round_up(self.min, self.multiple_of)
        most = None if self.max is None else self.max // self.multiple_of * self.multiple_of
        if most is None or least <= most:  # a range without a multiple stays as written, for the message
            object.__setattr__(self, "min", least)
            object.__setattr__(self, "max", most)

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= (size if self.max is None else self.max) and size % self.multiple_of == 0

    def fit(self, size: int) -> int:
        """Returns the size itself if it is allowed, else the next smaller one, or the smallest one."""
        size = size if self.max is None else min(size, self.max)
        return max(self.min, size // self.multiple_of * self.multiple_of)

    def describe(self) -> str:
        """Returns the allowed sizes in words."""
        return describe_range(self.min, self.max, self.multiple_of)


Batch = dict[str, torch.Tensor]

# Dynamic axes of each input, as a dimension's name or a Dim with its range.
Dynamic = Mapping[str, Mapping[int, str | Dim]]


@dataclass(frozen=True)
class TensorSpec:
    """Input or output of a model.

    A shape contains sizes. A dynamic axis has the name of a dimension, or an expression of dimensions. The only
    expression for an input is a sum, such as ``past_sequence + sequence``.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a traced model.

    Attributes:
        dims: Dynamic dimensions by name, with their ranges.
        indexes: Inputs whose values index a dynamic dimension.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: Mapping[str, Dim]
    indexes: Mapping[str, IndexValues] = field(default_factory=dict)

    @property
    def batched(self) -> tuple[str, ...]:
        """Inputs whose first axis is the batch.

        Empty unless the first axis of every output is this dimension, and no other axis of an output is.
        """
        dynamic = [spec for spec in self.inputs if spec.shape and isinstance(spec.shape[0], str)]
        firsts = {spec.shape[0] if spec.shape else None for spec in (*dynamic, *self.outputs)}
        twice = any(spec.shape[0] in spec.shape[1:] for spec in self.outputs if spec.shape)
        return tuple(spec.name for spec in dynamic) if len(firsts) == 1 and dynamic and not twice else ()

    def select_outputs(self, outputs: Collection[str]) -> Signature:
        """Returns the signature with only these outputs, or with all if the collection is empty."""
        selected = tuple(spec for spec in self.outputs if not outputs or spec.name in outputs)
        return replace(self, outputs=selected)

    def at(self, inputs: Mapping[str, torch.Tensor]) -> Signature:
        """Returns the signature with these inputs' sizes fixed, for a file of fixed shape."""
        fixed = tuple(TensorSpec(spec.name, spec.dtype, tuple(inputs[spec.name].shape)) for spec in self.inputs)
        return Signature(fixed, self.outputs, {})

    @property
    def output_names(self) -> list[str]:
        return [spec.name for spec in self.outputs]

    def axes(self) -> Iterator[tuple[str, int, Dim]]:
        """Yields each dynamic axis of an input as (input name, axis, dimension), without sums."""
        for spec in self.inputs:
            for axis, size in enumerate(spec.shape):
                if isinstance(size, str) and size in self.dims:
                    yield spec.name, axis, self.dims[size]

    def sizes_at(self, sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
        """Returns the size of each dynamic axis by input, including sums.

        Args:
            sizes: Size of each dimension, by name.
        """
        return {
            spec.name: {
                axis: sum(sizes[name] for name in size.split(" + "))
                for axis, size in enumerate(spec.shape)
                if isinstance(size, str)
            }
            for spec in self.inputs
        }

    def dynamic_shapes(self, *, named: bool = True) -> dict[str, dict[int, Any]]:
        """Returns ``dynamic_shapes`` for ``torch.export``, by argument.

        Axes that share a dimension share one ``torch.export.Dim``.

        Args:
            named: True to pass dimensions with names, False to pass only their ranges.
        """
        dims = {
            name: torch.export.Dim(name, min=dim.min, max=dim.max)
            if named
            else torch.export.Dim.AUTO(min=dim.min, max=dim.max)
            for name, dim in self.dims.items()
        }
        return as_arguments(
            {
                spec.name: {
                    axis: dims.get(size, torch.export.Dim.AUTO)  # torch.export derives the terms of a sum itself
                    for axis, size in enumerate(spec.shape)
                    if isinstance(size, str)
                }
                for spec in self.inputs
            }
        )

    def sizes(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Returns the size of each dynamic dimension in a batch of inputs."""
        return {dim.name: inputs[name].shape[axis] for name, axis, dim in self.axes()}


def call_signature(model: nn.Module) -> inspect.Signature:
    """Returns the signature of ``forward``, or of a TorchScript program's schema.

    Raises:
        SourceError: The TorchScript program has no ``forward``.
    """
    if not isinstance(model, torch.jit.ScriptModule):
        return inspect.signature(model.forward)
    try:
        forward: Any = model.forward
        schema = forward.schema
    except (AttributeError, RuntimeError) as error:
        raise SourceError("the TorchScript program has no forward", location=str(model.original_name)) from error
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(a.name, kinds[a.kwarg_only], default=a.default_value if a.has_default_value() else empty)
            for a in schema.arguments[1:]
        ]
    )


_CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), ("batch", "sequence")),
    **dict.fromkeys(("decoder_input_ids", "decoder_attention_mask"), ("batch", "decoder_sequence")),
    "inputs_embeds": ("batch", "sequence", "hidden"),
    "bbox": ("batch", "sequence", "coordinates"),
    "pixel_values": ("batch", "channels", "height", "width"),
    "input_values": ("batch", "samples"),
    "input_features": ("batch", "features", "frames"),
}


def conventional_axes(name: str, rank: int) -> tuple[str, ...]:
    """Returns default names for an input's axes; the first axis is the batch."""
    names = _CONVENTIONS.get(name, ())
    if len(names) == rank:
        return names
    return tuple("batch" if axis == 0 else numbered_axis(name, axis) for axis in range(rank))


def numbered_axis(name: str, axis: int) -> str:
    """Returns the name of an axis without a conventional name."""
    return f"{as_argument(name)}_{axis}"


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """Returns inputs by name.

    Args:
        inputs: A mapping, one tensor, or several tensors in the order of ``model.forward``.

    Raises:
        ConfigError: They have another type, or there are more than the model takes.
    """
    if isinstance(inputs, Mapping) and all(isinstance(value, torch.Tensor) for value in inputs.values()):
        return dict(inputs)
    tensors = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    names = list(inspect.signature(model.forward).parameters)
    if not all(isinstance(value, torch.Tensor) for value in tensors) or len(tensors) > len(names):
        raise ConfigError(
            "the inputs are neither tensors by name nor a tuple of tensors that fits the arguments",
            location="inputs",
            hint=f"Pass the inputs of {type(model).__name__}: {', '.join(names)}.",
        )
    return dict(zip(names, tensors, strict=False))


def flatten_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Names every tensor of a model's output by its path.

    Examples are ``last_hidden_state``, ``hidden_states.0`` and ``output``.

    Args:
        outputs: A tensor, or any nesting of containers and objects with tensors as fields. Other values are ignored.
    """
    return named_outputs(outputs, (), torch.Tensor)


def named_outputs(outputs: Any, inputs: Iterable[str], kind: type[T]) -> dict[str, T]:
    """Names the outputs of one type as `flatten_outputs` does, but never like an input.

    Args:
        outputs: Any nesting of containers and objects.
        inputs: Names of the inputs.
        kind: Type of the leaves to name.
    """
    named: dict[str, T] = {}
    for path, leaf in named_leaves(outputs, kind):
        name = path_name(path)
        name = name if name and not name[0].isdigit() else f"output_{name}" if name else "output"
        named[unused(name, named)] = leaf
    taken = [*named]
    arguments = {as_argument(name) for name in inputs}
    for name in [name for name in named if as_argument(name) in arguments]:
        taken.append(unused(f"{name}_out", taken))
        named = {taken[-1] if key == name else key: leaf for key, leaf in named.items()}
    return named


def unused(name: str, taken: Container[str]) -> str:
    """Returns the name, with a number if it is taken."""
    if name not in taken:
        return name
    return next(numbered for i in itertools.count(2) if (numbered := f"{name}_{i}") not in taken)


def path_name(path: Iterable[Any]) -> str:
    """Returns a leaf's name from its path in nested containers, such as ``states.0``."""
    return ".".join(_key(key) for key in path)


def as_argument(name: str) -> str:
    """Returns an input's name as a keyword argument: ``states_0`` for ``states.0``."""
    return re.sub(r"\W", "_", name)


def as_arguments(batch: Mapping[str, T]) -> dict[str, T]:
    """Returns inputs by their keyword names in Python and TorchScript."""
    return {as_argument(name): value for name, value in batch.items()}


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
