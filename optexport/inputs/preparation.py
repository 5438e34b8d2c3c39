"""Prepares the inputs to trace a model with, and the user's data for the parity check."""

from __future__ import annotations

import inspect
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from optexport._utils.platform import free_memory
from optexport.config.schema import InputsConfig, TensorConfig
from optexport.errors import ConfigError, did_you_mean, first_line, panics_as_errors
from optexport.inference import images
from optexport.inputs.data_lines import read_lines, stack_records, texts_of
from optexport.inputs.dummy import dummy_inputs
from optexport.inputs.dummy_of_program import program_inputs
from optexport.loading.loader import Pretrained
from optexport.loading.processing import check_images, convert_to_uint8
from optexport.parity.cases.data_batches import make_traceable, repeat_single_row, split_batch
from optexport.signature import dtypes
from optexport.signature.exported_program import check_ranks, input_names
from optexport.signature.positions import most_tokens
from optexport.signature.signature import Batch, Dim, Dynamic, call_signature, conventional_axes, numbered_axis

# Tokenizers without a maximum length report 1e30.
_UNLIMITED = 10**9


@dataclass(frozen=True)
class Inputs:
    """Inputs to trace and check a model with.

    Attributes:
        example: Batch to trace with; each dynamic axis has at least size 2, as tracing requires.
        real: The user's data, whole or cut into batches; empty without data.
        dynamic: Dynamic dimension of each axis, by input; None to detect the dynamic axes.
        rows: Number of rows of data that was cut into batches; otherwise 0.
    """

    example: Batch
    real: tuple[Batch, ...]
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
    real = _read_data(config, folder, model, pretrained)
    example = real[0] if real else _make_example(config, model, seed, program)
    for batch in real or (example,):
        check_images(model, batch)
    _check_example(example, config, model, program)
    axes = {name: _axis_names(name, tensor, config) for name, tensor in example.items()}
    real, rows = _cut(real, axes, config, model)
    example = real[0] if real else example
    if config.dynamic is None:
        if program is not None and not config.axes:  # not traced again, and may require a batch of one
            return Inputs(example, real, None, rows)
        return replace(_undeclared(example, real, config), rows=rows)
    declared = _declared_axes(config.dynamic, axes)
    for batch in real:
        _check_sizes(batch, declared)
    free = {name for name, (low, high) in config.dynamic.items() if low < high}
    dynamic = {name: {axis: dim for axis, dim in dims.items() if dim.name in free} for name, dims in declared.items()}
    return Inputs(make_traceable(example, declared), real, dynamic, rows)


def _read_data(
    config: InputsConfig, folder: Path, model: nn.Module, pretrained: Pretrained | None
) -> tuple[Batch, ...]:
    """Reads the user's texts, images or file as one batch; returns nothing without data."""
    if config.texts is not None:
        return (_from_texts(config.texts, model, pretrained, config.max_length, "inputs.texts"),)
    if config.images is not None:
        return (_from_images([folder / Path(image).expanduser() for image in config.images], pretrained),)
    if config.data is not None:
        return (_from_file(folder / Path(config.data).expanduser(), model, pretrained, config.max_length),)
    return ()


def _make_example(config: InputsConfig, model: nn.Module, seed: int, program: ExportedProgram | None) -> Batch:
    """Makes inputs from the config's specifications, a program or a transformers config."""
    if config.tensors is not None:
        return _from_specs(config.tensors, config.dynamic or {}, seed)
    if program is not None:
        return program_inputs(program, seed)
    if hasattr(model, "main_input_name"):
        inputs = convert_to_uint8(model, dummy_inputs(model))
        return {name: tensor for name, tensor in inputs.items() if name not in config.constants}
    raise ConfigError(
        "nothing says what the model's inputs are",
        location="inputs",
        hint='Add [inputs.tensors.NAME] with shape = ["batch", ...], or data = "inputs.safetensors".',
    )


def _check_example(example: Batch, config: InputsConfig, model: nn.Module, program: ExportedProgram | None) -> None:
    """Checks the names of the inputs, and their ranks if the model is a program."""
    if program is None:
        _check_names(example, config.constants, model)
    elif config.constants:
        raise ConfigError("a .pt2 file takes none: they were fixed when it was made", location="inputs.constants")
    elif set(example) != set(names := input_names(program)):
        raise ConfigError(f"the program takes {', '.join(names)}, and is given {', '.join(example)}", location="inputs")
    else:
        check_ranks(program, example)
    for name in config.axes:
        if name not in example:
            hint = did_you_mean(name, list(example))
            raise ConfigError("there is no such input", location=f"inputs.axes.{name}", hint=hint)


def _declared_axes(
    declared: Mapping[str, Sequence[int]], axes: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[int, Dim]]:
    """Returns the declared dimension of each axis, by input."""
    dims = {name: Dim(name, low, high) for name, (low, high) in declared.items()}
    known = {axis for names in axes.values() for axis in names}
    for name in dims:
        if name not in known:
            raise ConfigError(
                "no input has such a dimension",
                location=f"inputs.dynamic.{name}",
                hint=f"{did_you_mean(name, sorted(known))} Name the axes of an input with [inputs.axes].",
            )
    return {name: {axis: dims[dim] for axis, dim in enumerate(names) if dim in dims} for name, names in axes.items()}


