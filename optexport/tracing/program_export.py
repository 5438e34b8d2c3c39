"""Exports a module to a program, and explains why it cannot be exported."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from optexport._utils.module_state import restoring_state
from optexport._utils.user_lines import find_line
from optexport.errors import (
    FixedSizeError,
    OptexportError,
    TraceError,
    UntraceableError,
    ValuesAskedError,
    first_line,
)
from optexport.signature.signature import Dim, Dynamic, as_arguments
from optexport.tracing import dynamo_exporter
from optexport.tracing.fallbacks.attempts import returning_containers, returns_own_classes
from optexport.tracing.fallbacks.branch_merging import merge_ways
from optexport.tracing.fallbacks.caught_trace_errors import refuse_caught_errors
from optexport.tracing.fallbacks.scalar_tensors import ScalarTracker
from optexport.tracing.fallbacks.value_branches import calling_all_ways
from optexport.tracing.model_run import model_error, run_or_error
from optexport.tracing.number_tensors import write_numbers_as_tensors
from optexport.tracing.patches.size_keys import UNHASHABLE, allowing_size_keys, allows_size_keys, replacing_dicts
from optexport.tracing.patches.symbolic_sizes import SymbolicSizes
from optexport.tracing.patches.vmap import expand_vmap
from optexport.tracing.patches.weight_data import WeightData
from optexport.tracing.shapes.expression_limit import LongSizeDetector, LongSizeError
from optexport.tracing.shapes.fixed_sizes import (
    choose_hint,
    describe_fixing_line,
    recording_fixed_sizes,
    store_fixing_lines,
)
from optexport.tracing.shapes.operator_conditions import recording_operator_conditions, store_operator_conditions
from optexport.tracing.shapes.size_one import SizeOneRecorder, doubt_size_one
from optexport.tracing.tensor_names import rename_hidden_tensors, write_module_paths_plainly
from optexport.tracing.value_checks import drop_value_assertions, skip_value_checks
from optexport.transformations.analysis import effects

# The entry in a program's metadata for the lines of skipped checks.
_CHECKS_KEY = "optexport_skipped_checks"

# Maps each input to the axes that may be dynamic.
DynamicAxes = Mapping[str, Sequence[int]]


def skipped_checks(program: ExportedProgram) -> tuple[str, ...]:
    """Returns the lines of the model that check values and raise, which the program leaves out."""
    checks: tuple[str, ...] = program.graph_module.meta.get(_CHECKS_KEY, ())
    return checks


def export_with_axes(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    free: DynamicAxes | None = None,
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
    by_input = {name: _dynamic_shape(name, tensor, dynamic) for name, tensor in example.items()}
    if free is not None:
        by_input = {n: {axis: axes[axis] for axis in free[n] if axis in axes} for n, axes in by_input.items()}
    shapes = as_arguments(by_input)
    if dynamo_exporter.is_strict():
        return _export_strictly(model, example, dynamic, shapes)
    try:
        with (
            restoring_state(model),  # a trace would leave fake tensors in attributes that the model assigns
            replacing_dicts(model),
            dynamo_exporter.exporting(),
            dynamo_exporter.one_pass(model),
            LongSizeDetector(),
            skip_value_checks() as checks,
            expand_vmap(),
            refuse_caught_errors(),
            ScalarTracker(model, changing) as scalars,
            SizeOneRecorder() as size_ones,
            recording_fixed_sizes() as fixing_lines,
            recording_operator_conditions() as operator_conditions,
            calling_all_ways(model),
            SymbolicSizes(),
            WeightData(),
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
        if UNHASHABLE in str(error) and not allows_size_keys():
            with allowing_size_keys():
                return export_with_axes(model, example, dynamic, free, changing)
        if returns_own_classes(model, example):
            with returning_containers(model):
                return export_with_axes(model, example, dynamic, free, changing)
        raise _explain(model, example, error, dynamic, fixing_lines) from error
    write_numbers_as_tensors(program)
    program = merge_ways(program)
    drop_value_assertions(program, checks)
    size_ones.store(program)
    store_fixing_lines(program, fixing_lines)
    store_operator_conditions(program, operator_conditions)
    program.graph_module.meta[_CHECKS_KEY] = tuple(checks)
    if written := scalars.used_buffers & _find_written_buffers(program):
        return export_with_axes(model, example, dynamic, free, {*changing, *written})
    rename_hidden_tensors(program)
    return program


def _export_strictly(
    model: nn.Module, example: Mapping[str, torch.Tensor], dynamic: Dynamic | None, shapes: Mapping[str, Any]
) -> ExportedProgram:
    try:
        with restoring_state(model), dynamo_exporter.exporting():
            program = dynamo_exporter.export_module(model, as_arguments(example), shapes)
    except Exception as error:  # TorchDynamo raises many types, and the model's code any other
        raise _explain(model, example, error, dynamic, {}) from error
    if any(isinstance(constant, FakeTensor) for constant in program.constants.values()):
        # torch 2.13 loses the numbers of NumPy arrays that a module stores (tests/tracing/test_strict.py).
        raise UntraceableError("the strict trace lost the values of a NumPy array", location=type(model).__name__)
    write_numbers_as_tensors(program)
    checks: dict[str, None] = {}
    drop_value_assertions(program, checks)
    doubt_size_one(program)
    program.graph_module.meta[_CHECKS_KEY] = tuple(checks)
    write_module_paths_plainly(program)
    rename_hidden_tensors(program)
    return program


def _find_written_buffers(program: ExportedProgram) -> set[str]:
    """Returns the names of the buffers that a program writes to."""
    buffers = program.graph_signature.inputs_to_buffers
    written = (target for node in program.graph.nodes for target in effects.mutated_inputs(program.graph_module, node))
    return {buffers[node.name] for node in written if node.name in buffers}


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


def _range_hint(conditions: str) -> str:
    """Returns how to change the declared ranges, from the conditions of torch.export."""
    largest = re.fullmatch(r"(\w+) = Dim\('\w+', max=(\d+)\)", conditions)
    if largest:
        return f"Set the largest size of {largest[1]} to {largest[2]}: the model takes no larger one."
    return (
        "Narrow the range (raise its minimum if the model takes another branch at small sizes), or remove the dimension"
        " to fix it."
    )


def _explain(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    error: Exception,
    dynamic: Dynamic | None,
    fixing_lines: Mapping[int, str],
) -> TraceError:
    name = type(model).__name__
    if isinstance(own_error := run_or_error(model, example), Exception):
        return model_error(model, example, own_error)
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
            hint=choose_hint(fixing_line, _range_hint(conditions)),
        )
    if "fake tensor in the exported program constant" in str(error):
        return UntraceableError(
            "the model stores a tensor that it computes, for example in weight.data, and reads it in the same call",
            location=name,
            hint="If only the first call does so, call the model once before the export. Otherwise, leave that "
            "assignment out of forward.",
        )
    line = find_line(error)
    if UNHASHABLE in str(error):
        return UntraceableError(
            f"the model uses a size of an input in a set, or as a key of a local dict{f', at {line}' if line else ''}",
            location=name,
            hint="Compare sizes with == instead, or keep results by size in a dict that is an attribute of the model.",
        )
    if "ufunc does not support" in str(error):
        return UntraceableError(
            f"the model computes with a size of an input in NumPy{f', at {line}' if line else ''}",
            location=name,
            hint="Use functions of math or torch for sizes.",
        )
    return UntraceableError(
        f"torch.export could not trace the model{f', and stopped at {line}' if line else ''}: {first_line(error)}",
        location=name,
        hint="Change that line so that it does not depend on values of the inputs, or export a part of the model"
        " without it."
        if line
        else "See the traceback for the line of the model where it stopped.",
    )


def _long_size_error(model: nn.Module, error: LongSizeError) -> UntraceableError:
    line = find_line(error)
    return UntraceableError(
        f"{error}{f', at {line}' if line else ''}; torch.export would not finish in a reasonable time",
        location=type(model).__name__,
        hint="Keep only the batch in inputs.dynamic; all other dimensions are fixed then.",
    )
