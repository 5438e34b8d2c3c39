"""Traces a model to a GraphModule, and names its dynamic dimensions."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import keyword
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from optexport._utils.module_state import restoring_state
from optexport._utils.user_lines import describe_error, find_line
from optexport.errors import FixedSizeError, OptexportError, TraceError, UntraceableError, ValuesAskedError, first_line
from optexport.signature.signature import (
    Batch,
    Dim,
    Dynamic,
    Signature,
    as_argument,
    as_arguments,
)
from optexport.tracing import dynamo_exporter
from optexport.tracing.fallbacks.attempts import (
    retry_trace,
    returning_containers,
    returns_own_classes,
    trace_branches,
)
from optexport.tracing.fallbacks.branch_merging import find_branches, merge_ways
from optexport.tracing.fallbacks.caught_trace_errors import refuse_caught_errors
from optexport.tracing.fallbacks.scalar_tensors import ScalarTracker
from optexport.tracing.fallbacks.value_branches import calling_all_ways, exploring_branches, is_branch
from optexport.tracing.module_reconstruction import reconstruct_modules
from optexport.tracing.patches.symbolic_sizes import SymbolicSizes
from optexport.tracing.patches.vmap import expand_vmap
from optexport.tracing.script_conversion import converting_scripts
from optexport.tracing.shapes.fixed_sizes import (
    choose_hint,
    describe_fixing_line,
    is_fixed_by_len,
    recording_fixed_sizes,
    store_fixing_lines,
)
from optexport.tracing.shapes.index_search import find_indexes
from optexport.tracing.shapes.path_probe import outcome, probe_paths
from optexport.tracing.shapes.program_shapes import read_signature
from optexport.tracing.shapes.range_limits import RangeLimits, find_multiples
from optexport.tracing.shapes.size_expressions import LongSizeDetector, LongSizeError
from optexport.tracing.shapes.size_guards import (
    SuspectSize,
    drop_assertions,
    find_fixed_dims,
    find_suspect_sizes,
    list_suspect_sizes,
)
from optexport.tracing.shapes.size_one import SizeOneRecorder
from optexport.tracing.value_checks import drop_value_assertions, skip_value_checks

# torch.export fixes each axis of size 1.
_ONE_ROW = "the example has one row; declare the axis to allow more"
# The entry in a program's metadata for the lines of skipped checks.
_CHECKS = "optexport_skipped_checks"

# Maps each input to the axes that may be dynamic.
Free = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Traced:
    """A traced model.

    Attributes:
        graph_module: Calls modules and operators; shares its parameters with the model.
        signature: The inputs and outputs.
        fixed: Axes that the model fixes although no fixed size was declared, such as ``pixel_values[1] = 3``, and the
            inputs in ``constants``.
        suspect_sizes: Sizes at which the model may take another branch than at the traced sizes. Each entry names
            only the dimensions that decide it.
        constants: Inputs that became constants, with their values. The graph is valid for these values only.
        skipped_checks: The lines of the model that check values and raise, which the graph leaves out.
        is_strict: True if only ``torch.export`` with ``strict=True`` could trace the model.
        asks_length: True if ``len`` fixed an axis.
    """

    graph_module: fx.GraphModule
    signature: Signature
    fixed: tuple[str, ...]
    suspect_sizes: tuple[dict[str, int], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skipped_checks: tuple[str, ...] = ()
    is_strict: bool = False
    asks_length: bool = False

    @property
    def branches(self) -> tuple[str, ...]:
        """Returns the lines of the model that branch on values; the graph computes both ways and chooses."""
        return find_branches(self.graph_module.graph)


def trace(
    model: nn.Module | ExportedProgram,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None = None,
    values: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Traced:
    """Traces a model with example inputs; see `symbolic_trace`.

    ``torch.export`` fixes every axis of size 0 or 1: a dynamic axis needs a size of at least 2 in the example.

    Args:
        values: Dimensions that the values of an input index, by input. Others are found.
    """
    # torch.export would make one input of two that share a tensor.
    example = {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in example.items()}
    if isinstance(model, fx.GraphModule):
        example = _sort_inputs(model, example)
    if isinstance(model, ExportedProgram):
        signature, fixed, symbols = read_signature(model, dynamic, example)
        sizes, limits = signature.sizes(example), RangeLimits(dim.name for dim in _declared_dims(dynamic))
        while True:
            narrowed = limits.narrow(signature, model, symbols, sizes)
            suspects = find_suspect_sizes(model, symbols, narrowed.dims, sizes)
            if not limits.add(narrowed, suspects, suspects, example):
                break
        signature = narrowed
        indexes = find_indexes(model.module(check_guards=False), example, signature, values)
        signature = replace(signature, indexes=indexes)
        return _make_traced(reconstruct_modules(model), signature, fixed, list_suspect_sizes(suspects))
    _check_names(model)
    with converting_scripts(model, example):
        return _trace_converted(model, example, dynamic, values)


def _trace_converted(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    values: Mapping[str, Sequence[str]],
) -> Traced:
    """Traces a module without TorchScript parts, in the ways that torch.export needs."""
    trace_axes = functools.partial(_trace_axes, model, example, dynamic, values)
    try:
        result = trace_axes()
    except UntraceableError as error:
        return _trace_again(model, example, dynamic, values, error)
    except FixedSizeError:
        if (strict := _try_strict(model, trace_axes)) is None:
            raise
        return strict
    if result.fixed and result.asks_length and (strict := _try_strict(model, trace_axes)) is not None:
        return strict if len(strict.fixed) < len(result.fixed) else result
    return result


def _trace_axes(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    values: Mapping[str, Sequence[str]],
) -> Traced:
    """Traces a module with all axes dynamic that may be, with the declared ranges or, if that fails, without."""
    try:
        return _trace_module(model, example, dynamic, values=values)
    except UntraceableError:
        if _declared_dims(dynamic):
            with contextlib.suppress(TraceError):  # the first error says more
                return _trace_module(model, example, dynamic, has_ranges=False, values=values)
        raise


def _trace_again(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    values: Mapping[str, Sequence[str]],
    error: UntraceableError,
) -> Traced:
    """Traces a module that torch.export refused: all ways of branches, strictly, or with less that may change."""
    trace_axes = functools.partial(_trace_axes, model, example, dynamic, values)
    has_branch = is_branch(error)
    if has_branch:
        try:
            result, lines = trace_branches(model, trace_axes)
            return replace(result, skipped_checks=(*result.skipped_checks, *lines))
        except UntraceableError as branch_error:  # says more
            error = branch_error
    may_be_strict = not isinstance(error.__cause__, LongSizeError)  # a strict trace would take too long as well
    if may_be_strict and dynamic is not None and (strict := _try_strict(model, trace_axes)) is not None:
        return strict  # otherwise, inputs may become constants

    def trace_with(model: nn.Module, example: Batch, free: Free | None, reason: str) -> Traced:
        result = _trace_module(model, example, dynamic, free, values=values)
        return replace(result, fixed=tuple(f"{axis}{reason}" for axis in result.fixed))

    inputs, is_declared = dict(example), dynamic is not None
    try:
        with exploring_branches(enabled=has_branch) as checks:
            result, constants, notes = retry_trace(model, inputs, error, trace_with, is_declared=is_declared)
    except UntraceableError:
        if may_be_strict and not is_declared and (strict := _try_strict(model, trace_axes)) is not None:
            return strict
        raise
    skipped_checks = (*result.skipped_checks, *checks)
    return replace(result, fixed=(*notes, *result.fixed), constants=constants, skipped_checks=skipped_checks)


def _try_strict(model: nn.Module, trace_axes: Callable[[], Traced]) -> Traced | None:
    """Traces a module with ``strict=True``; None if that fails too.

    TorchDynamo reads Python's bytecode, and traces ``len(x)`` and ``int(index.max())``, which fix a number otherwise.
    """
    if isinstance(model, fx.GraphModule) or dynamo_exporter.has_transformers_model(model):
        return None
    with dynamo_exporter.tracing_strictly(), contextlib.suppress(TraceError):
        return replace(trace_axes(), is_strict=True)
    return None


def _check_names(model: nn.Module) -> None:
    """Checks that torch.fx can write every module and parameter name into generated code."""
    for name, _ in itertools.chain(model.named_modules(), model.named_parameters(), model.named_buffers()):
        if re.search(r'["\\\n\r]', name) or any(map(keyword.iskeyword, name.split("."))):
            raise TraceError(
                f"the generated code cannot contain the name {name!r}",
                location=type(model).__name__,
                hint="Rename it, without quotes, backslashes, line breaks and Python keywords.",
            )


def _trace_module(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    free: Free | None = None,
    *,
    has_ranges: bool = True,
    values: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Traced:
    """Traces a module.

    Args:
        free: The axes that may be dynamic; all by default.
        has_ranges: Whether ``torch.export`` gets the declared ranges. It cannot combine them with every size that a
            model computes: padding to a multiple and cutting back fails with "Cannot create Dim with inconsistent
            min=0, max=-10". The checks try the declared sizes in any case.
    """
    if has_ranges or dynamic is None:
        program = _export(model, example, dynamic, free)
    else:
        program = _export(model, example, None, {name: list(dynamic.get(name, {})) for name in example})
    program, signature, fixed, suspect_sizes = _resolve_branches(model, example, dynamic, program, values)
    fixed = tuple(f"{axis}; {_ONE_ROW}" if axis.endswith("[0] = 1") else axis for axis in fixed)
    if isinstance(model, fx.GraphModule):
        graph_module = copy_graph_module(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # parameters are real tensors
        FakeTensorProp(graph_module, mode).propagate(*(example[spec.name] for spec in signature.inputs))
    else:
        graph_module = reconstruct_modules(program)
    traced = _make_traced(graph_module, signature, fixed, suspect_sizes)
    checks = program.graph_module.meta.get(_CHECKS, ())
    return replace(traced, skipped_checks=checks, asks_length=is_fixed_by_len(program))


def _make_traced(
    graph_module: fx.GraphModule, signature: Signature, fixed: tuple[str, ...], suspect_sizes: Sequence[dict[str, int]]
) -> Traced:
    distinct = tuple(sizes for index, sizes in enumerate(suspect_sizes) if sizes not in suspect_sizes[:index])
    return Traced(graph_module, signature, fixed, distinct)


def _resolve_branches(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    program: ExportedProgram,
    values: Mapping[str, Sequence[str]],
) -> tuple[ExportedProgram, Signature, tuple[str, ...], list[dict[str, int]]]:
    """Fixes dimensions that the branch depends on, and drops unnecessary assertions."""
    limits = RangeLimits(dim.name for dim in _declared_dims(dynamic))
    while True:
        full_signature, fixed, symbols = read_signature(program, dynamic, example)
        sizes = full_signature.sizes(example)
        signature = limits.narrow(full_signature, program, symbols, sizes)
        suspects = find_suspect_sizes(program, symbols, signature.dims, sizes)
        if limits.add(signature, suspects, (), example):
            continue
        signature = replace(signature, indexes=find_indexes(model, dict(example), signature, values))
        export_again = functools.partial(_export, model, dynamic=None, free=_axes(signature))
        probed = probe_paths(model, dict(example), program, signature, suspects, export_again)
        fixing = probed.fixed_dims.values()
        needed = [s for s in suspects if (str(s.expression) in fixing if fixing else s not in probed.removable)]
        if limits.add(signature, (), needed, example):
            continue
        fixed_dims = find_fixed_dims(program, symbols, full_signature.dims, sizes) | probed.fixed_dims
        if not fixed_dims:
            drop_assertions(program, symbols, signature.dims, probed.removable)
            return program, signature, fixed, [*list_suspect_sizes(suspects), *probed.sizes]
        if dynamic is not None:
            raise _fixed_dims_error(fixed_dims, sizes, full_signature.dims, suspects)
        program = _export(model, example, None, _axes(signature, excluded=fixed_dims))


def _axes(signature: Signature, *, excluded: Container[str] = ()) -> dict[str, list[int]]:
    """Returns the dynamic axes of each input, without excluded dimensions."""
    return {
        spec.name: [axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size not in excluded]
        for spec in signature.inputs
    }


def _fixed_dims_error(
    conditions: Mapping[str, str], sizes: Mapping[str, int], dims: Mapping[str, Dim], suspects: Sequence[SuspectSize]
) -> TraceError:
    names = " and ".join(conditions)
    traced_at = ", ".join(f"{name} {sizes[name]}" for name in conditions)
    broken = [suspect.expression for suspect in suspects if str(suspect.expression) in conditions.values()]
    multiples = find_multiples(broken, {name: dims[name] for name in conditions}, sizes)
    ranges = " and ".join(f"multiple_of = {multiple} for {name}" for name, multiple in multiples.items())
    return TraceError(
        f"the branch that the model takes at {traced_at} is valid only if {next(iter(conditions.values()))}",
        location="inputs.dynamic",
        hint=f"Declare {ranges}, or trace with another size."
        if ranges
        else f"Remove {names} from inputs.dynamic to fix the size, or trace with another size.",
    )


def _long_size_error(model: nn.Module, error: LongSizeError) -> UntraceableError:
    line = find_line(error)
    return UntraceableError(
        f"{error}{f', at {line}' if line else ''}; torch.export would not finish in a reasonable time",
        location=type(model).__name__,
        hint="Keep only the batch in inputs.dynamic; all other dimensions are fixed then.",
    )


def _declared_dims(dynamic: Dynamic | None) -> list[Dim]:
    return [dim for axes in (dynamic or {}).values() for dim in axes.values() if isinstance(dim, Dim)]


def _sort_inputs(model: fx.GraphModule, example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sorts the inputs by the order of the graph's placeholders."""
    placeholders = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    names = {as_argument(name): name for name in example}
    if set(placeholders) != set(names):
        raise TraceError(
            f"wrong inputs for the graph (expected {', '.join(placeholders)}, found {', '.join(example)})",
            location=type(model).__name__,
        )
    return {names[argument]: example[names[argument]] for argument in placeholders}