def _cut(
    real: tuple[Batch, ...], axes: Mapping[str, tuple[str, ...]], config: InputsConfig, model: nn.Module
) -> tuple[tuple[Batch, ...], int]:
    """Cuts data into batches if the first axis is a batch; returns the number of rows too."""
    head = next((names[0] for names in axes.values() if names), None)
    if not real or head is None:
        return real, 0
    if config.dynamic is not None:
        low, high = config.dynamic.get(head, (1, 1))
        if low == high:
            return real, 0
        dim = Dim(head, low, high)
    elif hasattr(model, "main_input_name"):  # transformers models only; the first axis of others may differ
        dim = Dim(head)
    else:
        return real, 0
    inputs = [name for name, names in axes.items() if names and names[0] == head]
    cut = split_batch(real[0], inputs, dim, declared=config.dynamic is not None)
    return cut, real[0][inputs[0]].shape[0] if len(cut) > 1 else 0


def _check_sizes(batch: Batch, dynamic: Mapping[str, Mapping[int, Dim]]) -> None:
    """Checks that the user's data have the declared sizes, equal in all inputs."""
    first: dict[str, tuple[str, int]] = {}
    for name, axes in dynamic.items():
        for axis, dim in axes.items():
            size = batch[name].shape[axis]
            if not dim.min <= size <= (size if dim.max is None else dim.max):
                raise ConfigError(
                    f"{name} has the size {size} there, which is not between {dim.min} and {dim.max}",
                    location=f"inputs.dynamic.{dim.name}",
                    hint="Declare a range that holds the data, or give other data.",
                )
            other, wanted = first.setdefault(dim.name, (name, size))
            if size != wanted:
                raise ConfigError(
                    f"{name} has the size {size} there, and {other} has {wanted}",
                    location=f"inputs.dynamic.{dim.name}",
                    hint=f"Mend the data, or name the axes of {name} with inputs.axes.{name}.",
                )


def _undeclared(example: Batch, real: tuple[Batch, ...], config: InputsConfig) -> Inputs:
    """Leaves dynamic dimensions to detection, except for axes that the user named."""
    named: dict[str, dict[int, str | Dim]] = {
        name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for name, spec in (config.tensors or {}).items()
    } or {name: dict(enumerate(names)) for name, names in config.axes.items()}
    if any(named.values()):
        return Inputs(make_traceable(example, named), real, named)
    return Inputs(repeat_single_row(example), real, None)


def _axis_names(name: str, tensor: torch.Tensor, config: InputsConfig) -> tuple[str, ...]:
    if config.tensors is not None and name in config.tensors:
        shape = config.tensors[name].shape
        return tuple(size if isinstance(size, str) else numbered_axis(name, axis) for axis, size in enumerate(shape))
    names = config.axes.get(name)
    if names is None:
        return conventional_axes(name, tensor.dim())
    if len(names) != tensor.dim():
        raise ConfigError(f"{len(names)} names are given for its {tensor.dim()} axes", location=f"inputs.axes.{name}")
    return tuple(names)


def _check_names(example: Batch, constants: Mapping[str, object], model: nn.Module) -> None:
    parameters = call_signature(model).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not hasattr(model, "main_input_name"):
        return
    for name in (*example, *constants):
        if name not in parameters and name.partition(".")[0] not in parameters:
            known = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            raise ConfigError(
                f"{type(model).__name__} takes no such input",
                location=f"inputs: {name}",
                hint=did_you_mean(name, known),
            )


