"""Runs of the original in its own precision, with a check that calls are repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils.module_state import restoring_buffers
from optexport.errors import TraceError, first_line
from optexport.parity import distances
from optexport.parity.cases import Case
from optexport.parity.reference import Call, Outputs, Reference, kept
from optexport.signature.signature import Batch

# Cases of user data stop once their results exceed this many bytes, because every target stores as many.
_DATA_BYTES = 1 << 30


def run_in_own_precision(run: Call, model: nn.Module, cases: Sequence[Case], *, declared: bool) -> Reference:
    """Runs the original on all cases that it accepts, in its own precision.

    The reference uses these results in place of float64 ones.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original model.
        declared: True if the user declared the sizes. Otherwise a size that the model rejects is skipped.

    Raises:
        TraceError: The model fails on the traced or a declared case, or its results change between calls.
    """
    checked: list[Case] = []
    outputs: list[Outputs] = []
    left_out: list[str] = []
    data_bytes = 0
    for case in cases:
        if case.data and data_bytes > _DATA_BYTES:
            continue
        try:
            if checked:
                case, results, refused = _taken(run, model, case)
                left_out += refused
            else:
                results = _repeated(run, model, case.batch)
        except TraceError:
            raise
        except Exception as error:  # model code may raise anything
            if checked and (case.optional or not declared):
                left_out.append(f"{case.name}: the model itself fails, {type(error).__name__}: {first_line(error)}")
                continue
            raise TraceError(
                f"the model itself fails at {case.name}: {type(error).__name__}: {first_line(error)}",
                location=type(model).__name__,
                hint="Declare in inputs.dynamic only the sizes that it takes."
                if checked
                else "Give inputs of the dtypes, ranges and sizes that it takes.",
            ) from error
        if case.extreme and checked and _is_finite(outputs[0]) and not _is_finite(results):
            left_out.append(f"{case.name}: the model itself gives NaN or infinity")
            continue
        data_bytes += case.data * sum(tensor.nbytes for tensor in results.values())
        checked.append(case)
        outputs.append(kept(case, results))
    return Reference(tuple(checked), tuple(outputs), tuple(outputs), left_out=tuple(left_out))


def _taken(run: Call, model: nn.Module, case: Case) -> tuple[Case, Outputs, list[str]]:
    """Runs a model on a case, with less padding if it rejects that, and returns any notes."""
    try:
        return replace(case, otherwise=()), run(model, case.batch), []
    except TraceError:
        raise
    except Exception as error:  # model code may raise anything
        if not case.otherwise:
            raise
        less, *others = case.otherwise
        case, results, _ = _taken(run, model, replace(case, batch=less, otherwise=tuple(others)))
        told = f"{case.name}: the model itself fails as it is padded, and is checked with less padding"
        told += f" ({type(error).__name__}: {first_line(error)})"
        return case, results, [told]


def _is_finite(outputs: Outputs) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in outputs.values())


def _repeated(run: Call, model: nn.Module, batch: Batch) -> Outputs:
    """Rejects a model whose repeated calls differ, as its noise floor would be randomness."""
    with restoring_buffers(model) as changed:
        first = run(model, batch)
        state = " and ".join(changed())
    target = type(model).__name__
    if other := _other(first, run(model, batch)):
        raise TraceError(
            f"the model gives other results when it is run again on the same input ({other})",
            location=target,
            hint="It draws random numbers, or keeps state between calls; neither can be exported and proven.",
        )
    if state and (other := _other(first, run(model, batch))):
        raise TraceError(
            f"the model gives other results at the next call ({other}), by the state that it keeps in {state}",
            location=target,
            hint=f"A proof is of single calls: have the model take {state} as input and give its next value as output; "
            "or leave out what depends on it (keep-outputs).",
        )
    return first


def _other(first: Outputs, second: Outputs) -> str | None:
    """Returns the first output that differs by more than rounding, with the distance."""
    for name, tensor in first.items():
        distance = distances.largest(distances.distance(tensor, second[name]))
        scale = distances.largest(distances.finite(tensor).abs())
        ulps = distances.LEAST_FLOOR_ULPS * torch.finfo(tensor.dtype).eps * scale if tensor.is_floating_point() else 0.0
        if distance > 16 * ulps:
            return f"{name} by {distance:.2g}"
    return None
