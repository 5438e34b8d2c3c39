"""Runs of the original in float64, and in run variations that sample its rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import memory
from optexport._utils.module_state import restoring_buffers
from optexport._utils.platform import free_memory
from optexport.cache import keys, results, store
from optexport.errors import TraceError, first_line
from optexport.parity import distances, float64
from optexport.parity.cases import Case
from optexport.parity.native_run import run_in_own_precision
from optexport.parity.reference import HALVES, THROUGHOUT, Call, Outputs, Reference, kept, rounding
from optexport.runtime import devices, placement
from optexport.runtime.devices import Device
from optexport.signature.signature import Batch

_Run = Callable[[Batch], Outputs]

# Noise this many times above the noise of a quiet case, with fewer than half the digits left, is not rounding: float64
# takes another path there. The noise of a trained encoder differs by up to 120 times between sizes.
_UNGUIDED_TIMES = 64
# Largest factor by which rounding to float32 in model code may widen the noise floor. Correct files need up to 3.3.
_MOST_WIDENED = 8


def run_original(
    run: Call,
    model: nn.Module,
    cases: Sequence[Case],
    *,
    declared: bool = True,
    batched: Collection[str] | None = (),
    device: Device = "cpu",
    computation: str | None = None,
) -> Reference:
    """Runs the original on all cases, in its own precision and in float64.

    Rounding depends on the number of threads and of rows. The original therefore also runs with one thread, and on each
    half of the first case's rows. The halves count only if float64 shows that no row affects another row's result. If
    the files run on another device than the CPU, the original also runs there, so that its noise floor includes that
    rounding.

    Skipped cases: optional ones that the original rejects, extreme ones with NaN or infinity, and user data beyond the
    size limit.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original model. float64 uses a copy.
        declared: True if the user declared the sizes. Otherwise sizes that the original rejects are skipped.
        batched: Inputs whose first axis is the batch axis, if that is the first axis of all outputs too. None skips
            the runs with one thread and by halves.
        device: Device that the files run on.
        computation: Digest of the model's computation, part of the cache key; None disables the cache.

    Raises:
        TraceError: The original fails on a declared case or on the device.
    """
    with torch.no_grad(), restoring_buffers(model):
        before = float64.versions(model)
        own = run_in_own_precision(run, model, cases, declared=declared)
        writes = before is None or before != float64.versions(model)
        if not any(tensor.is_floating_point() for tensor in [*model.parameters(), *own.outputs[0].values()]):
            return own
        large = not writes and memory.is_large(model)
        why_no_room = _why_no_room(model, copied=not large)
        name = ""
        if computation is not None and why_no_room is None:
            name = _name(
                model, own, computation, None if batched is None else sorted(batched), devices.described(device)
            )
        if name and (stored := results.read(name)) is not None:
            exact, notes = stored
            unguided, ways, noise = (tuple(notes[key]) for key in ("unguided", "ways", "other_noise"))
            return replace(own, exact=tuple(exact), unguided=unguided, ways=ways, other_noise=noise, name=name)
        found = _run_in_float64(run, model, replace(own, fallback=why_no_room), batched, upcast=large)
        if device != "cpu":
            found = _run_on(device, run, model, found)
        if name and found.fallback is None:
            notes = {"unguided": found.unguided, "ways": found.ways, "other_noise": found.other_noise}
            results.write(name, found.exact, notes)
            found = replace(found, name=name)
        return found


def _name(model: nn.Module, own: Reference, *ways: object) -> str:
    """Returns the cache key of the reference, or an empty string if caching is off.

    The key includes the computation and the outputs in the original's precision, so changed model code never matches.
    The outputs alone do not suffice, because float32 does not show every change of a number.
    """
    if not store.enabled():
        return ""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    computed = keys.of_tensors([tensors, *(case.batch for case in own.cases), *own.outputs])
    return store.name("reference", computed, [(case.name, case.extreme) for case in own.cases], *ways)


def _run_in_float64(
    run: Call, model: nn.Module, own: Reference, batched: Collection[str] | None, *, upcast: bool = False
) -> Reference:
    """Runs the original in float64 if possible, and in run variations unless batched is None."""
    in_float64: _Run | None = None
    reference = own
    try:
        if own.fallback is None:
            in_float64, reference = _in_float64(run, model, own, upcast=upcast)
            exact = zip(reference.exact, own.outputs, strict=True)
            if upcast and any(_holds_nan(e) and not _holds_nan(o) for e, o in exact):
                raise FloatingPointError("there may be code that found no weights")
            reference = _guided(reference)
    except Exception as error:  # model code may raise anything, for example because of a fixed dtype
        if upcast:
            return _run_in_float64(run, model, replace(own, fallback=_why_no_room(model)), batched)
        reference, in_float64 = replace(own, fallback=f"{type(error).__name__}: {first_line(error)}"), None
    return reference if batched is None else _run_in_other_ways(run, model, in_float64, reference, batched)


def _in_float64(run: Call, model: nn.Module, own: Reference, *, upcast: bool) -> tuple[_Run, Reference]:
    """Returns a float64 runner and its results on all cases.

    Model code may create float32 tensors within the float64 run. If the float64 outputs then differ from the
    original's, float32 is replaced by float64 throughout, provided that this agrees. Two reasons: float32 cannot
    represent the smallest float64, and attention in torch 2.13 handles a float32 mask in float64 differently. If the
    outputs agree, the float32 rounding in model code is the same as the original's, but a file may round elsewhere. The
    run with float64 throughout measures that rounding and counts as a run variation.
    """
    double = float64.upcasting(model) if upcast else float64.copied(model)

    def plain(batch: Batch) -> Outputs:
        return run(double, in_double(batch))

    def throughout(batch: Batch) -> Outputs:
        with float64.float64_throughout():
            return plain(batch)

    def exact(way: _Run, traced: Outputs) -> tuple[Outputs, ...]:
        first, *others = own.cases
        return kept(first, traced), *(kept(case, way(case.batch)) for case in others)

    batch, original, float32 = own.cases[0].batch, own.outputs[0], float64.NotesFloat32()
    problem: Exception | None = None
    try:
        with float32:
            traced = plain(batch)
        is_right = not _is_lost(traced, original)
        if is_right and not float32.found:
            return plain, replace(own, exact=exact(plain, traced))
    except Exception as error:  # model code may raise anything, for example if it multiplies float32 by float64
        problem, is_right = error, False
    try:
        again = throughout(batch)
        agrees = not _is_lost(again, original)
    except Exception:  # model code that requires float32
        agrees = False
    if agrees and not is_right:
        return throughout, replace(own, exact=exact(throughout, again))
    if problem is not None:
        raise problem
    reference = replace(own, exact=exact(plain, traced))
    return plain, _with_float32(reference, throughout) if agrees else reference


def _with_float32(reference: Reference, throughout: _Run) -> Reference:
    """Adds the noise of rounding to float32 in model code, measured with float64 throughout.

    It widens a noise floor by at most `_MOST_WIDENED` times, because a correct file is much nearer. It does not widen a
    noise floor of half precision, which exceeds the noise of float32.
    """
    noise: list[dict[str, float]] = []
    for case, exact in zip(reference.cases, reference.exact, strict=True):
        try:
            again = throughout(case.batch)
        except Exception:  # model code may raise anything
            return reference
        noise.append({n: rounding(again[n], tensor) for n, tensor in exact.items() if tensor.is_floating_point()})
    for name in noise[0]:
        ordinary = [index for index, case in enumerate(reference.cases) if not case.extreme]
        eps = torch.finfo(reference.outputs[0][name].dtype).eps
        scale = max(distances.scale(reference.outputs[i][name], reference.exact[i][name]) for i in ordinary)
        own = max(distances.LEAST_FLOOR_ULPS * eps * scale, *(reference.noise[index][name] for index in ordinary))
        most = 0.0 if eps > torch.finfo(torch.float32).eps else _MOST_WIDENED * own
        for index in ordinary:
            noise[index][name] = min(noise[index][name], most)
    return replace(reference, ways=(THROUGHOUT,), other_noise=tuple(noise))


def _is_lost(exact: Outputs, original: Outputs) -> bool:
    """Checks if a float64 output is all NaN or shares few digits with the original's."""
    return any(
        bool(exact[name].isnan().all() & ~tensor.isnan().all())
        or _relative_noise(tensor, exact[name]) > torch.finfo(tensor.dtype).eps ** 0.5
        for name, tensor in original.items()
        if tensor.is_floating_point()
    )


