"""Runs of the original in float64, and in run variations that sample its rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import model_memory, torch_settings
from optexport._utils.module_state import restoring_state
from optexport._utils.platform import free_memory
from optexport.cache import keys, results, store
from optexport.errors import TraceError, describe_error
from optexport.parity import distances, float64_model
from optexport.parity.cases.case import Case
from optexport.parity.own_precision_run import run_in_own_precision
from optexport.parity.reference import HALVES, THROUGHOUT, Call, Outputs, Reference, measure_noise, store_results
from optexport.runtime import devices, placement
from optexport.runtime.devices import Device
from optexport.signature.signature import Batch

_Run = Callable[[Batch], Outputs]

# Noise this many times above the noise of a quiet case, with fewer than half the digits left, is not rounding: float64
# takes another path there. The noise of a trained encoder differs by up to 120 times between sizes.
_MISMATCH_TIMES = 64
# Largest factor by which rounding to float32 in model code may widen the noise floor. Correct files need up to 3.3.
_MAX_WIDENED = 8


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
    with torch.no_grad(), restoring_state(model) as state:
        versions_before = float64_model.weight_versions(model)
        own = run_in_own_precision(run, model, cases, state, declared=declared)
        writes_weights = versions_before is None or versions_before != float64_model.weight_versions(model)
        if not any(tensor.is_floating_point() for tensor in [*model.parameters(), *own.outputs[0].values()]):
            return own
        large = not writes_weights and model_memory.is_large(model)
        memory_problem = find_memory_problem(model, copied=not large)
        cache_key = ""
        if computation is not None and memory_problem is None:
            cache_key = _cache_key(
                model, own, computation, None if batched is None else sorted(batched), devices.describe(device)
            )
        if cache_key and (stored := results.read(cache_key)) is not None:
            exact, notes = stored
            return replace(
                own,
                exact=tuple(exact),
                float64_mismatches=tuple(notes["float64_mismatches"]),
                variations=tuple(notes["variations"]),
                variation_noise=tuple(notes["variation_noise"]),
                cache_key=cache_key,
            )
        reference = _run_in_float64(run, model, replace(own, fallback=memory_problem), batched, upcast=large)
        if device != "cpu":
            reference = _run_on_device(device, run, model, reference)
        if cache_key and reference.fallback is None:
            notes = {
                "float64_mismatches": reference.float64_mismatches,
                "variations": reference.variations,
                "variation_noise": reference.variation_noise,
            }
            results.write(cache_key, reference.exact, notes)
            reference = replace(reference, cache_key=cache_key)
        return reference


def _cache_key(model: nn.Module, own: Reference, *settings: object) -> str:
    """Returns the cache key of the reference, or an empty string if caching is off.

    The key includes the computation and the outputs in the original's precision, so changed model code never matches.
    The outputs alone do not suffice, because float32 does not show every change of a number.
    """
    if not store.enabled():
        return ""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    computed = keys.of_tensors([tensors, *(case.batch for case in own.cases), *own.outputs])
    return store.entry_key("reference", computed, [(case.name, case.extreme) for case in own.cases], *settings)


def _run_in_float64(
    run: Call, model: nn.Module, own: Reference, batched: Collection[str] | None, *, upcast: bool = False
) -> Reference:
    """Runs the original in float64 if possible, and in run variations unless batched is None."""
    run_float64: _Run | None = None
    reference = own
    try:
        if own.fallback is None:
            run_float64, reference = _run_cases_in_float64(run, model, own, upcast=upcast)
            exact = zip(reference.exact, own.outputs, strict=True)
            if upcast and any(_has_nan(e) and not _has_nan(o) for e, o in exact):
                raise FloatingPointError("NaN in float64 only: some code may bypass the upcast weights")
            reference = _replace_mismatches(reference)
    except Exception as error:  # model code may raise anything, for example because of a fixed dtype
        if upcast:
            return _run_in_float64(run, model, replace(own, fallback=find_memory_problem(model)), batched)
        reference, run_float64 = replace(own, fallback=describe_error(error)), None
    return reference if batched is None else _run_variations(run, model, run_float64, reference, batched)


def _run_cases_in_float64(run: Call, model: nn.Module, own: Reference, *, upcast: bool) -> tuple[_Run, Reference]:
    """Returns a float64 runner and its results on all cases.

    Model code may create float32 tensors within the float64 run. If the float64 outputs then differ from the
    original's, float32 is replaced by float64 throughout, provided that this agrees. Two reasons: float32 cannot
    represent the smallest float64, and attention in torch 2.13 handles a float32 mask in float64 differently. If the
    outputs agree, the float32 rounding in model code is the same as the original's, but a file may round elsewhere. The
    run with float64 throughout measures that rounding and counts as a run variation.
    """
    double = float64_model.copy_upcasting_weights(model) if upcast else float64_model.copy_to_float64(model)

    def plain(batch: Batch) -> Outputs:
        return run(double, to_float64(batch))

    def throughout(batch: Batch) -> Outputs:
        with float64_model.float64_throughout():
            return plain(batch)

    def exact(run_float64: _Run, traced: Outputs) -> tuple[Outputs, ...]:
        first, *rest = own.cases
        return store_results(first, traced), *(store_results(case, run_float64(case.batch)) for case in rest)

    batch, original, float32 = own.cases[0].batch, own.outputs[0], float64_model.Float32Detector()
    problem: Exception | None = None
    try:
        with float32:
            traced = plain(batch)
        is_right = not _is_mismatch(traced, original)
        if is_right and not float32.detected:
            return plain, replace(own, exact=exact(plain, traced))
    except Exception as error:  # model code may raise anything, for example if it multiplies float32 by float64
        problem, is_right = error, False
    try:
        again = throughout(batch)
        agrees = not _is_mismatch(again, original)
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

    It widens a noise floor by at most `_MAX_WIDENED` times, because a correct file is much nearer. It does not widen a
    noise floor of half precision, which exceeds the noise of float32.
    """
    noise: list[dict[str, float]] = []
    for case, exact in zip(reference.cases, reference.exact, strict=True):
        try:
            again = throughout(case.batch)
        except Exception:  # model code may raise anything
            return reference
        noise.append({n: measure_noise(again[n], tensor) for n, tensor in exact.items() if tensor.is_floating_point()})
    for name in noise[0]:
        ordinary = [index for index, case in enumerate(reference.cases) if not case.extreme]
        eps = torch.finfo(reference.outputs[0][name].dtype).eps
        scale = max(distances.scale(reference.outputs[i][name], reference.exact[i][name]) for i in ordinary)
        own = max(distances.MIN_FLOOR_ULPS * eps * scale, *(reference.noise[index][name] for index in ordinary))
        limit = 0.0 if eps > torch.finfo(torch.float32).eps else _MAX_WIDENED * own
        for index in ordinary:
            noise[index][name] = min(noise[index][name], limit)
    return replace(reference, variations=(THROUGHOUT,), variation_noise=tuple(noise))


