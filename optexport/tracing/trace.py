"""From a model to a GraphModule of modules and operators, with its dynamic dimensions named and tied."""

from __future__ import annotations

import copy
import functools
import itertools
import keyword
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from optexport._utils.module_state import tensors_kept
from optexport.errors import OptexportError, TraceError, UntraceableError, ValuesAskedError, first_line
from optexport.signature.signature import (
    Batch,
    Dim,
    Dynamic,
    Signature,
    as_argument,
    as_arguments,
)
from optexport.tracing import transformers_exporter
from optexport.tracing.fallbacks.attempts import trace_otherwise
from optexport.tracing.fallbacks.caught_trace_errors import none_swallowed
from optexport.tracing.fallbacks.dataclass_outputs import register_dataclasses
from optexport.tracing.fallbacks.scalar_tensors import NumbersKnown
from optexport.tracing.model_lines import line_of_model
from optexport.tracing.module_reconstruction import reconstruct_modules
from optexport.tracing.shapes.path_probe import find_other_ways, outcome
from optexport.tracing.shapes.program_shapes import read_signature
from optexport.tracing.shapes.size_expressions import LongSizeError, SizesWatched
from optexport.tracing.shapes.size_guards import drop_doubts, find_doubts, held_sizes, own_sizes, within_assertions
from optexport.tracing.shapes.size_one import OnesNoted
from optexport.tracing.value_checks import skipping_checks

# The axes of each input that may be dynamic.
Free = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Traced:
    """A traced model.

    Attributes:
        graph_module: Calls of modules and operators; shares its parameters with the model.
        signature: Its inputs and outputs.
        fixed: Axes of inputs that the model holds to one size though nobody asked for it: ``pixel_values[1] = 3``; and
            the inputs that are held.
        suspect_sizes: Sizes at which the model may go another way than it was traced, of the dimensions that decide it.
        held: Inputs that the graph does not take, since it holds for these values of them alone.
    """

    graph_module: fx.GraphModule
    signature: Signature
    fixed: tuple[str, ...]
    suspect_sizes: tuple[dict[str, int], ...] = ()
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)


def trace(
    model: nn.Module | ExportedProgram, example: Mapping[str, torch.Tensor], dynamic: Dynamic | None = None
) -> Traced:
    """Traces a model with example inputs; see `symbolic_trace`.

    Sizes of 0 or 1 are always taken as fixed by ``torch.export``: a dynamic axis needs at least 2 in the example.
    """
    # One tensor that is given for two inputs would be traced as one input.
    example = {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in example.items()}
    if isinstance(model, fx.GraphModule):
        example = _in_order(model, example)
    if isinstance(model, ExportedProgram):
        signature, fixed, symbols = read_signature(model, dynamic, example)
        signature = _narrowed(signature, model, symbols, dynamic, signature.sizes(example))
        doubts = find_doubts(model, symbols, signature.dims, signature.sizes(example))
        return _traced(reconstruct_modules(model), signature, fixed, own_sizes(doubts))
    _check_names(model)
    try:
        return _trace_module(model, example, dynamic)
    except UntraceableError as error:

        def trace_with(model: nn.Module, example: Batch, free: Free | None, why: str) -> Traced:
            found = _trace_module(model, example, dynamic, free)
            return replace(found, fixed=tuple(f"{axis}{why}" for axis in found.fixed))

        found, held, told = trace_otherwise(model, example, error, trace_with, is_declared=dynamic is not None)
        return replace(found, fixed=(*told, *found.fixed), held=held)


def _check_names(model: nn.Module) -> None:
    """Checks that torch.fx can write the names of what a model holds between quotes, as it does with any name."""
    for name, _ in itertools.chain(model.named_modules(), model.named_parameters(), model.named_buffers()):
        if re.search(r'["\\\n\r]', name) or any(map(keyword.iskeyword, name.split("."))):
            raise TraceError(
                f"{name!r} is a name that the code of a graph cannot hold",
                location=type(model).__name__,
                hint="Name modules and parameters without quotes, backslashes and line breaks, and by no keyword.",
            )