def _run_in_other_ways(
    run: Call, model: nn.Module, in_float64: _Run | None, reference: Reference, batched: Collection[str]
) -> Reference:
    ways = [*reference.ways]
    noise = [dict(known) for known in reference.other_noise or [{} for _ in reference.cases]]

    def in_own(batch: Batch) -> Outputs:
        return run(model, batch)

    def measure(index: int, outputs: Outputs) -> None:
        for name, tensor in outputs.items():
            noise[index][name] = max(noise[index].get(name, 0.0), rounding(tensor, reference.exact[index][name]))

    if (threads := torch.get_num_threads()) > 1:
        ways.append("with one thread")
        try:
            torch.set_num_threads(1)
            for index, case in enumerate(reference.cases):
                measure(index, in_own(case.batch))
        finally:
            torch.set_num_threads(threads)
    first = reference.cases[0].batch
    if in_float64 is not None and batched and all(first[name].shape[0] > 1 for name in batched):
        try:
            whole, halves = in_float64(first), _in_halves(in_float64, first, batched)
            alone = all(_is_close(halves[name], tensor) for name, tensor in whole.items())
            outputs = _in_halves(in_own, first, batched) if alone else {}
        except Exception:  # the batch axis is undeclared, so the model may reject fewer rows
            outputs = {}
        if outputs:
            ways.append(HALVES)
            measure(0, outputs)
    return replace(reference, ways=tuple(ways), other_noise=tuple(noise))