def _is_mismatch(exact: Outputs, original: Outputs) -> bool:
    """Returns True if a float64 output is all NaN or shares few digits with the original's."""
    return any(
        bool(exact[name].isnan().all() & ~tensor.isnan().all())
        or _relative_noise(tensor, exact[name]) > torch.finfo(tensor.dtype).eps ** 0.5
        for name, tensor in original.items()
        if tensor.is_floating_point()
    )


def _run_variations(
    run: Call, model: nn.Module, run_float64: _Run | None, reference: Reference, batched: Collection[str]
) -> Reference:
    variations = [*reference.variations]
    noise = [dict(noise_before) for noise_before in reference.variation_noise or [{} for _ in reference.cases]]

    def run_native(batch: Batch) -> Outputs:
        return run(model, batch)

    if torch.get_num_threads() > 1:
        variations.append("with one thread")
        with torch_settings.threads(1):
            for index, case in enumerate(reference.cases):
                _raise_noise(noise[index], run_native(case.batch), reference.exact[index])
    first = reference.cases[0].batch
    if run_float64 is not None and batched and all(first[name].shape[0] > 1 for name in batched):
        try:
            together, halves = run_float64(first), _in_halves(run_float64, first, batched)
            is_independent = all(_is_close(halves[name], tensor) for name, tensor in together.items())
            outputs = _in_halves(run_native, first, batched) if is_independent else {}
        except Exception:  # the batch axis is undeclared, so the model may reject fewer rows
            outputs = {}
        if outputs:
            variations.append(HALVES)
            _raise_noise(noise[0], outputs, reference.exact[0])
    return replace(reference, variations=tuple(variations), variation_noise=tuple(noise))


