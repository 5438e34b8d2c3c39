"""Runs the original: in float64 too, and in the other ways that show how it rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import memory
from optexport._utils.module_state import buffers_kept
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

# Noise this many times that of a quiet case that leaves fewer than half the digits is no noise: float64 goes another
# way there. The noise of a trained encoder was seen to differ by 120 times between sizes.
_UNGUIDED_TIMES = 64
# How many times as wide the floor may become by what is float32 in float64 too. Right files were seen to need 3.3.
_MOST_WIDENED = 8


def run_original(
    run: Call,
    model: nn.Module,
    cases: Sequence[Case],
    *,
    declared: bool = True,
    batched: Collection[str] = (),
    in_other_ways: bool = True,
    device: Device = "cpu",
    computation: str | None = None,
) -> Reference:
    """Runs the original on all cases, in its own precision and in float64.

    How it rounds depends on the number of threads, and on how many rows are computed at once, so it is also run with
    one thread only, and on each half of the rows of the first case; the latter where float64 shows that no row has a
    say in another's result. Where files are for another device than the CPU it is always run there too: what it rounds
    by where they run is part of its floor.

    Optional cases that the original refuses are left out, and so are extreme ones of which it makes NaN or infinity,
    and the user's data beyond what there is room for.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original; a copy of it is made for float64.
        declared: Whether the user declared the sizes. If not, those that the original itself refuses are left out.
        batched: The inputs whose first axis is the batch, if it is that of all outputs too.
        in_other_ways: Whether it is also run with one thread and by halves.
        device: Where the files run.
        computation: A digest of what the model computes, under which its results are kept; None where they are not.

    Raises:
        TraceError: The original itself fails on a case that the user declared, or on the device.
    """
    with torch.no_grad(), buffers_kept(model):
        before = float64.versions(model)
        own = run_in_own_precision(run, model, cases, declared=declared)
        writes = before is None or before != float64.versions(model)
        if not any(tensor.is_floating_point() for tensor in [*model.parameters(), *own.outputs[0].values()]):
            return own
        large = not writes and memory.is_large(model)
        why_no_room = _why_no_room(model, copied=not large)
        name = ""
        if computation is not None and why_no_room is None:
            name = _name(model, own, computation, sorted(batched), in_other_ways, devices.described(device))
        if name and (stored := results.read(name)) is not None:
            exact, notes = stored
            unguided, ways, noise = (tuple(notes[key]) for key in ("unguided", "ways", "other_noise"))
            return replace(own, exact=tuple(exact), unguided=unguided, ways=ways, other_noise=noise, name=name)
        rows = batched if in_other_ways else None
        found = _run_in_float64(run, model, replace(own, fallback=why_no_room), rows, upcast=large)
        if device != "cpu":
            found = _run_on(device, run, model, found)
        if name and found.fallback is None:
            notes = {"unguided": found.unguided, "ways": found.ways, "other_noise": found.other_noise}
            results.write(name, found.exact, notes)
            found = replace(found, name=name)
        return found


def _name(model: nn.Module, own: Reference, *ways: object) -> str:
    """What the reference is kept under; empty where nothing is kept.

    What the model computes has a say in it, which is found out anew every time, and so has what it made of its inputs
    in its own precision: a model whose code was changed is never taken for the one before. The latter alone would not
    do, as float32 does not show every change of a number.
    """
    if not store.enabled():
        return ""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    computed = keys.of_tensors([tensors, *(case.batch for case in own.cases), *own.outputs])
    return store.name("reference", computed, [(case.name, case.extreme) for case in own.cases], *ways)


def _run_in_float64(
    run: Call, model: nn.Module, own: Reference, batched: Collection[str] | None, *, upcast: bool = False
) -> Reference:
    """Runs the original in float64, where there is room, and in other ways unless batched is None.

    Args:
        upcast: Whether to make weights float64 one by one, as they are used, rather than a copy of the model.
    """
    in_float64: _Run | None = None
    reference = own
    try:
        if own.fallback is None:
            in_float64, reference = _in_float64(run, model, own, upcast=upcast)
            exact = zip(reference.exact, own.outputs, strict=True)
            if upcast and any(_holds_nan(e) and not _holds_nan(o) for e, o in exact):
                raise FloatingPointError("there may be code that found no weights")
            reference = _guided(reference)
    except Exception as error:  # a model's own code may raise anything; it may also hold a dtype of its own
        if upcast:
            return _run_in_float64(run, model, replace(own, fallback=_why_no_room(model)), batched)
        reference, in_float64 = replace(own, fallback=f"{type(error).__name__}: {first_line(error)}"), None
    return reference if batched is None else _run_in_other_ways(run, model, in_float64, reference, batched)


def _in_float64(run: Call, model: nn.Module, own: Reference, *, upcast: bool) -> tuple[_Run, Reference]:
    """How to run the original in float64, and what it gives.

    Where that is something else than the original gives, what the model's own code makes float32 is float64 too, if
    they are then alike: float32 does not hold the smallest float64, and attention of torch 2.13 in float64 makes
    something else of a mask in float32. Where it is not, what that code rounds to float32 is rounded as the original
    rounds it, and not as a file may: how much that is shows where it is float64 too, and counts as a way of its own.
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
    except Exception as error:  # a model's own code may raise anything, as where it multiplies float32 by float64
        problem, is_right = error, False
    try:
        again = throughout(batch)
        agrees = not _is_lost(again, original)
    except Exception:  # where it wants float32
        agrees = False
    if agrees and not is_right:
        return throughout, replace(own, exact=exact(throughout, again))
    if problem is not None:
        raise problem
    reference = replace(own, exact=exact(plain, traced))
    return plain, _with_float32(reference, throughout) if agrees else reference


