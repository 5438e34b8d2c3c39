"""Prepares the inputs to trace a model with, and the user's data for the parity check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from optexport._utils import model_memory
from optexport.config.inputs import InputsConfig, RangeConfig, TensorConfig
from optexport.errors import ConfigError, did_you_mean
from optexport.inputs.dummy import dummy_inputs
from optexport.inputs.random_inputs import inputs_from_specs, program_inputs
from optexport.inputs.user_data import read_data
from optexport.loading.loader import Pretrained
from optexport.loading.processing import check_images, convert_to_uint8
from optexport.signature.index_values import is_whole
from optexport.signature.program_arguments import check_ranks, input_names
from optexport.signature.resizing import make_traceable, repeat_single_row, split_batch
from optexport.signature.signature import Batch, Dim, Dynamic, call_signature, conventional_axes, numbered_axis
from optexport.tracing.model_run import run_or_error
from optexport.tracing.shapes.index_search import MAX_WEIGHT_BYTES

_NAME_AXES = 'Name the axes of an input in [inputs.axes], such as x = ["batch", "time"].'


@dataclass(frozen=True)
class Inputs:
    """Inputs to trace and check a model with.

    Attributes:
        example: Batch to trace with; each dynamic axis has at least size 2, as tracing requires.
        user_batches: The user's data, whole or cut into batches; empty without data.
        dynamic: Dynamic dimension of each axis, by input; None to detect the dynamic axes.
        rows: Number of rows of data that was cut into batches; otherwise 0.
    """

    example: Batch
    user_batches: tuple[Batch, ...]
    dynamic: Dynamic | None
    rows: int = 0


def prepare(
    config: InputsConfig,
    folder: Path,
    model: nn.Module,
    pretrained: Pretrained | None,
    seed: int,
    program: ExportedProgram | None = None,
) -> Inputs:
    """Prepares the inputs that the config defines.

    Args:
        folder: Folder of the config; paths are relative to it.
        pretrained: Location of the model's tokenizer or processor.
        seed: Seed for random inputs.
        program: Exported program whose module is ``model``, if any; the source of inputs if the config has none.

    Raises:
        ConfigError: The data cannot be read or do not fit the model, or no input has a declared dimension.
    """
    user_batches = read_data(config, folder, model, pretrained)
    values = {name: value.indexes for name, value in config.values.items()}
    example = user_batches[0] if user_batches else _make_example(config, values, model, seed, program)
    for batch in user_batches or (example,):
        check_images(model, batch)
    _check_example(example, config, model, program)
    axes = {name: _axis_names(name, tensor, config) for name, tensor in example.items()}
    names = {axis for names in axes.values() for axis in names}
    check_values(
        values,
        example,
        names,
        "inputs.values.",
        _NAME_AXES,
    )
    user_batches, rows = _cut_into_batches(user_batches, axes, config, model)
    example = user_batches[0] if user_batches else example
    if config.dynamic is None:
        if program is not None and not config.axes:  # not traced again, and may require a batch of one
            return Inputs(example, user_batches, None, rows)
        return replace(_without_declared_axes(example, user_batches, config, values), rows=rows)
    declared = _declared_axes(config.dynamic, axes)
    for batch in user_batches:
        _check_sizes(batch, declared)
    free = {name for name, sizes in config.dynamic.items() if sizes.ends[0] < sizes.ends[1]}
    dynamic = {name: {axis: dim for axis, dim in dims.items() if dim.name in free} for name, dims in declared.items()}
    return Inputs(make_traceable(example, declared, values), user_batches, dynamic, rows)


def check_values(
    values: Mapping[str, Sequence[str]], example: Batch, axes: Collection[str], location: str, hint: str
) -> None:
    """Checks that the values that index an axis belong to an input of whole numbers, and that the axis exists.

    Args:
        values: Names of the axes that the values of an input index, by input.
        axes: Names of all axes.
        location: Beginning of the location of an error; the name of the input follows.
        hint: How to name an axis.

    Raises:
        ConfigError: An input or an axis does not exist, or the input has no whole numbers.
    """
    whole = [name for name, tensor in example.items() if is_whole(tensor) and tensor.numel()]
    for name, indexed in values.items():
        if name not in whole:
            problem = "the model has no input of this name"
            if name in example:
                dtype = str(example[name].dtype).removeprefix("torch.")
                problem = f"expected whole numbers, found {dtype if example[name].numel() else 'no elements'}"
            raise ConfigError(problem, location=f"{location}{name}", hint=did_you_mean(name, whole))
        for axis in indexed:
            if axis not in axes:
                raise ConfigError(
                    f"no input has an axis {axis!r}",
                    location=f"{location}{name}",
                    hint=f"{did_you_mean(axis, sorted(axes))} {hint}".strip(),
                )


def _make_example(
    config: InputsConfig,
    values: Mapping[str, Sequence[str]],
    model: nn.Module,
    seed: int,
    program: ExportedProgram | None,
) -> Batch:
    """Makes inputs from the config's specifications, a program or a transformers config."""
    if config.tensors is not None:
        return _make_from_specs(config.tensors, config.dynamic or {}, seed, values, model)
    if program is not None:
        return program_inputs(program, seed)
    if hasattr(model, "main_input_name"):
        inputs = convert_to_uint8(model, dummy_inputs(model))
        return {name: tensor for name, tensor in inputs.items() if name not in config.constants}
    raise ConfigError(
        "nothing describes the model's inputs",
        location="inputs",
        hint='Add [inputs.tensors.NAME] with shape = ["batch", ...], or data = "inputs.safetensors".',
    )


