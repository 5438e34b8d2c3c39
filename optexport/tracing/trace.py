"""Traces a model to a GraphModule, and names its dynamic dimensions."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from optexport.errors import BranchSizeError, FixedSizeError, TraceError, UntraceableError
from optexport.signature.index_values import IndexValues
from optexport.signature.resizing import iter_larger_batches
from optexport.signature.signature import (
    Batch,
    Dim,
    Dynamic,
    Signature,
    as_argument,
)
from optexport.tracing import dynamo_exporter
from optexport.tracing.fallbacks.attempts import (
    retry_trace,
    trace_branches,
)
from optexport.tracing.fallbacks.branch_merging import find_branches
from optexport.tracing.fallbacks.number_conversions import tracing_conversions, tracing_math_of_sizes, uses_math
from optexport.tracing.fallbacks.value_branches import exploring_branches, is_branch
from optexport.tracing.model_run import run_or_error
from optexport.tracing.module_reconstruction import reconstruct_modules
from optexport.tracing.program_export import DynamicAxes, export_with_axes, skipped_checks
from optexport.tracing.script_conversion import converting_scripts
from optexport.tracing.shapes.expression_limit import LongSizeError
from optexport.tracing.shapes.fixed_sizes import is_fixed_by_len
from optexport.tracing.shapes.index_search import find_indexes
from optexport.tracing.shapes.path_probe import agree, probe_paths
from optexport.tracing.shapes.program_shapes import read_signature
from optexport.tracing.shapes.range_limits import RangeLimits, find_multiples
from optexport.tracing.shapes.size_conditions import LARGEST
from optexport.tracing.shapes.size_guards import (
    SuspectSize,
    drop_assertions,
    find_fixed_dims,
    find_suspect_sizes,
    list_suspect_sizes,
)
from optexport.tracing.tensor_names import renaming_hidden_members

# torch.export fixes each axis of size 1.
_ONE_ROW = "the example has one row; declare the axis to allow more"


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
        is_strict: True if the trace used ``torch.export(strict=True)``, because the default trace failed or fixed more
            axes.
        is_fixed_by_len: True if ``len`` fixed an axis.
    """

    graph_module: fx.GraphModule
    signature: Signature
    fixed: tuple[str, ...]
    suspect_sizes: tuple[dict[str, int], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skipped_checks: tuple[str, ...] = ()
    is_strict: bool = False
    is_fixed_by_len: bool = False

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
        sizes, limits = signature.sizes(example), RangeLimits(_declared_dims(dynamic))
        while True:
            narrowed = limits.narrow(signature, model, symbols, sizes)
            suspects = find_suspect_sizes(model, symbols, narrowed.dims, sizes)
            if not limits.add(narrowed, suspects, suspects, example):
                break
        signature = narrowed
        indexes = find_indexes(model.module(check_guards=False), example, signature, values)
        signature = replace(signature, indexes=indexes)
        return _make_traced(reconstruct_modules(model), signature, fixed, list_suspect_sizes(suspects))
    with converting_scripts(model, example), renaming_hidden_members(model):
        return _trace_at_any_sizes(_Request(model, example, dynamic, values))


@dataclass(frozen=True)
class _Request:
    """A module without TorchScript parts to trace; see `trace`."""

    model: nn.Module
    example: Mapping[str, torch.Tensor]
    dynamic: Dynamic | None
    values: Mapping[str, Sequence[str]]

    def trace(self) -> Traced:
        """Traces the module with all axes dynamic that may be, with the declared ranges or, if that fails, without."""
        try:
            return _trace_module(self.model, self.example, self.dynamic, values=self.values)
        except (UntraceableError, FixedSizeError):
            if _declared_dims(self.dynamic):
                with contextlib.suppress(TraceError):  # the first error says more
                    return _trace_module(self.model, self.example, self.dynamic, has_ranges=False, values=self.values)
            raise


def _trace_at_any_sizes(request: _Request) -> Traced:
    """Traces a module at the sizes of the example or, if that fixes a declared size, at larger ones.

    A model may have a branch for sizes that need no padding, or for the image size of its training. The graph of its
    other branch must also be right for the example.
    """
    try:
        return _trace_or_fall_back(request)
    except (BranchSizeError, FixedSizeError):
        expected = run_or_error(request.model, request.example)
        if isinstance(expected, Exception):
            raise
        for batch in iter_larger_batches(request.example, request.dynamic or {}, request.values):
            with contextlib.suppress(TraceError):  # the first error says more
                traced = _trace_or_fall_back(replace(request, example=batch))
                if agree(run_or_error(traced.graph_module, request.example), expected):
                    return traced
        raise


def _trace_or_fall_back(request: _Request) -> Traced:
    """Traces a module with fallbacks if ``torch.export`` refuses it or fixes an axis."""
    try:
        result = request.trace()
    except UntraceableError as error:
        return _trace_with_fallbacks(request, error)
    except FixedSizeError as error:
        fallback = _try_math_of_sizes(request, error) or _try_strict(request)
        if fallback is None:
            raise
        return fallback
    if result.fixed and result.is_fixed_by_len and (strict := _try_strict(request)) is not None:
        return strict if len(strict.fixed) < len(result.fixed) else result
    return result


def _trace_with_fallbacks(request: _Request, error: UntraceableError) -> Traced:
    """Traces a module that torch.export refused: all ways of branches, strictly, or with less that may change."""
    has_branch, converted = is_branch(error), None
    if has_branch:
        try:
            return _trace_all_ways(request)
        except UntraceableError as branch_error:  # says more
            converted = _try_conversions(request)
            if converted is not None and (converted.branches or converted.skipped_checks):
                return converted  # other models are traced strictly, or their inputs become constants
            error = branch_error
    may_be_strict = not isinstance(error.__cause__, LongSizeError)  # a strict trace would take too long as well
    is_declared = request.dynamic is not None
    if is_declared and may_be_strict and (strict := _try_strict(request)) is not None:
        return strict  # otherwise, inputs may become constants
    if is_declared and converted is not None:
        return converted

    def trace_with(model: nn.Module, example: Batch, free: DynamicAxes | None, reason: str) -> Traced:
        result = _trace_module(model, example, request.dynamic, free, values=request.values)
        fixed = (axis if axis.endswith(_ONE_ROW) else f"{axis}{reason}" for axis in result.fixed)
        return replace(result, fixed=tuple(fixed))

    inputs = dict(request.example)
    try:
        with exploring_branches(enabled=has_branch) as checks:
            result, constants, notes = retry_trace(request.model, inputs, error, trace_with, is_declared=is_declared)
    except UntraceableError:
        if may_be_strict and not is_declared and (strict := _try_strict(request)) is not None:
            return strict
        raise
    skipped_checks = (*result.skipped_checks, *checks)
    return replace(result, fixed=(*notes, *result.fixed), constants=constants, skipped_checks=skipped_checks)


def _trace_all_ways(request: _Request) -> Traced:
    """Traces a module along all ways of its branches on values."""
    result, lines = trace_branches(request.model, request.trace)
    return replace(result, skipped_checks=(*result.skipped_checks, *lines))


def _try_conversions(request: _Request) -> Traced | None:
    """Traces all ways of a module that converts values with ``int`` or ``float``; None if that fails too."""
    if dynamo_exporter.has_transformers_model(request.model):
        return None
    with tracing_conversions(request.model), contextlib.suppress(TraceError):
        return _trace_all_ways(request)
    return None


def _try_math_of_sizes(request: _Request, error: FixedSizeError) -> Traced | None:
    """Traces a module that applies functions of ``math`` to a size; None if it does not, or that fails."""
    if not uses_math(error.message):
        return None
    with tracing_math_of_sizes(request.model), contextlib.suppress(TraceError):
        return request.trace()
    return None


def _try_strict(request: _Request) -> Traced | None:
    """Traces a module with ``strict=True``; None if that fails too.

    TorchDynamo reads Python's bytecode, and traces ``len(x)`` and ``int(index.max())``, which fix a number otherwise.
    """
    if isinstance(request.model, fx.GraphModule) or dynamo_exporter.has_transformers_model(request.model):
        return None
    with dynamo_exporter.tracing_strictly(), contextlib.suppress(TraceError):
        return replace(request.trace(), is_strict=True)
    return None


def _trace_module(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    free: DynamicAxes | None = None,
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
    suspects: list[dict[str, int]] = []
    if has_ranges or dynamic is None:
        program = export_with_axes(model, example, dynamic, free)
    else:
        program = export_with_axes(model, example, None, {name: list(dynamic.get(name, {})) for name in example})
        suspects = _check_ranges(program, dynamic, example)
    program, signature, fixed, suspect_sizes = _resolve_size_conditions(model, example, dynamic, program, values)
    fixed = tuple(f"{axis}; {_ONE_ROW}" if axis.endswith("[0] = 1") else axis for axis in fixed)
    if isinstance(model, fx.GraphModule):
        graph_module = copy_graph_module(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # parameters are real tensors
        FakeTensorProp(graph_module, mode).propagate(*(example[spec.name] for spec in signature.inputs))
    else:
        graph_module = reconstruct_modules(program)
    traced = _make_traced(graph_module, signature, fixed, [*suspect_sizes, *suspects])
    return replace(traced, skipped_checks=skipped_checks(program), is_fixed_by_len=is_fixed_by_len(program))


def _check_ranges(
    program: ExportedProgram, dynamic: Dynamic, example: Mapping[str, torch.Tensor]
) -> list[dict[str, int]]:
    """Checks that a trace without ranges covers the declared largest sizes; returns small sizes that are suspect."""
    _, _, symbols = read_signature(program, dynamic, example)
    declared = {dim.name: dim for dim in _declared_dims(dynamic)}
    suspects: list[dict[str, int]] = []
    for symbol, name in symbols.items():
        limits = program.range_constraints.get(symbol)
        if limits is None or name not in declared:
            continue
        dim = declared[name]
        if limits.upper < (dim.max or LARGEST):
            # Never shown: the error of the trace with ranges says more.
            raise TraceError(f"the trace is valid for {name} up to {limits.upper} only")
        if limits.lower > max(dim.min, 2):  # torch.export takes no size below 2
            suspects.append({name: dim.min})
    return suspects


def _make_traced(
    graph_module: fx.GraphModule, signature: Signature, fixed: tuple[str, ...], suspect_sizes: Sequence[dict[str, int]]
) -> Traced:
    distinct = tuple(sizes for index, sizes in enumerate(suspect_sizes) if sizes not in suspect_sizes[:index])
    return Traced(graph_module, signature, fixed, distinct)


def _resolve_size_conditions(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    program: ExportedProgram,
    values: Mapping[str, Sequence[str]],
) -> tuple[ExportedProgram, Signature, tuple[str, ...], list[dict[str, int]]]:
    """Exports until the graph is valid in all ranges; limits and fixes dimensions, drops needless assertions."""
    limits = RangeLimits(_declared_dims(dynamic))
    indexes: Mapping[str, IndexValues] = {}
    searched: Mapping[str, Dim] | None = None
    while True:
        full_signature, fixed, symbols = read_signature(program, dynamic, example)
        sizes = full_signature.sizes(example)
        signature = limits.narrow(full_signature, program, symbols, sizes)
        suspects = find_suspect_sizes(program, symbols, signature.dims, sizes)
        if limits.add(signature, suspects, (), example):
            continue
        if searched != signature.dims:
            indexes, searched = find_indexes(model, dict(example), signature, values), signature.dims
        signature = replace(signature, indexes=indexes)
        export_again = functools.partial(export_with_axes, model, dynamic=None, free=_axes(signature))
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
        program = export_with_axes(model, example, None, _axes(signature, excluded=fixed_dims))


def _axes(signature: Signature, *, excluded: Container[str] = ()) -> dict[str, list[int]]:
    """Returns the dynamic axes of each input, without excluded dimensions."""
    return {
        spec.name: [axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size not in excluded]
        for spec in signature.inputs
    }


def _fixed_dims_error(
    conditions: Mapping[str, str], sizes: Mapping[str, int], dims: Mapping[str, Dim], suspects: Sequence[SuspectSize]
) -> BranchSizeError:
    names = " and ".join(conditions)
    traced_at = ", ".join(f"{name} {sizes[name]}" for name in conditions)
    broken = [suspect.expression for suspect in suspects if str(suspect.expression) in conditions.values()]
    multiples = find_multiples(broken, {name: dims[name] for name in conditions}, sizes)
    ranges = " and ".join(f"multiple_of = {multiple} for {name}" for name, multiple in multiples.items())
    return BranchSizeError(
        f"the branch that the model takes at {traced_at} is valid only if {next(iter(conditions.values()))}",
        location="inputs.dynamic",
        hint=f"Declare {ranges}, or trace with another size."
        if ranges
        else f"Remove {names} from inputs.dynamic to fix the size, or trace with another size.",
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


def copy_graph_module(model: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph; the copy shares the modules and parameters."""
    graph = copy.deepcopy(model.graph)
    copied = fx.GraphModule(model, graph)
    copied.meta = copy.copy(model.meta)
    return copied