def _with_float32(reference: Reference, throughout: _Run) -> Reference:
    """The same, with what the original rounds to float32 in float64 too: the distance from what it gives without.

    It widens no floor by more than `_MOST_WIDENED` times, since a file that rounds as the original does there is far
    nearer, and that of half precision not at all, which has more noise of its own than float32 adds.
    """
    noise: list[dict[str, float]] = []
    for case, exact in zip(reference.cases, reference.exact, strict=True):
        try:
            again = throughout(case.batch)
        except Exception:  # a model's own code may raise anything
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
    """Whether an output in float64 is nothing but NaN, and the original's is not, or shares few of its digits."""
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
        except Exception:  # a model need not take fewer rows: nobody declared that
            outputs = {}
        if outputs:
            ways.append(HALVES)
            measure(0, outputs)
    return replace(reference, ways=tuple(ways), other_noise=tuple(noise))


def _run_on(device: Device, run: Call, model: nn.Module, reference: Reference) -> Reference:
    """Runs the original on a device too, and takes down how it rounds there."""
    noise = [dict(known) for known in reference.other_noise or [{} for _ in reference.cases]]
    try:
        moved = placement.model_to(model, device)
        with devices.whole_float32(device):
            for index, case in enumerate(reference.cases):
                outputs = run(moved, {name: tensor.to(device) for name, tensor in case.batch.items()})
                for name, tensor in outputs.items():
                    there = rounding(tensor.cpu(), reference.exact[index][name])
                    noise[index][name] = max(noise[index].get(name, 0.0), there)
    except Exception as error:  # a model's own code may raise anything
        raise TraceError(
            f"the model itself fails on {device}: {type(error).__name__}: {first_line(error)}",
            location=type(model).__name__,
            hint="Have it make its tensors where its inputs are; or export for the CPU: leave out model.device.",
        ) from error
    return replace(reference, ways=(*reference.ways, f"on {device}"), other_noise=tuple(noise))


def _holds_nan(outputs: Outputs) -> bool:
    return any(bool(torch.isnan(tensor).any()) for tensor in outputs.values())


def _in_halves(run: _Run, batch: Batch, batched: Collection[str]) -> Outputs:
    """Runs either half of a batch's rows, and puts the results together."""
    parts: list[Outputs] = []
    for half in (0, 1):
        rows = {name: batch[name].tensor_split(2)[half] for name in batched}
        parts.append(run({**batch, **rows}))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_close(halves: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two results in float64 differ by no more than its rounding."""
    if halves.shape != whole.shape:
        return False
    scale = distances.largest(distances.finite(whole).abs())
    return distances.largest(distances.distance(halves, whole)) <= 1e-9 * scale


def _why_no_room(model: nn.Module, *, copied: bool = True) -> str | None:
    """Why a model in float64 would not fit in memory; None where it does, or where nobody can tell.

    Args:
        copied: Whether all of it is float64 at a time, or but one of the large weights.
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
    """The same, but compared with the original itself where float64 computes something else.

    A mask of -1e9 on a whole row is all that is left of the scores in float32, but not in float64. The distance there
    is no rounding, and as a floor it would let faults pass everywhere else.
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
    """A batch whose real numbers are float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