def _trace_module(
    model: nn.Module, example: Mapping[str, torch.Tensor], dynamic: Dynamic | None, free: Free | None = None
) -> Traced:
    program = _export(model, example, dynamic, free)
    program, signature, fixed, suspect_sizes = _settle(model, example, dynamic, program)
    if isinstance(model, fx.GraphModule):
        graph_module = copy_graph_module(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # the parameters stay real
        FakeTensorProp(graph_module, mode).propagate(*(example[spec.name] for spec in signature.inputs))
    else:
        graph_module = reconstruct_modules(program)
    return _traced(graph_module, signature, fixed, suspect_sizes)


def _traced(
    graph_module: fx.GraphModule, signature: Signature, fixed: tuple[str, ...], suspect_sizes: Sequence[dict[str, int]]
) -> Traced:
    unlike = tuple(sizes for index, sizes in enumerate(suspect_sizes) if sizes not in suspect_sizes[:index])
    return Traced(graph_module, signature, fixed, unlike)


def _settle(
    model: nn.Module, example: Mapping[str, torch.Tensor], dynamic: Dynamic | None, program: ExportedProgram
) -> tuple[ExportedProgram, Signature, tuple[str, ...], list[dict[str, int]]]:
    """Fixes the sizes beside which the model goes another way, and has the program run wherever it holds."""
    while True:
        wide, fixed, symbols = read_signature(program, dynamic, example)
        sizes = wide.sizes(example)
        signature = _narrowed(wide, program, symbols, dynamic, sizes)
        doubts = find_doubts(program, symbols, signature.dims, sizes)
        export_again = functools.partial(_export, model, dynamic=None, free=_axes(signature))
        ways = find_other_ways(model, dict(example), program, signature, doubts, export_again)
        held = held_sizes(program, symbols, wide.dims, sizes) | ways.held_to
        if not held:
            drop_doubts(program, symbols, signature.dims, ways.crossed)
            return program, signature, fixed, [*own_sizes(doubts), *ways.sizes]
        if dynamic is not None:
            raise _held_error(held, sizes)
        program = _export(model, example, None, _axes(signature, but=held))


def _axes(signature: Signature, *, but: Container[str] = ()) -> dict[str, list[int]]:
    """The dynamic axes of each input, but for those of some dimensions."""
    return {
        spec.name: [axis for axis, size in enumerate(spec.shape) if isinstance(size, str) and size not in but]
        for spec in signature.inputs
    }


def _narrowed(
    signature: Signature,
    program: ExportedProgram,
    symbols: Mapping[Any, str],
    dynamic: Dynamic | None,
    sizes: Mapping[str, int],
) -> Signature:
    """A signature whose ranges end, where nobody declared them, at the sizes at which the program no longer holds."""
    undeclared = {name: dim for name, dim in signature.dims.items() if dim not in _declared(dynamic)}
    narrowed = within_assertions(program, symbols, undeclared, sizes)
    return replace(signature, dims={**signature.dims, **narrowed})


def _held_error(held: Mapping[str, str], sizes: Mapping[str, int]) -> TraceError:
    names = " and ".join(held)
    at = ", ".join(f"{name} {sizes[name]}" for name in held)
    return TraceError(
        f"traced at {at} the model goes a way that holds only where {next(iter(held.values()))}",
        location="inputs.dynamic",
        hint=f"Leave {names} out of inputs.dynamic to have them fixed, or trace with other sizes.",
    )


def _long_size_error(model: nn.Module, error: LongSizeError) -> UntraceableError:
    line = line_of_model(error)
    return UntraceableError(
        f"{error}{f', at {line}' if line else ''}, which torch.export would reason about without an end in sight",
        location=type(model).__name__,
        hint="Leave all dimensions but the batch out of inputs.dynamic to have them fixed.",
    )


def _declared(dynamic: Dynamic | None) -> list[Dim]:
    return [dim for axes in (dynamic or {}).values() for dim in axes.values() if isinstance(dim, Dim)]


def _in_order(model: fx.GraphModule, example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs in the order in which the graph takes them."""
    wanted = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    names = {as_argument(name): name for name in example}
    if set(wanted) != set(names):
        raise TraceError(
            f"the graph takes {', '.join(wanted)}, and is given {', '.join(example)}", location=type(model).__name__
        )
    return {names[argument]: example[names[argument]] for argument in wanted}


def _export(
    model: nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic: Dynamic | None,
    free: Free | None = None,
    changing: Collection[str] = (),
) -> ExportedProgram:
    """Exports a model, with the declared axes dynamic; where none are declared, with all that it leaves dynamic.

    Args:
        free: The axes that may be dynamic at all.
        changing: Buffers whose numbers are others in the next call.
    """
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"it is a {type(value).__name__}, not a tensor",
                location=f"input {name}",
                hint="Give tensors by input name; set other arguments in the model or its config.",
            )
    hints = {name: _hints(name, tensor, dynamic) for name, tensor in example.items()}
    if free is not None:
        hints = {name: {axis: axes[axis] for axis in free[name] if axis in axes} for name, axes in hints.items()}
    shapes = as_arguments(hints)
    try:
        with (
            tensors_kept(model),  # what a model computes for later is a stand-in here
            transformers_exporter.exporting(),
            transformers_exporter.one_pass(model),
            SizesWatched(),
            skipping_checks(),
            none_swallowed(),
            NumbersKnown(model, changing) as numbers,
            OnesNoted() as ones,
        ):
            if transformers_exporter.holds_transformers(model):
                _check_complete(model, example)
                program = transformers_exporter.export_program(model, as_arguments(example), shapes)
            else:
                program = transformers_exporter.export_module(model, as_arguments(example), shapes)
    except OptexportError:
        raise
    except LongSizeError as error:
        raise _long_size_error(model, error) from error
    except Exception as error:  # torch.export raises many kinds, and the model's own code any other
        if register_dataclasses(model, as_arguments(example)):
            return _export(model, example, dynamic, free, changing)
        raise _explained(model, example, error, dynamic) from error
    ones.note(program)
    if written := numbers.asked & _written(program):
        return _export(model, example, dynamic, free, {*changing, *written})
    return program


def _written(program: ExportedProgram) -> set[str]:
    """The buffers that a program writes to, by name."""
    buffers = program.graph_signature.inputs_to_buffers
    writing = (
        node.args[0]
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node.args
    )
    return {buffers[node.name] for node in writing if isinstance(node, fx.Node) and node.name in buffers}


def _check_complete(model: nn.Module, example: Mapping[str, torch.Tensor]) -> None:
    computed = transformers_exporter.computed_outside(model, example)
    if asked := frozenset(computed) & frozenset(example):
        raise ValuesAskedError(asked)
    missing = [name for name, value in computed.items() if value is not None]
    if missing:
        raise TraceError(
            f"it computes {', '.join(missing)} from the values of other inputs, which a graph cannot",
            location=type(model).__name__,
            hint="Give them as inputs: transformers.exporters.utils.precompute_export_inputs(model, inputs) adds them.",
        )


def _hints(name: str, tensor: torch.Tensor, dynamic: Dynamic | None) -> dict[int, Any]:
    """What ``torch.export`` is told of each axis; declared ranges are promises that it must keep or refuse."""
    if dynamic is None:
        return dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
    return {
        axis: torch.export.Dim(dim.name, min=dim.min, max=dim.max) if isinstance(dim, Dim) else torch.export.Dim.AUTO
        for axis, dim in dynamic.get(name, {}).items()
    }


def _of_recurrent(model: nn.Module) -> str:
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)}
    return f" (torch.export holds {' and '.join(sorted(kinds))} to the number of steps of the trace)" if kinds else ""


def _explained(
    model: nn.Module, example: Mapping[str, torch.Tensor], error: Exception, dynamic: Dynamic | None
) -> TraceError:
    name = type(model).__name__
    if isinstance(own := outcome(model, example), Exception):
        shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in example.items())
        return TraceError(
            f"the model itself fails on the inputs {shapes}: {type(own).__name__}: {first_line(own)}",
            location=name,
            hint="Its hooks are given all inputs by name: register them with with_kwargs=True."
            if model._forward_pre_hooks or model._forward_hooks
            else "Give inputs of the dtypes, ranges and sizes that it takes.",
        )
    suggestion = re.search(r"Suggested fixes:\n((?:[ \t]+\S.*\n?)+)", str(error))
    if suggestion and dynamic:
        wanted = "; ".join(line.strip() for line in suggestion.group(1).splitlines())
        at = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in example.items() if dynamic.get(name))
        return TraceError(
            f"what is traced, at {at}, does not hold at every size that is declared: it wants {wanted}"
            f"{_of_recurrent(model)}",
            location="inputs.dynamic",
            hint="Narrow the range, from below where the model goes another way at small sizes, or leave the dimension"
            " out to have it fixed.",
        )
    line = line_of_model(error)
    return UntraceableError(
        f"torch.export could not trace it{f', and stopped at {line}' if line else ''}: {first_line(error)}",
        location=name,
        hint="Change that line so that it depends on no values of its inputs, or export a part of the model without it."
        if line
        else "Run again with --debug for the line of the model that it stopped at.",
    )


def copy_graph_module(model: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph; the copy shares the modules and parameters."""
    graph = copy.deepcopy(model.graph)
    copied = fx.GraphModule(model, graph)
    copied.meta = copy.copy(model.meta)
    return copied