def _export(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    free: Free | None = None,
    changing: Collection[str] = (),
) -> ExportedProgram:
    """Exports a model with the declared axes, or all possible axes, dynamic.

    Args:
        free: The axes that may be dynamic; all by default.
        changing: Buffers whose values change between calls.
    """
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"not a tensor (found {type(value).__name__})",
                location=f"input {name}",
                hint="Pass tensors by input name, and set other arguments in the model or its config.",
            )
    hints = {name: _dynamic_shape(name, tensor, dynamic) for name, tensor in example.items()}
    if free is not None:
        hints = {name: {axis: axes[axis] for axis in free[name] if axis in axes} for name, axes in hints.items()}
    shapes = as_arguments(hints)
    if dynamo_exporter.is_strict():
        return _export_strictly(model, example, dynamic, shapes)
    try:
        with (
            restoring_state(model),  # a trace would leave fake tensors in attributes that the model assigns
            dynamo_exporter.exporting(),
            dynamo_exporter.one_pass(model),
            LongSizeDetector(),
            skip_value_checks() as checks,
            expand_vmap(),
            refuse_caught_errors(),
            ScalarTracker(model, changing) as numbers,
            SizeOneRecorder() as ones,
            recording_fixed_sizes() as fixing_lines,
            calling_all_ways(model),
            SymbolicSizes(),
        ):
            if dynamo_exporter.has_transformers_model(model):
                _check_complete(model, example)
                program = dynamo_exporter.export_program(model, as_arguments(example), shapes)
            else:
                program = dynamo_exporter.export_module(model, as_arguments(example), shapes)
    except OptexportError:
        raise
    except LongSizeError as error:
        raise _long_size_error(model, error) from error
    except Exception as error:  # torch.export raises many types, and the model's code any other
        if returns_own_classes(model, as_arguments(example)):
            with returning_containers(model):
                return _export(model, example, dynamic, free, changing)
        raise _explain(model, example, error, dynamic, fixing_lines) from error
    program = merge_ways(program)
    drop_value_assertions(program, checks)
    ones.store(program)
    store_fixing_lines(program, fixing_lines)
    program.graph_module.meta[_CHECKS] = tuple(checks)
    if written := numbers.used_buffers & _find_written_buffers(program):
        return _export(model, example, dynamic, free, {*changing, *written})
    return program