def _make_from_specs(
    specs: Mapping[str, TensorConfig],
    dynamic: Mapping[str, RangeConfig],
    seed: int,
    values: Mapping[str, Sequence[str]],
    model: nn.Module,
) -> Batch:
    """Makes inputs from specifications; if the model rejects them, with values that index an axis."""
    used = {name: indexed for name, indexed in values.items() if name in specs}
    example = inputs_from_specs(specs, dynamic, seed, used)
    names = [name for name, tensor in example.items() if is_whole(tensor) and name not in used]
    if not names or model_memory.weight_bytes(model) >= MAX_WEIGHT_BYTES:
        return example
    if not isinstance(run_or_error(model, example), Exception):
        return example
    axes = dict.fromkeys(size for spec in specs.values() for size in spec.shape if isinstance(size, str))
    for indexing in [[name] for name in names] + [names] * (len(names) > 1):
        for axis in axes:
            fitted = inputs_from_specs(specs, dynamic, seed, used | {name: [axis] for name in indexing})
            if not isinstance(run_or_error(model, fitted), Exception):
                return fitted
    return example


def _check_example(example: Batch, config: InputsConfig, model: nn.Module, program: ExportedProgram | None) -> None:
    """Checks the names of the inputs, and their ranks if the model is a program."""
    if program is None:
        _check_names(example, config.constants, model)
    elif config.constants:
        raise ConfigError(
            "a .pt2 file has no inputs to make constant: its constants were fixed when it was exported",
            location="inputs.constants",
        )
    elif set(example) != set(names := input_names(program)):
        raise ConfigError(
            f"wrong inputs for the program (expected {', '.join(names)}, found {', '.join(example)})", location="inputs"
        )
    else:
        check_ranks(program, example)
    for name in config.axes:
        if name not in example:
            hint = did_you_mean(name, list(example))
            raise ConfigError("the model has no input of this name", location=f"inputs.axes.{name}", hint=hint)


def _declared_axes(
    declared: Mapping[str, RangeConfig], axes: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[int, Dim]]:
    """Returns the declared dimension of each axis, by input."""
    dims = {name: Dim(name, sizes.min, sizes.max, sizes.multiple_of) for name, sizes in declared.items()}
    axis_names = {axis for names in axes.values() for axis in names}
    for name in dims:
        if name not in axis_names:
            raise ConfigError(
                "no input has a dimension of this name",
                location=f"inputs.dynamic.{name}",
                hint=f"{did_you_mean(name, sorted(axis_names))} {_NAME_AXES}",
            )
    return {name: {axis: dims[dim] for axis, dim in enumerate(names) if dim in dims} for name, names in axes.items()}


