"""Creates random inputs, from the specifications in a config or from an exported program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport.config.inputs import RangeConfig, TensorConfig
from optexport.errors import ConfigError, TraceError, first_line
from optexport.parity.cases.vocabulary import vocabularies
from optexport.signature.program_arguments import tensor_inputs
from optexport.signature.signature import Batch, numbered_axis
from optexport.tracing.trace import trace


def program_inputs(program: ExportedProgram, seed: int) -> dict[str, torch.Tensor]:
    """Returns the inputs that a program was saved with, or random inputs at its traced sizes.

    Random floats are normally distributed. Ids are between 0 and the rows of their embedding. Other integers are 0 or
    1, and every row starts with 1, so that no row is fully masked.

    Args:
        seed: Seed of the random numbers.

    Returns:
        Tensors by input name, with the dtypes and shapes of the program's inputs.

    Raises:
        TraceError: The program takes an input that is not a tensor.
    """
    names = list(tensor_inputs(program).values())
    if program.example_inputs is not None:
        leaves = [leaf for leaf in pytree.tree_leaves(program.example_inputs) if isinstance(leaf, torch.Tensor)]
        if len(leaves) == len(names):
            return {name: leaf.detach().clone() for name, leaf in zip(names, leaves, strict=True)}
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    zeros: dict[str, torch.Tensor] = {}
    for placeholder, name in tensor_inputs(program).items():
        value = values.get(placeholder)
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                "the program takes this input as a Python value, not as a tensor",
                location=f"input {name}",
                hint="Export the program with tensors as its only inputs.",
            )
        zeros[name] = torch.zeros([_traced_size(size) for size in value.shape], dtype=value.dtype)
    traced = trace(program, zeros)
    ids = vocabularies(traced.graph_module, traced.signature)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(tensor, ids.get(name), generator) for name, tensor in zeros.items()}


def _traced_size(size: Any) -> int:
    """Returns the size of an axis when the program was traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _random(like: torch.Tensor, ids: int | None, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, generator=generator).to(like.dtype)
    integers = torch.randint(2 if ids is None else ids, like.shape, generator=generator)
    if ids is None and integers.dim():
        integers[..., 0] = 1
    return integers.to(like.dtype)


def inputs_from_specs(
    specs: Mapping[str, TensorConfig],
    dynamic: Mapping[str, RangeConfig],
    seed: int,
    values: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Batch:
    """Returns random inputs of the shapes and dtypes in a config.

    Args:
        specs: The specification of each input, by name.
        dynamic: Range of each declared dimension, by name.
        seed: Seed of the random numbers.
        values: Names of the axes that the values of an input index, by input.

    Raises:
        ConfigError: A range of values does not fit the dtype, or memory does not suffice.
    """
    generator = torch.Generator().manual_seed(seed)
    free = {size for spec in specs.values() for size in spec.shape if isinstance(size, str)}
    sizes = {name: 2 if name == "batch" else 16 + i for i, name in enumerate(sorted(free))}
    # Well above the minimum, at which a model may reduce an axis to size 1, and tracing would fix that size.
    for i, (name, declared) in enumerate(dynamic.items()):
        (low, high), step = declared.ends, declared.multiple_of
        sizes[name] = min(2 * low + (1 + i) * step, high)
    for name, indexed in values.items():
        specs = {**specs, name: _within(specs[name], indexed, _axis_sizes(specs, sizes))}
    try:
        return {name: _random_of_spec(name, spec, sizes, generator) for name, spec in specs.items()}
    except RuntimeError as error:  # out of memory
        raise ConfigError(f"the tensors cannot be created: {first_line(error)}", location="inputs.tensors") from error


def _axis_sizes(specs: Mapping[str, TensorConfig], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the size of every axis, by its name."""
    return dict(sizes) | {
        numbered_axis(name, axis): size
        for name, spec in specs.items()
        for axis, size in enumerate(spec.shape)
        if isinstance(size, int)
    }


def _within(spec: TensorConfig, indexed: Sequence[str], sizes: Mapping[str, int]) -> TensorConfig:
    """Returns a specification whose values index some axes: positions from 0, or lengths if `low` is 1 or more."""
    known = [sizes[name] for name in indexed if name in sizes]  # other names are refused later, with a suggestion
    if not known:
        return spec
    end = min(known) + ((spec.low or 0) >= 1)
    return spec.model_copy(update={"high": float(end if spec.high is None else min(end, spec.high))})


def _random_of_spec(
    name: str, spec: TensorConfig, sizes: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point and spec.low is None and spec.high is None:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = _bounds(name, spec, dtype)
    if dtype.is_floating_point:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * drawn).to(dtype)
    return torch.randint(math.ceil(low), math.ceil(high), shape, generator=generator).to(dtype)


def _bounds(name: str, spec: TensorConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the range of random numbers; by default [0, 1), or [0, 2) for integers."""
    low = 0.0 if spec.low is None else spec.low
    high = (1.0 if dtype.is_floating_point else 2.0) if spec.high is None else spec.high
    if not low < high or (not dtype.is_floating_point and math.ceil(low) == math.ceil(high)):
        raise ConfigError(
            f"high is not above low (expected more than {low:g}, found {high:g})",
            location=f"inputs.tensors.{name}.high",
        )
    if dtype.is_floating_point:
        minimum, maximum = -torch.finfo(dtype).max, torch.finfo(dtype).max
    else:
        minimum, maximum = (
            (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**62))
        )
    if low < minimum or math.ceil(high) - (not dtype.is_floating_point) > maximum:
        raise ConfigError(
            f"{spec.dtype} cannot represent numbers from {low:g} to {high:g}", location=f"inputs.tensors.{name}"
        )
    return low, high