def _raise_noise(noise: dict[str, float], outputs: Outputs, exact: Outputs) -> None:
    """Raises the noise of a case to the distance of another run from float64, for each output."""
    for name, tensor in outputs.items():
        noise[name] = max(noise.get(name, 0.0), measure_noise(tensor.cpu(), exact[name]))


def _run_on_device(device: Device, run: Call, model: nn.Module, reference: Reference) -> Reference:
    """Runs the original on a device, and adds its rounding there to the noise."""
    noise = [dict(noise_before) for noise_before in reference.variation_noise or [{} for _ in reference.cases]]
    try:
        moved = placement.move_model(model, device)
        with devices.full_float32(device):
            for index, case in enumerate(reference.cases):
                outputs = run(moved, {name: tensor.to(device) for name, tensor in case.batch.items()})
                _raise_noise(noise[index], outputs, reference.exact[index])
    except Exception as error:  # model code may raise anything
        raise TraceError(
            f"the original model fails on {device}: {describe_error(error)}",
            location=type(model).__name__,
            hint="Create tensors in the model's code on the device of its inputs, or remove model.device to export for "
            "the CPU.",
        ) from error
    return replace(reference, variations=(*reference.variations, f"on {device}"), variation_noise=tuple(noise))


def _has_nan(outputs: Outputs) -> bool:
    return any(bool(torch.isnan(tensor).any()) for tensor in outputs.values())


def _in_halves(run: _Run, batch: Batch, batched: Collection[str]) -> Outputs:
    """Runs each half of a batch's rows and concatenates the results."""
    parts: list[Outputs] = []
    for half in (0, 1):
        rows = {name: batch[name].tensor_split(2)[half] for name in batched}
        parts.append(run({**batch, **rows}))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_close(halves: torch.Tensor, together: torch.Tensor) -> bool:
    """Returns True if two float64 results differ by at most float64 rounding."""
    if halves.shape != together.shape:
        return False
    scale = distances.max_magnitude(together)
    return distances.largest(distances.distance(halves, together)) <= 1e-9 * scale


def find_memory_problem(model: nn.Module, *, copied: bool = True) -> str | None:
    """Returns the reason why a model in float64 exceeds the free memory, or None.

    `copied` is False if only one large weight at a time is in float64.
    """
    copies, shared = 0, 0
    for tensor in (*model.parameters(), *model.buffers()):
        size = 8 * tensor.numel()
        if not copied and float64_model.is_shared(tensor):
            shared = max(shared, size)
        else:
            copies += size
    needed = copies + shared
    available = free_memory()
    if needed <= available:
        return None
    return f"the weights need {needed / 1e9:.1f} GB in float64, but only {available / 1e9:.1f} GB of memory are free"


def _replace_mismatches(reference: Reference) -> Reference:
    """Replaces float64 by the original's output if float64 computes something else.

    Example: a mask of -1e9 on a whole row erases the scores in float32, but not in float64. That distance is not
    rounding, and in the noise floor it would let faults pass on other cases.
    """
    exact, mismatches = [dict(outputs) for outputs in reference.exact], list[str]()
    for name, traced in reference.outputs[0].items():
        if not traced.is_floating_point():
            continue
        noise = [_relative_noise(o[name], e[name]) for o, e in zip(reference.outputs, exact, strict=True)]
        ordinary = [value for value, case in zip(noise, reference.cases, strict=True) if not case.extreme]
        quiet, half_the_digits = sorted(ordinary)[len(ordinary) // 4], torch.finfo(traced.dtype).eps ** 0.5
        for index, case in enumerate(reference.cases):
            if not case.extreme and noise[index] > max(_MISMATCH_TIMES * quiet, half_the_digits):
                exact[index][name] = reference.outputs[index][name].double()
                mismatches.append(f"{name} at {case.name}")
    return replace(reference, exact=tuple(exact), float64_mismatches=tuple(mismatches))


def _relative_noise(original: torch.Tensor, exact: torch.Tensor) -> float:
    scale = distances.scale(original, exact)
    return measure_noise(original, exact) / scale if scale else 0.0


def to_float64(batch: Batch) -> Batch:
    """Returns a batch with its floating point inputs in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
