"""Times the files of a run and the original model for a few seconds, so that every run shows its gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from optexport._utils import model_memory
from optexport.bundle.measurements import GainRecord
from optexport.exporters.registry import get_format
from optexport.pipeline.bundle_writer import RunResults

# Limits for all files together, opening them included. `[bench]` measures properly.
SECONDS = 3.0
ROUNDS = 9
# A turn makes further calls until this many seconds have passed. Its first call is not timed, because the threads of
# the runtime before it may still be spinning. The fastest call counts, and every other turn gives PyTorch one thread:
# on a busy machine the threads of a call wait for each other, and small models take many times as long with several.
_TURN = 0.02


def measure_gain(results: RunResults, draft: Path) -> list[GainRecord]:
    """Times the files and the original model on the traced batch, in turns.

    Args:
        draft: The folder of the files.

    Returns:
        A record for each file; empty on a GPU, without timed files, or if the model is too large or too slow.
    """
    job, example = results.traced.job, results.traced.job.example
    artifacts = [artifact for artifact in results.artifacts if get_format(artifact.format).is_timed]
    if job.config.model.device != "cpu" or model_memory.is_large(job.loaded.model) or not artifacts:
        return []
    end = time.perf_counter() + SECONDS
    calls: list[Callable[[], object]] = [partial(results.traced.call, job.loaded.model, example)]
    for artifact in artifacts:
        if time.perf_counter() >= end:
            return []
        run = get_format(artifact.format).open(draft / artifact.path, results.traced.signature.output_names, "cpu")
        calls.append(partial(run, example))
    seconds = _time_in_turns(calls, end)
    if seconds is None:
        return []
    original, *files = seconds
    return [
        GainRecord(format=artifact.format, ms=1e3 * file, original_ms=1e3 * original)
        for artifact, file in zip(artifacts, files, strict=True)
    ]


def _time_in_turns(calls: list[Callable[[], object]], end: float) -> list[float] | None:
    """Returns the seconds of each call at its fastest; None if the time ends before each had a turn."""
    turns: list[float] = []
    threads = torch.get_num_threads()
    try:
        for index, call in enumerate(calls * ROUNDS):
            if time.perf_counter() >= end:
                break
            torch.set_num_threads(1 if index // len(calls) % 2 else threads)
            turns.append(_time_turn(call))
    finally:
        torch.set_num_threads(threads)
    rounds = len(turns) // len(calls)
    complete = turns[: rounds * len(calls)]
    return [min(complete[i :: len(calls)]) for i in range(len(calls))] if rounds else None


def _time_turn(call: Callable[[], object]) -> float:
    """Returns the seconds of the fastest call of a turn."""
    call()
    times: list[float] = []
    end = time.perf_counter() + _TURN
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