def _export_strictly(
    model: nn.Module, example: Mapping[str, torch.Tensor], dynamic: Dynamic | None, shapes: Mapping[str, Any]
) -> ExportedProgram:
    try:
        with restoring_state(model), dynamo_exporter.exporting():
            program = dynamo_exporter.export_module(model, as_arguments(example), shapes)
    except Exception as error:  # TorchDynamo raises many types, and the model's code any other
        raise _explain(model, example, error, dynamic, {}) from error
    checks: dict[str, None] = {}
    drop_value_assertions(program, checks)
    program.graph_module.meta[_CHECKS] = tuple(checks)
    return program


def _find_written_buffers(program: ExportedProgram) -> set[str]:
    """Returns the names of the buffers that a program writes to."""
    buffers = program.graph_signature.inputs_to_buffers
    targets = (
        node.args[0]
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node.args
    )
    return {buffers[node.name] for node in targets if isinstance(node, fx.Node) and node.name in buffers}


def _check_complete(model: nn.Module, example: Mapping[str, torch.Tensor]) -> None:
    """Checks that the model computes none of its inputs from values of the others."""
    computed = dynamo_exporter.find_computed_inputs(model, example)
    if value_inputs := frozenset(computed) & frozenset(example):
        raise ValuesAskedError(value_inputs)
    missing = [name for name, value in computed.items() if value is not None]
    if missing:
        raise TraceError(
            f"the model computes {', '.join(missing)} from the values of other inputs, which a graph cannot do",
            location=type(model).__name__,
            hint="Add them as inputs with transformers.exporters.utils.precompute_export_inputs(model, inputs).",
        )


