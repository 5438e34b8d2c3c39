"""Runs of the original in its own precision, with a check that calls are repeatable."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils.module_state import State, restoring_state
from optexport._utils.platform import is_of_memory
from optexport._utils.weight_data import DataAccess
from optexport.errors import ModelError, TraceError, describe_error
from optexport.parity import distances
from optexport.parity.cases.case import Case
from optexport.parity.reference import Call, Outputs, Reference, store_results
from optexport.signature.index_values import suggest_values
from optexport.signature.signature import Batch

# Cases of user data stop once their results exceed this many bytes, because every target stores as many.
_DATA_BYTES = 1 << 30


def run_in_own_precision(
    run: Call, model: nn.Module, cases: Sequence[Case], state: State, *, declared: bool
) -> Reference:
    """Runs the original on all cases that it accepts, in its own precision.

    In the returned reference, these results also stand for those in float64.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original model.
        state: The model's state before the first call.
        declared: True if the user declared the sizes. Otherwise a size that the model rejects is skipped.

    Raises:
        ModelError: The model fails on the traced or a declared case.
        TraceError: Its results change between calls, or there is not enough memory.
    """
    checked: list[Case] = []
    outputs: list[Outputs] = []
    skipped: list[str] = []
    data_bytes = 0
    for case in cases:
        if case.data and data_bytes > _DATA_BYTES:
            continue
        try:
            if checked:
                case, results, notes = _run_with_less_padding(run, model, case)
                skipped += notes
            else:
                results = _run_repeatably(run, model, case.batch)
        except TraceError:
            raise
        except Exception as error:  # model code may raise anything
            if checked and (case.optional or not declared):
                skipped.append(f"{case.name}: the original model fails, {describe_error(error)}")
                continue
            is_resized = bool(checked) and not case.data
            suggestion = suggest_values(case.batch) if is_resized else None
            error_class = TraceError if is_of_memory(error) else ModelError
            raise error_class(
                f"the original model fails on case {case.name}: {describe_error(error)}",
                location=type(model).__name__,
                hint=f"{suggestion} Otherwise, declare in inputs.dynamic only sizes that the model accepts."
                if suggestion
                else "Declare in inputs.dynamic only sizes that the model accepts."
                if checked
                else "Use inputs with dtypes, values and sizes that the model accepts.",
            ) from error
        if case.extreme and checked and _is_finite(outputs[0]) and not _is_finite(results):
            skipped.append(f"{case.name}: the original model returns NaN or infinity")
            continue
        data_bytes += case.data * sum(tensor.nbytes for tensor in results.values())
        checked.append(case)
        outputs.append(store_results(case, results))
    if changed := state.changed_attributes():
        _check_unaffected(run, model, checked[0].batch, outputs[0], changed)
    return Reference(tuple(checked), tuple(outputs), tuple(outputs), skipped=tuple(skipped))


def _run_with_less_padding(run: Call, model: nn.Module, case: Case) -> tuple[Case, Outputs, list[str]]:
    """Runs a model on a case, with less padding if it rejects that, and returns any notes."""
    try:
        return replace(case, fallbacks=()), run(model, case.batch), []
    except TraceError:
        raise
    except Exception as error:  # model code may raise anything
        if not case.fallbacks:
            raise
        less_padded, *fallbacks = case.fallbacks
        case, results, _ = _run_with_less_padding(
            run, model, replace(case, batch=less_padded, fallbacks=tuple(fallbacks))
        )
        note = f"{case.name}: the original model fails with this padding, so the case has less padding"
        note += f" ({describe_error(error)})"
        return case, results, [note]


def _is_finite(outputs: Outputs) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in outputs.values())


def _run_repeatably(run: Call, model: nn.Module, batch: Batch) -> Outputs:
    """Runs a model, and rejects it if its next call returns other results: their noise floor would be meaningless."""
    with restoring_state(model) as state, DataAccess() as access:
        first = run(model, batch)
        written, changed = state.written_tensors(), state.changed_attributes()
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    written |= {paths[key]: parameter for key, parameter in access.parameters.items() if key in paths}
    with restoring_state(model):
        again = run(model, batch)
    if _find_difference(first, again):
        with restoring_state(model), DataAccess():
            observed = run(model, batch)
        if not _find_difference(first, observed):  # torch.nn.TransformerEncoder takes another way while observed
            with restoring_state(model):
                first, again = again, run(model, batch)
    if difference := _find_difference(first, again):
        if parameters := [path for path, tensor in written.items() if isinstance(tensor, nn.Parameter)]:
            raise _state_error(model, " and ".join(parameters), difference)  # only parameters keep what a call writes
        raise TraceError(
            f"the model returns different results for the same input ({difference})",
            location=type(model).__name__,
            hint="Remove random numbers, and what the model keeps between calls: such results cannot be checked.",
        )
    written = _drop_constant_parameters(run, model, batch, written)
    _check_written_tensors(run, model, batch, first, written)
    if written or changed:
        _check_second_call(run, model, batch, first)
    return first


def _drop_constant_parameters(
    run: Call, model: nn.Module, batch: Batch, written: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Drops the parameters that have the same values after calls with other inputs, such as weights with a mask.

    Args:
        run: Runs a model on a batch and names its outputs.
        written: The tensors that the model writes to, by path.
    """
    before = {path: tensor.clone() for path, tensor in written.items() if isinstance(tensor, nn.Parameter)}
    constant = set[str]()
    for change in (_other_values, _large_values, _large_negative_values) if before else ():
        other = {name: change(tensor) for name, tensor in batch.items()}
        is_same = all(torch.equal(tensor, other[name]) for name, tensor in batch.items())
        if is_same or not _accepts(run, model, other):
            continue
        constant |= before.keys()
        changed = {path for path, value in before.items() if not torch.equal(written[path], value)}
        for path in changed:
            written[path].copy_(before.pop(path))
        constant -= changed
    return {path: tensor for path, tensor in written.items() if path not in constant}