def _run_on(device: Device, run: Call, model: nn.Module, reference: Reference) -> Reference:
    """Runs the original on a device, and adds its rounding there to the noise."""
    noise = [dict(known) for known in reference.other_noise or [{} for _ in reference.cases]]
    try:
        moved = placement.model_to(model, device)
        with devices.whole_float32(device):
            for index, case in enumerate(reference.cases):
                outputs = run(moved, {name: tensor.to(device) for name, tensor in case.batch.items()})
                for name, tensor in outputs.items():
                    there = rounding(tensor.cpu(), reference.exact[index][name])
                    noise[index][name] = max(noise[index].get(name, 0.0), there)
    except Exception as error:  # model code may raise anything
        raise TraceError(
            f"the model itself fails on {device}: {type(error).__name__}: {first_line(error)}",
            location=type(model).__name__,
            hint="Have it make its tensors where its inputs are; or export for the CPU: leave out model.device.",
        ) from error
    return replace(reference, ways=(*reference.ways, f"on {device}"), other_noise=tuple(noise))


def _holds_nan(outputs: Outputs) -> bool:
    return any(bool(torch.isnan(tensor).any()) for tensor in outputs.values())


def _in_halves(run: _Run, batch: Batch, batched: Collection[str]) -> Outputs:
    """Runs each half of a batch's rows and concatenates the results."""
    parts: list[Outputs] = []
    for half in (0, 1):
        rows = {name: batch[name].tensor_split(2)[half] for name in batched}
        parts.append(run({**batch, **rows}))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_close(halves: torch.Tensor, whole: torch.Tensor) -> bool:
    """Checks if two float64 results differ by at most float64 rounding."""
    if halves.shape != whole.shape:
        return False
    scale = distances.largest(distances.finite(whole).abs())
    return distances.largest(distances.distance(halves, whole)) <= 1e-9 * scale


def _why_no_room(model: nn.Module, *, copied: bool = True) -> str | None:
    """Returns the reason why a model in float64 exceeds the free memory, or None.

    `copied` is False if only one large weight at a time is in float64.
    """
    sizes: dict[bool, list[int]] = {True: [0], False: [0]}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes[not copied and float64.is_shared(tensor)].append(8 * tensor.numel())
    needed = sum(sizes[False]) + max(sizes[True])
    available = free_memory()
    if needed <= available:
        return None
    return f"its weights take {needed / 1e9:.1f} GB in float64, and {available / 1e9:.1f} GB of memory are free"


def _guided(reference: Reference) -> Reference:
    """Replaces float64 by the original's output if float64 computes something else.

    Example: a mask of -1e9 on a whole row erases the scores in float32, but not in float64. That distance is not
    rounding, and in the noise floor it would let faults pass on other cases.
    """
    exact, unguided = [dict(outputs) for outputs in reference.exact], []
    for name, traced in reference.outputs[0].items():
        if not traced.is_floating_point():
            continue
        noise = [_relative_noise(o[name], e[name]) for o, e in zip(reference.outputs, exact, strict=True)]
        ordinary = [value for value, case in zip(noise, reference.cases, strict=True) if not case.extreme]
        quiet, half_the_digits = sorted(ordinary)[len(ordinary) // 4], torch.finfo(traced.dtype).eps ** 0.5
        for index, case in enumerate(reference.cases):
            if not case.extreme and noise[index] > max(_UNGUIDED_TIMES * quiet, half_the_digits):
                exact[index][name] = reference.outputs[index][name].double()
                unguided.append(f"{name} at {case.name}")
    return replace(reference, exact=tuple(exact), unguided=tuple(unguided))


def _relative_noise(original: torch.Tensor, exact: torch.Tensor) -> float:
    scale = distances.scale(original, exact)
    return rounding(original, exact) / scale if scale else 0.0


def in_double(batch: Batch) -> Batch:
    """Returns a batch with its floating point inputs in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
