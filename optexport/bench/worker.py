"""Runs one artifact in its own process, importing only what its runtime needs."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from optexport.errors import OptexportError, first_line
from optexport.exporters.format import Benchmark, Loader
from optexport.exporters.registry import get_format

# Seconds; shorter samples would measure the clock's resolution and the cost of reading it.
_MIN_SAMPLE = 1e-4
_USUAL_SAMPLES = 3
# No call starts after a turn took this many times its length. Three calls of a large model may take minutes.
_MAX_OVERRUN = 10
# TorchScript optimizes a file at the second call, by profiles of the first.
_WARMUP_CALLS = 2


@dataclass(frozen=True)
class Task:
    """What a worker measures.

    Attributes:
        format: Name of the format.
        benchmark: The file and its settings.
    """

    format: str
    benchmark: Benchmark


def main() -> None:
    """Serves orders over the connection of the file descriptor ``sys.argv[1]``."""
    with Connection(int(sys.argv[1])) as connection:
        try:
            _serve(connection)
        except EOFError:  # the parent process has finished
            return
        except Exception as error:  # a runtime may raise anything; the parent adds the location
            kind, message = type(error).__name__, first_line(error)
            is_complete = isinstance(error, OptexportError) or message.startswith(kind)
            connection.send((False, message if is_complete else f"{kind}: {message}"))


def _serve(connection: Connection) -> None:
    task = connection.recv()
    before: dict[str, int] | None = None
    calls = TimedCalls(get_format(task.format).prepare_benchmark(task.benchmark))
    connection.send((True, None))
    while True:
        order, argument = connection.recv()
        if order == "load":
            before = _memory(reset_peak=True)
        answer = calls.answer(order, argument)
        if order == "peak" and before is not None and (after := _memory()) is not None:
            answer = max(0, after["VmHWM"] - before["VmRSS"])
        connection.send((True, answer))


class TimedCalls:
    """Answers the orders of a benchmark about one artifact.

    Args:
        read: Reads inputs as `Format.prepare_benchmark` does.
    """

    def __init__(self, read: Callable[[Path], Loader]) -> None:
        self._read = read
        self._load: Any = None
        self._run: Any = None
        self._repeats = 1

    def answer(self, order: str, argument: Any = None) -> Any:
        """Returns the seconds of loading, or of the calls of a turn; None for other orders."""
        if order == "inputs":
            self._run = None  # load again for other inputs, because a runtime may adapt a model to the first ones
            self._load = self._read(argument)
        elif order == "load":
            start = time.perf_counter()
            self._run = self._load()
            return time.perf_counter() - start
        elif order == "warm up":
            samples = _sample(self._run, argument, min_samples=_WARMUP_CALLS)
            self._repeats = max(1, round(_MIN_SAMPLE / min(samples)))
        elif order == "turn":
            return _sample(self._run, argument, self._repeats)
        return None


def _sample(run: Callable[[], object], seconds: float, repeats: int = 1, min_samples: int = 1) -> list[float]:
    """Measures calls for some seconds; each sample is the mean of ``repeats`` calls."""
    samples: list[float] = []
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        turn_start = time.perf_counter()
        while (
            len(samples) < min_samples
            or (elapsed := time.perf_counter() - turn_start) < seconds
            or (len(samples) < _USUAL_SAMPLES and elapsed < _MAX_OVERRUN * seconds)
        ):
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            samples.append((time.perf_counter() - start) / repeats)
    finally:
        if was_enabled:
            gc.enable()
    return samples


def _memory(*, reset_peak: bool = False) -> dict[str, int] | None:
    """Returns current and peak resident bytes, or None without /proc.

    psutil does not report the peak.
    """
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