def _dynamic_shape(name: str, tensor: torch.Tensor, dynamic: Dynamic | None) -> dict[int, Any]:
    """Returns the dynamic shapes of one input; ``torch.export`` keeps or refuses a range."""
    if dynamic is None:
        return dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
    return {
        axis: torch.export.Dim(dim.name, min=dim.min, max=dim.max) if isinstance(dim, Dim) else torch.export.Dim.AUTO
        for axis, dim in dynamic.get(name, {}).items()
    }


def _explain(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    error: Exception,
    dynamic: Dynamic | None,
    fixing_lines: Mapping[int, str],
) -> TraceError:
    name = type(model).__name__
    if isinstance(own_error := outcome(model, example), Exception):
        return _model_error(model, example, own_error)
    suggestion = re.search(r"Suggested fixes:\n((?:[ \t]+\S.*\n?)+)", str(error))
    if suggestion and dynamic:
        conditions = "; ".join(line.strip() for line in suggestion.group(1).splitlines())
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in example.items() if dynamic.get(name))
        fixed_size = re.fullmatch(r"\w+ = (\d+)", conditions)
        fixing_line = fixing_lines.get(int(fixed_size.group(1))) if fixed_size else None
        return FixedSizeError(
            f"the trace at {shapes} is not valid for all declared sizes: it requires {conditions}"
            f"{describe_fixing_line(fixing_line)}",
            location="inputs.dynamic",
            hint=choose_hint(
                fixing_line,
                "Narrow the range (raise its minimum if the model takes another branch at small sizes), or remove the"
                " dimension to fix it.",
            ),
        )
    line = find_line(error)
    return UntraceableError(
        f"torch.export could not trace the model{f', and stopped at {line}' if line else ''}: {first_line(error)}",
        location=name,
        hint="Change that line so that it does not depend on values of the inputs, or export a part of the model"
        " without it."
        if line
        else "Run again with --debug to see the line of the model where it stopped.",
    )


def _model_error(model: nn.Module, example: Mapping[str, torch.Tensor], error: Exception) -> TraceError:
    """Returns the error for a model that fails on its inputs without being traced."""
    shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in example.items())
    return TraceError(
        f"the model itself fails on the inputs {shapes}: {describe_error(error)}",
        location=type(model).__name__,
        hint="Register its hooks with with_kwargs=True: all inputs are passed by name."
        if model._forward_pre_hooks or model._forward_hooks
        else "Use inputs with dtypes, ranges and sizes that the model accepts.",
    )


def copy_graph_module(model: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph; the copy shares the modules and parameters."""
    graph = copy.deepcopy(model.graph)
    copied = fx.GraphModule(model, graph)
    copied.meta = copy.copy(model.meta)
    return copied