def _cut_into_batches(
    user_batches: tuple[Batch, ...], axes: Mapping[str, tuple[str, ...]], config: InputsConfig, model: nn.Module
) -> tuple[tuple[Batch, ...], int]:
    """Cuts data into batches if the first axis is a batch; returns the number of rows too."""
    head = next((names[0] for names in axes.values() if names), None)
    if not user_batches or head is None:
        return user_batches, 0
    if config.dynamic is not None:
        sizes = config.dynamic.get(head)
        if sizes is None or sizes.ends[0] == sizes.ends[1]:
            return user_batches, 0
        dim = Dim(head, sizes.min, sizes.max, sizes.multiple_of)
    elif hasattr(model, "main_input_name"):  # transformers models only; the first axis of others may differ
        dim = Dim(head)
    else:
        return user_batches, 0
    inputs = [name for name, names in axes.items() if names and names[0] == head]
    cut = split_batch(user_batches[0], inputs, dim, declared=config.dynamic is not None)
    if len(cut) > 1 and _may_index_rows(user_batches[0], cut):
        whole, part = run_or_error(model, user_batches[0]), run_or_error(model, cut[-1])
        if isinstance(part, Exception) and not isinstance(whole, Exception):
            return user_batches, 0
    return cut, user_batches[0][inputs[0]].shape[0] if len(cut) > 1 else 0


def _may_index_rows(batch: Batch, cut: Sequence[Batch]) -> bool:
    """Returns True if whole numbers may be positions of rows that another part has, as in edges of a graph."""
    name = next(name for name, tensor in batch.items() if cut[0][name] is not tensor)
    rows, fewest = batch[name].shape[0], min(part[name].shape[0] for part in cut)
    return any(is_whole(tensor) and tensor.numel() and fewest <= int(tensor.max()) < rows for tensor in batch.values())


def _check_sizes(batch: Batch, dynamic: Mapping[str, Mapping[int, Dim]]) -> None:
    """Checks that the user's data have the declared sizes, equal in all inputs."""
    first: dict[str, tuple[str, int]] = {}
    for name, axes in dynamic.items():
        for axis, dim in axes.items():
            size = batch[name].shape[axis]
            if size not in dim:
                raise ConfigError(
                    f"{name} is outside the declared range (expected {dim.describe()}, found {size})",
                    location=f"inputs.dynamic.{dim.name}",
                    hint="Declare a range that includes the data, or give other data.",
                )
            first_name, first_size = first.setdefault(dim.name, (name, size))
            if size != first_size:
                raise ConfigError(
                    f"the sizes of two inputs differ ({size} in {name}, {first_size} in {first_name})",
                    location=f"inputs.dynamic.{dim.name}",
                    hint=f"Correct the data, or name the axes of {name} with inputs.axes.{name}.",
                )


def _without_declared_axes(
    example: Batch, user_batches: tuple[Batch, ...], config: InputsConfig, values: Mapping[str, Sequence[str]]
) -> Inputs:
    """Leaves dynamic dimensions to detection, except for axes that the user named."""
    named: dict[str, dict[int, str | Dim]] = {
        name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for name, spec in (config.tensors or {}).items()
    } or {name: dict(enumerate(names)) for name, names in config.axes.items()}
    if any(named.values()):
        return Inputs(make_traceable(example, named, values), user_batches, named)
    if config.texts is not None or config.images is not None:  # the first axis is the batch
        example = repeat_single_row(example)
    return Inputs(example, user_batches, None)


def _axis_names(name: str, tensor: torch.Tensor, config: InputsConfig) -> tuple[str, ...]:
    if config.tensors is not None and name in config.tensors:
        shape = config.tensors[name].shape
        return tuple(size if isinstance(size, str) else numbered_axis(name, axis) for axis, size in enumerate(shape))
    names = config.axes.get(name)
    if names is None:
        return conventional_axes(name, tensor.dim())
    if len(names) != tensor.dim():
        raise ConfigError(
            f"wrong number of axis names (expected {tensor.dim()}, found {len(names)})", location=f"inputs.axes.{name}"
        )
    return tuple(names)


def _check_names(example: Batch, constants: Mapping[str, object], model: nn.Module) -> None:
    parameters = call_signature(model).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not hasattr(model, "main_input_name"):
        return
    for name in (*example, *constants):
        if name not in parameters and name.partition(".")[0] not in parameters:
            accepted = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            raise ConfigError(
                f"{type(model).__name__} has no input of this name",
                location=f"inputs: {name}",
                hint=did_you_mean(name, accepted),
            )