def _accepts(run: Call, model: nn.Module, batch: Batch) -> bool:
    """Returns True if a model runs on a batch."""
    try:
        with restoring_state(model):
            run(model, batch)
    except Exception:  # model code may raise anything
        return False
    return True


def _check_written_tensors(
    run: Call, model: nn.Module, batch: Batch, outputs: Outputs, written: Mapping[str, torch.Tensor]
) -> None:
    """Checks that no output depends on what an earlier call wrote to a tensor of the model.

    Two calls with one batch do not show such state: a cache gets the same values at the same positions again. So each
    tensor that the model writes to is changed before the call, and no output may differ. A tensor that is overwritten
    before it is read is no state.

    Args:
        run: Runs a model on a batch and names its outputs.
        outputs: The results of the batch.
        written: The tensors that the model writes to, by path.

    Raises:
        TraceError: An output differs.
    """
    difference = _find_effect(run, model, batch, outputs, written.values())
    if difference is None:
        return
    for path, tensor in written.items():
        if alone := _find_effect(run, model, batch, outputs, [tensor]):
            raise _state_error(model, path, alone)
    raise _state_error(model, " and ".join(list(written)[:3]), difference)


def _find_effect(
    run: Call, model: nn.Module, batch: Batch, outputs: Outputs, tensors: Collection[torch.Tensor]
) -> str | None:
    """Returns how the outputs differ if tensors of the model have other values before the call, or None."""
    before = [tensor.clone() for tensor in tensors]
    for value in (torch.nan, 1e4, -1e4) if tensors else ():
        try:
            with restoring_state(model):
                for tensor, values in zip(tensors, before, strict=True):
                    tensor.copy_(_changed(values, value))
                difference = _find_difference(outputs, run(model, batch))
        except Exception as error:  # for example for a value that is no valid position
            difference = describe_error(error)
        finally:
            for tensor, values in zip(tensors, before, strict=True):
                tensor.copy_(values)
        if difference is not None:
            return difference
    return None


def _check_second_call(run: Call, model: nn.Module, batch: Batch, outputs: Outputs) -> None:
    """Checks that no output depends on what a call with the same sizes wrote before.

    The first call may create the state (``if self.hidden is None``), and a call with other sizes may start it again.

    Raises:
        TraceError: An output differs.
    """
    with restoring_state(model) as state:
        try:
            run(model, {name: _other_values(tensor) for name, tensor in batch.items()})
        except Exception:  # the model may reject other values
            state.restore()
            run(model, {name: tensor.clone() for name, tensor in batch.items()})  # the model may keep an input
        changed = [*state.changed_attributes(), *state.written_tensors()]
        with restoring_state(model) as second_state:
            _check_unaffected(run, model, batch, outputs, changed)
            written = second_state.written_tensors()
            for path in second_state.move_numbers():  # a counter may have a threshold
                with restoring_state(model):
                    _check_unaffected(run, model, batch, outputs, [path])
        _check_written_tensors(run, model, batch, outputs, written)


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with other values, still valid as ids and positions: items change places, floats are halved."""
    axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
    moved = tensor.clone() if axis is None else tensor.roll(1, axis)
    return moved / 2 if tensor.is_floating_point() or tensor.is_complex() else moved


def _large_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with values that exceed a maximum so far; whole numbers stand in the opposite order."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * 1e6
    return tensor.flip(-1) if tensor.dim() else tensor.clone()


def _large_negative_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with values that fall below a minimum so far, as `_large_values`."""
    large = _large_values(tensor)
    return -large if tensor.is_floating_point() or tensor.is_complex() else large


def _check_unaffected(run: Call, model: nn.Module, batch: Batch, outputs: Outputs, changed: Sequence[str]) -> None:
    """Checks that earlier calls do not change the results of a batch.

    Args:
        run: Runs a model on a batch and names its outputs.
        outputs: The results of the batch before them.
        changed: Paths of the attributes that they changed.

    Raises:
        TraceError: An output differs.
    """
    try:
        difference = _find_difference(outputs, run(model, batch))
    except Exception as error:  # model code may raise anything
        difference = describe_error(error)
    if difference is not None:
        raise _state_error(model, " and ".join(changed[:3]), difference)


def _state_error(model: nn.Module, path: str, difference: str) -> TraceError:
    return TraceError(
        f"the outputs depend on what earlier calls wrote to {path} ({difference})",
        location=type(model).__name__,
        hint=f"Make {path} an input and its next value an output of the model, remove the outputs that depend on it "
        "(keep-outputs), or export the cache of a generative model with [generation].",
    )


def _changed(buffer: torch.Tensor, value: float) -> torch.Tensor:
    """Returns a buffer full of a value; whole numbers move by 1 or by the value, and booleans flip."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full_like(buffer, value)
    if buffer.dtype == torch.bool:
        return ~buffer
    limits = torch.iinfo(buffer.dtype)
    return buffer + (1 if math.isnan(value) else int(min(max(value, limits.min // 2), limits.max // 2)))


def _find_difference(first: Outputs, second: Outputs) -> str | None:
    """Returns the first output that differs by more than rounding, with the distance."""
    for name, tensor in first.items():
        distance = distances.largest(distances.distance(tensor, second[name]))
        scale = distances.max_magnitude(tensor)
        ulps = distances.MIN_FLOOR_ULPS * torch.finfo(tensor.dtype).eps * scale if tensor.is_floating_point() else 0.0
        if distance > 16 * ulps:
            return f"{name} by {distance:.2g}"
    return None