def _from_texts(
    texts: Sequence[str], model: nn.Module, pretrained: Pretrained | None, max_length: int | None, location: str
) -> Batch:
    import transformers

    if pretrained is None:
        raise ConfigError("this model has no tokenizer", location=location, hint="Give its inputs as data instead.")
    try:
        if (tokenizer := pretrained.tokenizer) is None:
            with panics_as_errors():
                tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.name, **pretrained.options)
    except Exception as error:  # transformers raises many types without a tokenizer
        raise ConfigError(
            f"its tokenizer cannot be loaded: {first_line(error)}",
            location=location,
            hint="Give token ids as data instead.",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None and len(texts) > 1:
        raise ConfigError(
            "its tokenizer has no token to pad with", location=location, hint="Give one text, or token ids as data."
        )
    config: Any = model.config
    # RoBERTa has more positions than it takes tokens; only its tokenizer has the right limit.
    limit = max_length or min(most_tokens(config) or _UNLIMITED, tokenizer.model_max_length)
    cut = {"truncation": True, "max_length": limit} if limit < _UNLIMITED else {}
    prompted = [pretrained.prompt + text for text in texts]
    try:
        with panics_as_errors():
            encoded = tokenizer(prompted, padding=len(texts) > 1, return_tensors="pt", **cut)
    except Exception as error:  # transformers raises many types of exceptions
        raise ConfigError(
            f"its tokenizer does not take them: {first_line(error)}",
            location=location,
            hint="Give token ids as data instead.",
        ) from error
    ids = encoded["input_ids"]
    words = ~torch.isin(ids, torch.tensor([i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]))
    if not words.any() or (tokenizer.unk_token_id is not None and (ids[words] == tokenizer.unk_token_id).all()):
        if len(tokenizer) == len({*tokenizer.all_special_ids}):  # transformers creates an empty tokenizer without files
            raise ConfigError(
                "the model comes with no tokenizer", location=location, hint="Give token ids as data instead."
            )
        raise ConfigError(
            "the tokenizer turns the texts into nothing but unknown tokens",
            location=location,
            hint="It does not know this kind of text, or is not the model's own: give token ids as data instead.",
        )
    accepted = inspect.signature(model.forward).parameters
    batch = {name: value for name, value in encoded.items() if name in accepted}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        start = config.decoder_start_token_id or 0
        batch["decoder_input_ids"] = torch.cat(
            [torch.full_like(ids[:, :1], start), ids[:, : max(ids.shape[1] // 2, 1)]], 1
        )
    return batch


def _from_images(paths: Sequence[Path], pretrained: Pretrained | None) -> Batch:
    import transformers

    if pretrained is None:
        raise ConfigError("this model has no image processor", location="inputs.images", hint="Give data or tensors.")
    read = [_image(path) for path in paths]
    try:
        processor = pretrained.image_processor or transformers.AutoImageProcessor.from_pretrained(
            pretrained.name, backend="pil", **pretrained.options
        )
        return dict(processor(images=read, return_tensors="pt"))
    except Exception as error:  # transformers raises many types of exceptions
        raise ConfigError(f"it cannot be processed: {first_line(error)}", location="inputs.images") from error


def _image(path: Path) -> Any:
    try:
        return images.read(path)
    except ConfigError as error:
        raise ConfigError(error.message, location=f"inputs.images: {path.name}", hint=error.hint) from error


def _from_file(path: Path, model: nn.Module, pretrained: Pretrained | None, max_length: int | None) -> Batch:
    location = f"inputs.data: {path.name}"
    batch = _read(path, location, model, pretrained, max_length)
    if not batch or any(not tensor.numel() for tensor in batch.values()):
        raise ConfigError("it holds no numbers" if batch else "it holds no inputs", location=location)
    dtypes.check(batch, location)
    return batch


def _read(path: Path, location: str, model: nn.Module, pretrained: Pretrained | None, max_length: int | None) -> Batch:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no archive of arrays")
            _check_memory(path, location)
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if path.suffix == ".jsonl":
            records = read_lines(path.read_text(encoding="utf-8-sig"), location)
            texts = texts_of(records, location)
            if texts is not None:
                return _from_texts(texts, model, pretrained, max_length, location)
            return stack_records(records, model, location)
    except ConfigError:
        raise
    except Exception as error:  # each format raises other types
        raise ConfigError(f"it cannot be read: {first_line(error)}", location=location) from error
    raise ConfigError(
        f"files of the kind {path.suffix or path.name} are not known",
        location=location,
        hint="Give .safetensors, .npz, or .jsonl.",
    )


def _check_memory(path: Path, location: str) -> None:
    """Checks that an archive's arrays fit into memory; zeros compress a thousandfold."""
    with zipfile.ZipFile(path) as archive:
        needed = sum(info.file_size for info in archive.infolist())
    if needed > (free := free_memory()):
        raise ConfigError(
            f"its arrays take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free",
            location=location,
            hint="Give fewer rows.",
        )


def _from_specs(specs: Mapping[str, TensorConfig], dynamic: Mapping[str, list[int]], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    free = {size for spec in specs.values() for size in spec.shape if isinstance(size, str)}
    sizes = {name: 2 if name == "batch" else 16 + i for i, name in enumerate(sorted(free))}
    # Well above the minimum, at which a model may reduce an axis to size 1, and tracing would fix that size.
    sizes |= {name: min(2 * low + 1 + i, high) for i, (name, (low, high)) in enumerate(dynamic.items())}
    try:
        return {name: _random(name, spec, sizes, generator) for name, spec in specs.items()}
    except RuntimeError as error:  # out of memory
        raise ConfigError(f"they cannot be made: {first_line(error)}", location="inputs.tensors") from error


def _random(name: str, spec: TensorConfig, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
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
        raise ConfigError(f"high must be above low, which is {low:g}", location=f"inputs.tensors.{name}.high")
    if dtype.is_floating_point:
        least, most = -torch.finfo(dtype).max, torch.finfo(dtype).max
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**62))
    if low < least or math.ceil(high) - (not dtype.is_floating_point) > most:
        raise ConfigError(f"{spec.dtype} holds no numbers from {low:g} to {high:g}", location=f"inputs.tensors.{name}")
    return low, high
