"""The Python API for models in memory, without a config file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport._utils.size_ranges import round_up
from optexport.bundle import contents
from optexport.config.consistency import check_device, check_formats, check_precision
from optexport.config.derived import resolve_passes
from optexport.config.inputs import LARGEST_SIZE
from optexport.config.load import validate_settings
from optexport.config.requirements import check_formats_installed
from optexport.config.schema import FORMATS, Effort, Layout
from optexport.errors import ConfigError, TraceError, did_you_mean
from optexport.exporters import registry
from optexport.inputs.dummy import dummy_inputs
from optexport.inputs.preparation import check_values
from optexport.job import Job
from optexport.loading.loader import Loaded
from optexport.loading.train_mode import find_training_module
from optexport.parity.gates import load_metrics
from optexport.pipeline import run
from optexport.pipeline.api_arguments import (
    Rules,
    as_enabled_table,
    as_list,
    as_pretrained,
    as_table,
    check_arguments,
    name_rules,
)
from optexport.report.progress import show_progress
from optexport.report.result import Result
from optexport.runtime.devices import Device, check_weight_bits
from optexport.runtime.providers import check_available
from optexport.signature import dtypes, program_arguments, resizing
from optexport.signature.arguments import flat_inputs
from optexport.signature.signature import Batch, Dim, Dynamic, call_signature, conventional_axes, named_inputs
from optexport.tracing import dynamo_exporter
from optexport.tracing.trace import Traced, copy_graph_module, trace

logger = logging.getLogger("optexport")

Inputs = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor


def export(  # noqa: PLR0913 - options of the public API
    model: nn.Module | ExportedProgram,
    inputs: Inputs | list[Inputs],
    output: str | Path,
    *,
    transformations: Rules | None = None,
    formats: str | Sequence[str] = FORMATS,
    device: Device = "cpu",
    dynamic: Dynamic | None = None,
    values: Mapping[str, Any] | None = None,
    noise_multiple: float = 4.0,
    atol: float | None = None,
    rtol: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
    effort: Effort = "standard",
    opset: int | None = None,
    providers: str | Sequence[str] = (),
    passes: Mapping[str, Sequence[str]] | None = None,
    layout: Layout | None = None,
    allow_fixed_shape: bool = False,
    tokenizer: Any = None,
    image_processor: Any = None,
    tune: bool | str = False,
    bench: bool | Mapping[str, Any] = False,
    tracking: bool | str | Mapping[str, Any] = False,
    progress: bool | Progress | None = None,
) -> Result:
    """Traces, transforms, exports and checks a model, like ``optexport run``, but does not track it by default.

    Args:
        model: A model in eval mode; it is not changed.
        inputs: Arguments by name, or a tuple of them in order. They are tensors, constants, or dicts, lists and tuples
            of tensors. Constants become part of the exported model. The first tensor of ``states=(h, c)`` is named
            ``states.0``. A list has several batches: the first is traced, and all are checked.
        output: The bundle's folder; an existing bundle is replaced.
        transformations: One or more transformations or names of rules, in the order of application; by default
            "preset". ``["preset", MyRule()]`` adds a rule to the preset.
        formats: Formats, such as "onnx"; by default "torchscript", "onnx" and "pt2".
        device: The device that the files run on: "cpu" or "cuda". The model and the inputs stay on the CPU.
        dynamic: The dynamic axes: ``{"input_ids": {0: "batch", 1: Dim("sequence", 2, 512)}}``. A dimension with a
            single size is fixed. By default, every axis that the model leaves dynamic.
        values: Inputs of whole numbers that index an axis, as in ``[inputs.values]``: ``{"lengths": {"indexes":
            "time"}}``. By default, they are found by trying.
        noise_multiple: The tolerance, as a multiple of the original's noise floor.
        atol: Replaces noise_multiple: ``abs(result - original) <= atol + rtol * abs(original)``; each is 0 by default.
        rtol: The relative part of the fixed tolerance.
        metrics: Gates as in ``[parity.metrics]``: ``{"argmax_agreement": 0.999, "cosine": {"min": 0.9999, "output":
            "logits"}}``. The module of a ``python:`` metric is searched in the working directory first.
        precision: Formats in lower precision as in ``[precision]``: ``{"onnx": "int8"}``. Only the gates apply to them.
        effort: How much is checked: "quick", "standard" or "exhaustive".
        opset: The ONNX opset; by default the exporter's default.
        providers: Execution providers of ONNX Runtime that the ONNX file is checked in, and records, as in
            ``[export.onnx]``: "OpenVINOExecutionProvider". By default, those of the device.
        passes: Format passes as in ``[export.passes]``: ``{"onnx": ["sum-residuals"]}``. An empty list leaves out the
            defaults of a format.
        layout: "triton" writes the files as a model repository of Triton Inference Server, inside the bundle.
        allow_fixed_shape: Whether a TorchScript file may accept only the traced sizes although ``dynamic`` has axes, if
            TorchScript cannot compile the graph.
        tokenizer: A tokenizer of transformers, for `Bundle.preprocess`; it is saved in the bundle.
        image_processor: An image processor of transformers, likewise.
        tune: Whether to search for the rules and format passes that make each file faster; a time such as "5m" limits
            the run, see ``[tune]``.
        bench: Whether to measure the files; a mapping has keys of ``[bench]``.
        tracking: Whether to track the run in MLflow; a string is the tracking URI, and a mapping has keys of
            ``[tracking]``; the experiment is named after the output folder by default. If tracking fails, the bundle is
            complete and `Result.tracking_failure` is set.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Returns:
        The result: the files by format, what each rule changed, and every comparison.

    Raises:
        ConfigError: An argument is invalid.
        TraceError: The model is in train mode, fails on the inputs, cannot be traced, or fixes an axis that is declared
            dynamic.
        ParityError: The result differs from the original; ``output`` is not written.
        GateError: The result is within the tolerance, but a gate fails.
        TransformationError: A rule raises, or returns something other than a graph.
        ExportError: A file cannot be written in its format.
    """
    benchmark = None if isinstance(bench, bool) else bench
    mappings = {"values": values, "metrics": metrics, "precision": precision, "passes": passes, "bench": benchmark}
    check_arguments(model, dynamic=dynamic, **mappings)
    output = as_path(output, "output").resolve()
    contents.check_output(output)
    if isinstance(model, ExportedProgram):
        loaded = Loaded.from_program(model)
    elif (training := find_training_module(model)) is not None:
        part = f"the module {training} of the model" if training else "the model"
        raise TraceError(
            f"{part} is in train mode, so its outputs may be random or depend on the whole batch",
            location=type(model).__name__,
            hint="Call model.eval() first.",
        )
    else:
        loaded = Loaded(model)
    loaded = replace(loaded, pretrained=as_pretrained(tokenizer=tokenizer, image_processor=image_processor))
    batches_of_arguments = inputs if isinstance(inputs, list) else [inputs]
    if not batches_of_arguments:
        raise ConfigError("the list of batches is empty", location="inputs")
    loaded, batches = _name_batches(loaded, batches_of_arguments)
    _check_dimensions(dynamic or {}, batches)
    config = validate_settings(
        {
            "model": {
                "source": f"python:{type(model).__module__}:{type(model).__qualname__}",
                "device": device,
            },
            "inputs": {"values": dict(values or {})},
            "parity": {
                "noise_multiple": noise_multiple,
                "atol": atol,
                "rtol": rtol,
                "effort": effort,
                "metrics": None if metrics is None else dict(metrics),
            },
            "export": {
                "formats": as_list(formats),
                "output": output.name,
                "opset": opset,
                "onnx": {"providers": as_list(providers)},
                "passes": {name: as_list(names) for name, names in (passes or {}).items()},
                "layout": layout,
                "allow_fixed_shape": allow_fixed_shape,
            },
            "precision": None if precision is None else dict(precision),
            "bench": as_enabled_table(bench, "enabled"),
            "tune": as_table(tune, "budget"),
            "tracking": {"experiment": output.name} | as_enabled_table(tracking, "uri"),
        },
        "export",
    )
    check_formats(config, "export")
    check_formats_installed(config, "export")
    check_device(config, "export")
    registry.check_device(config.model.device, config.export.formats, "device")
    check_available(config.export.onnx.providers, "providers")
    if config.precision is not None:
        check_weight_bits(config.precision.weight_bits, "precision: weight_bits")
    check_precision(config, "export")
    config = resolve_passes(config)
    rules = name_rules(transformations)
    custom_metrics = load_metrics(config.parity.metrics, Path())
    indexes = {name: value.indexes for name, value in config.inputs.values.items()}
    names = _axis_names(batches[0], dynamic or {})
    check_values(indexes, batches[0], names, "values: ", "Name the axis in `dynamic`.")
    example = batches[0] if dynamic is None else resizing.make_traceable(batches[0], dynamic, indexes)
    axes = None if dynamic is None else {name: _without_fixed(dims) for name, dims in dynamic.items()}
    job = Job(config, loaded, example, batches, axes, rules, output, metrics=custom_metrics)
    with show_progress(progress) as shown:
        return run.export_in_memory(job, shown)


def _name_batches(loaded: Loaded, batches: Sequence[Inputs]) -> tuple[Loaded, tuple[Batch, ...]]:
    """Returns the model with the arguments of the first batch, and all batches by input name."""
    if loaded.program is not None:
        return loaded, tuple(_copy(program_arguments.named_tensors(loaded.program, batch)) for batch in batches)
    flat = [flat_inputs(loaded.model, batch) for batch in batches]
    (_, first), *rest = flat
    for index, (_, arguments) in enumerate(rest, start=1):
        if repr(arguments) != repr(first):  # 1 and True are equal, but models may treat them differently
            raise ConfigError(
                "the batch has other arguments or other constants than the first batch",
                location=f"inputs[{index}]",
                hint="Export once for each way of calling the model.",
            )
    named = tuple(_copy(tensors) for tensors, _ in flat)
    return loaded.with_example(named[0], first), named


def _copy(batch: Mapping[str, torch.Tensor]) -> Batch:
    """Copies tensors, without gradients, because a model may change its inputs in place."""
    for name, tensor in batch.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            layout = str(tensor.layout).removeprefix("torch.")
            raise ConfigError(
                f"expected a dense tensor on the CPU, found a {layout} tensor on the device {tensor.device}",
                location=f"inputs: {name}",
                hint="Pass tensor.to_dense().cpu().",
            )
    dtypes.check(batch, "inputs")
    return {name: tensor.detach().clone() for name, tensor in batch.items()}


def _check_dimensions(dynamic: Dynamic, batches: Sequence[Batch]) -> None:
    """Checks that each declared dimension belongs to an input and has valid sizes."""
    for name, axes in dynamic.items():
        if name not in batches[0]:
            raise ConfigError(
                "the model has no input of this name", location=f"dynamic: {name}", hint=did_you_mean(name, batches[0])
            )
        rank = batches[0][name].dim()
        for dim in axes.values():
            names = dim.split(" + ") if isinstance(dim, str) else [getattr(dim, "name", "")]
            if not all(isinstance(part, str) and part.isidentifier() for part in names):
                raise ConfigError(
                    f"{dim!r} is not a dimension",
                    location=f"dynamic: {name}",
                    hint='Write a name, as in {0: "batch"}, the sum of two names, or a Dim.',
                )
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in batches[0].items())
        if any(type(axis) is not int or not 0 <= axis < rank for axis in axes):
            raise ConfigError(
                f"the input does not have the axes {[*axes]}",
                location=f"dynamic: {name}",
                hint=f"Use the inputs and axes of the first batch: {shapes}.",
            )
        for axis, dim in [(axis, dim) for axis, dim in axes.items() if isinstance(dim, Dim)]:
            _check_range(dim, f"dynamic: {name}")
            sizes = {batch[name].shape[axis] for batch in batches}
            if any(size % dim.multiple_of for size in sizes):
                raise ConfigError(
                    f"axis {axis} has size {max(size for size in sizes if size % dim.multiple_of)},"
                    f" which is not a multiple of {dim.multiple_of}",
                    location=f"dynamic: {name}",
                    hint=f"Pass inputs of a size of {dim.describe()}, or change multiple_of.",
                )
            if dim.min == dim.max and sizes != {dim.min}:
                raise ConfigError(
                    f"axis {axis} has size {max(sizes - {dim.min})}, but {dim} allows only {dim.min}",
                    location=f"dynamic: {name}",
                    hint=f"Pass inputs of size {dim.min}, or change the range.",
                )


def _check_range(dim: Dim, location: str) -> None:
    """Checks that a dimension has valid sizes."""
    largest = dim.min if dim.max is None else dim.max
    if type(dim.min) is not int or type(largest) is not int or not 1 <= dim.min <= largest <= LARGEST_SIZE:
        raise ConfigError(
            f"{dim} is not a range of sizes from 1 to {LARGEST_SIZE}",
            location=location,
            hint='Write whole numbers with min <= max, such as Dim("batch", 1, 64).',
        )
    if type(dim.multiple_of) is not int or dim.multiple_of < 1:
        raise ConfigError(
            f"`multiple_of` must be a whole number (found {dim.multiple_of!r}, expected 1 or more)",
            location=location,
            hint="Write a whole number, such as 8, or leave it out.",
        )
    least = round_up(dim.min, dim.multiple_of)
    if dim.max is not None and dim.max < least:
        raise ConfigError(
            f"no multiple of {dim.multiple_of} lies in the range {dim.min} to {dim.max}",
            location=location,
            hint=f"Write a max of at least {least}.",
        )


def _axis_names(batch: Batch, dynamic: Dynamic) -> set[str]:
    """Returns the declared names of axes, and those that axes have otherwise."""
    declared = [dim.name if isinstance(dim, Dim) else dim for axes in dynamic.values() for dim in axes.values()]
    usual = [conventional_axes(name, tensor.dim()) for name, tensor in batch.items()]
    return {part for name in declared for part in name.split(" + ")}.union(*usual)


def _without_fixed(axes: Mapping[int, str | Dim]) -> dict[int, str | Dim]:
    """Returns the axes that may have more than one size; the others are fixed."""
    return {axis: dim for axis, dim in axes.items() if isinstance(dim, str) or dim.min != dim.max}


def symbolic_trace(
    model: nn.Module,
    input_names: list[str] | None = None,
    disable_check: bool = False,  # noqa: ARG001
    *,
    example_inputs: Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...] | None = None,
    dynamic: Dynamic | None = None,
) -> fx.GraphModule:
    """Traces a model to a graph that transformations can be applied to.

    Args:
        model: A transformers model, any other ``nn.Module``, or a GraphModule, which is only copied. It is not changed;
            the graph shares its parameters.
        input_names: The inputs to trace with; by default the names in ``example_inputs``, or the inputs that a
            transformers model needs.
        disable_check: Ignored; for compatibility with ``transformers.utils.fx.symbolic_trace``. There it allowed
            architectures that were not on a list; here every architecture is allowed.
        example_inputs: Tensors by input name, or a tuple of them in order. By default, a transformers model gets inputs
            made from its config, and any other module goes through ``torch.fx.symbolic_trace``, with all inputs.
        dynamic: The dynamic axes: ``{"input_ids": {0: "batch", 1: "sequence"}}``. By default, every axis that the
            model leaves dynamic.

    Logs a warning for axes that the model fixes, for checks of values that the graph leaves out, for branches on values
    of which it computes both ways, and for a trace with ``strict=True``.

    Raises:
        TraceError: The model cannot be traced, or fixes an axis that is declared dynamic.
        ConfigError: A range of `dynamic` has no sizes.
    """
    _check_ranges(dynamic or {})
    if not isinstance(model, nn.Module):
        raise TraceError(f"not a module (expected nn.Module, found {type(model).__name__})", location="model")
    example = None if example_inputs is None else named_inputs(model, example_inputs)
    if example is None:
        if isinstance(model, fx.GraphModule):
            return copy_graph_module(model)
        if not dynamo_exporter.has_transformers_model(model):
            return _symbolic_trace_module(model, input_names or ())
        example = dummy_inputs(model, input_names)
    elif input_names is not None:
        missing = [name for name in input_names if name not in example]
        if missing:
            raise TraceError(f"the tensors for {', '.join(missing)} are missing", location="example_inputs")
        example = {name: example[name] for name in input_names}
    result = trace(model, example, dynamic)
    _warn_of_limits(result)
    return result.graph_module


def _check_ranges(dynamic: Dynamic) -> None:
    for name, dims in dynamic.items():
        for dim in dims.values():
            if isinstance(dim, Dim):
                _check_range(dim, f"dynamic: {name}")


def _warn_of_limits(result: Traced) -> None:
    if result.fixed:
        logger.warning("The model fixes some axes of its inputs: %s", ", ".join(result.fixed))
    if result.skipped_checks:
        logger.warning("The graph leaves out checks of values: %s", ", ".join(result.skipped_checks))
    if result.branches:
        logger.warning("The graph computes both ways of branches on values: %s", ", ".join(result.branches))
    if result.is_strict:
        logger.warning("Traced with torch.export(strict=True): the default trace failed or fixed more axes.")


def _symbolic_trace_module(model: nn.Module, input_names: Sequence[str]) -> fx.GraphModule:
    parameters = call_signature(model).parameters
    if not all(name in parameters for name in input_names):
        names = ", ".join(map(str, input_names))
        raise TraceError(
            f"forward takes other inputs (expected {', '.join(parameters)}, found {names})", location="input_names"
        )
    try:
        return fx.symbolic_trace(model)
    except Exception as error:  # the tracer runs the model's code, which may raise anything
        raise TraceError(
            f"torch.fx could not trace the model without inputs: {error}",
            location=type(model).__name__,
            hint="Pass example_inputs: torch.export then traces models that torch.fx cannot.",
        ) from error
