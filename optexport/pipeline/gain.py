"""Times the files of a run and the original model for a few seconds, so that every run shows its gain."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn

from optexport._utils import model_memory, signals, torch_settings
from optexport._utils.markup import size_in_words
from optexport._utils.module_state import restoring_state
from optexport.bench.artifact import Artifact, list_artifacts
from optexport.bench.comparison import compare
from optexport.bench.workload import Workload, from_signature
from optexport.bundle.measurements import GainRecord
from optexport.errors import describe_error, short_line
from optexport.exporters.format import Loader
from optexport.exporters.registry import get_format
from optexport.pipeline.bundle_writer import RunResults
from optexport.signature.signature import Batch, as_arguments
from optexport.tracing import model_run

# Limits for all files together, opening them included. `[bench]` measures properly.
SECONDS = 3.0
ROUNDS = 15
# Fewer rounds give no interval.
LEAST_ROUNDS = 3
# A turn makes further calls until this many seconds have passed; its fastest call counts.
_TURN = 0.02
_MAX_REASON = 100
# TorchScript optimizes a file at the second call.
_WARMUP_CALLS = 2


def measure_gain(results: RunResults, draft: Path) -> RunResults:
    """Times the files and the original model on the traced batch, in turns, with the threads of `[bench]`.

    Args:
        draft: The folder of the files.

    Returns:
        The results with a record for each file, or with the reason why there is none.
    """
    records = [record for record in results.artifacts if get_format(record.format).is_timed]
    job, signature = results.traced.job, results.traced.signature
    model, threads = job.loaded.model, job.config.bench.threads
    if job.config.model.device != "cpu":
        return replace(results, gain_skipped="the model runs on a GPU")
    if not records:
        return replace(results, gain_skipped="PyTorch itself runs these files")
    if model_memory.is_large(model):
        return replace(
            results, gain_skipped=f"the model has {size_in_words(model_memory.weight_bytes(model))} of weights"
        )
    artifacts = list_artifacts(records, (list(job.example), signature.output_names), draft, "")
    end = time.perf_counter() + SECONDS
    with signals.temporary_folder() as folder, timing_settings(model, threads):
        try:
            (workload,) = from_signature(job.example, signature, [], folder, "inputs")
            original_call = _open(read_eager(model, workload.file), end)
            files, skipped = _open_files(artifacts, workload, threads, end)
            rounds = _time_in_turns([original_call, *files.values()], end) if files else None
        except Exception as error:  # the model's code may raise anything, and the files are checked already
            files, rounds = {}, None
            skipped = short_line(f"a call failed: {describe_error(error)}", _MAX_REASON)
    if rounds is None:
        slow = f"{LEAST_ROUNDS} rounds of PyTorch and the files take more than {SECONDS:g} s"
        return replace(results, gain_skipped=skipped or slow)
    sizes = workload.label if workload.sizes else _shapes(job.example)
    original, *times = rounds.T
    gain = [_record(artifact, original, file, sizes, threads) for artifact, file in zip(files, times, strict=True)]
    return replace(results, gain=tuple(gain), gain_skipped=skipped)


def _shapes(batch: Batch) -> str:
    return ",".join(f"{name}={'x'.join(map(str, tensor.shape))}" for name, tensor in batch.items())


def _record(
    artifact: Artifact, original: npt.NDArray[np.float64], file: npt.NDArray[np.float64], sizes: str, threads: int
) -> GainRecord:
    """Compares the seconds of each round. Each round counts as a launch, because all rounds share one process."""
    comparison = compare(original[:, np.newaxis], file[:, np.newaxis])
    return GainRecord(
        format=artifact.format,
        ms=1e3 * float(np.median(file)),
        original_ms=1e3 * float(np.median(original)),
        speedup=comparison.speedup,
        low=comparison.low,
        high=comparison.high,
        sizes=sizes,
        threads=threads,
    )


@contextmanager
def timing_settings(model: nn.Module, threads: int) -> Iterator[None]:
    """Restores at the end what the model and the runtimes change in this process."""
    with ExitStack() as stack:
        stack.enter_context(restoring_state(model))
        stack.enter_context(model_run.eager(model))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch_settings.preserved())
        stack.enter_context(torch_settings.threads(threads))
        torch.set_grad_enabled(False)
        yield


def read_eager(model: nn.Module, inputs: Path) -> Loader:
    """Reads inputs for the original model, as `Format.prepare_benchmark` does for a file.

    Its calls copy the inputs only if the model changes them: files do not copy theirs, and copies take time.
    """
    batch = load_file(inputs)

    def run_on_copies() -> dict[str, torch.Tensor]:
        copies = {name: tensor.clone() for name, tensor in batch.items()}
        model(**as_arguments(copies))
        return copies

    def load() -> Callable[[], object]:
        is_changed = any(tensor._version for tensor in run_on_copies().values())
        return run_on_copies if is_changed else partial(model, **as_arguments(batch))

    return load


def _open_files(
    artifacts: Sequence[Artifact], workload: Workload, threads: int, end: float
) -> tuple[dict[Artifact, Callable[[], object]], str]:
    """Returns a call of each file that can be timed, and the reason why another one cannot; empty if all can.

    Returns no calls if the time is too short.
    """
    calls: dict[Artifact, Callable[[], object]] = {}
    skipped = ""
    for artifact in artifacts:
        if time.perf_counter() >= end:
            return {}, skipped
        try:
            read = get_format(artifact.format).prepare_benchmark(artifact.benchmark(threads))
            calls[artifact] = _open(read(workload.file), end)
        except Exception as error:  # a runtime may raise anything
            skipped = short_line(f"{artifact.name} cannot be timed: {describe_error(error)}", _MAX_REASON)
    return calls, skipped


def _open(opener: Loader, end: float) -> Callable[[], object]:
    """Opens a file, and makes its first calls while there is time."""
    call = opener()
    for _ in range(_WARMUP_CALLS):
        if time.perf_counter() < end:
            call()
    return call


def _time_in_turns(calls: Sequence[Callable[[], object]], end: float) -> npt.NDArray[np.float64] | None:
    """Returns the seconds of each call in its turns, of shape [rounds, calls]; None if the time is too short."""
    turns: list[float] = []
    while len(turns) < ROUNDS * len(calls) and time.perf_counter() < end:
        turns.append(_time_turn(calls[len(turns) % len(calls)]))
    rounds = len(turns) // len(calls)
    return np.array(turns[: rounds * len(calls)]).reshape(rounds, -1) if rounds >= LEAST_ROUNDS else None


def _time_turn(call: Callable[[], object]) -> float:
    """Returns the seconds of the fastest call of a turn."""
    times: list[float] = []
    end = time.perf_counter() + _TURN
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
