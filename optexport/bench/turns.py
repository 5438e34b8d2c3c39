"""Measures artifacts in turns, each in its own process.

A disturbance of the machine then hits all of them alike.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from optexport._utils import signals
from optexport.bench.artifact import Artifact
from optexport.bench.worker import Task, TimedCalls
from optexport.bench.workload import Workload
from optexport.errors import BenchError, describe_error
from optexport.exporters.format import Loader

# Like a "spawn" of multiprocessing, but without importing the caller's main module, which may be heavy.
_WORKER = "import sys; sys.path[:] = sys.argv[2:]; from optexport.bench.worker import main; main()"


# The memory layout of a process makes it 1 to 3 % faster or slower for as long as it lives (measured here). Compared
# artifacts therefore restart after this number of rounds.
ROUNDS_PER_LAUNCH = 2


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark.

    Attributes:
        threads: Threads of each artifact.
        rounds: Turns of each artifact; rounded up to a multiple of `rounds_per_launch`.
        seconds: Length of a turn. A turn has at least three calls, but none starts after ten times this length.
        rounds_per_launch: Turns of each artifact until it restarts.
        deadline: When compared artifacts must be done, by `time.monotonic`. Then there are fewer rounds, but at least
            those of one launch.
    """

    threads: int = 1
    rounds: int = 20
    seconds: float = 0.1
    rounds_per_launch: int = ROUNDS_PER_LAUNCH
    deadline: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", self.launches * self.rounds_per_launch)

    @property
    def launches(self) -> int:
        """How often each compared artifact starts."""
        return -(-self.rounds // self.rounds_per_launch)


@dataclass(frozen=True)
class Timing:
    """Measurements of one artifact on one workload.

    Attributes:
        artifact: The measured artifact.
        workload: Its inputs.
        turns: Seconds of each call, of shape [launches, rounds, calls]; turns differ in their number of calls.
        load_seconds: Seconds to load the file, by launch.
        peak_memory: Peak of resident bytes above those before loading, without device memory; None if the system does
            not report it.
    """

    artifact: Artifact
    workload: Workload
    turns: tuple[tuple[tuple[float, ...], ...], ...]
    load_seconds: tuple[float, ...]
    peak_memory: int | None

    @property
    def medians(self) -> list[list[float]]:
        """Median call of each turn in seconds, of shape [launches, rounds]."""
        return [[statistics.median(turn) for turn in launch] for launch in self.turns]

    @property
    def calls(self) -> list[float]:
        """Seconds of every call."""
        return [seconds for launch in self.turns for turn in launch for seconds in turn]


@dataclass
class _Launch:
    """Measurements of one process on one workload, as in `Timing`."""

    load_seconds: float
    turns: list[tuple[float, ...]] = field(default_factory=list)
    peak_memory: int | None = None


class _Worker:
    """Handle of an artifact's process."""

    def __init__(
        self, artifact: Artifact, process: subprocess.Popen[bytes], connection: Connection, stderr: Any
    ) -> None:
        self.artifact = artifact
        self._process = process
        self._connection = connection
        self._stderr = stderr

    def request(self, order: str, argument: float | Path | None = None) -> Any:
        """Sends an order and returns the answer.

        Raises:
            BenchError: The artifact raised, or its process ended.
        """
        self.send((order, argument))
        return self.receive()

    def send(self, message: object) -> None:
        """Sends a message without waiting for the answer."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise BenchError(self._exit_text(), location=self.artifact.name) from error

    def receive(self) -> Any:
        """Waits for the answer to a message."""
        try:
            succeeded, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError(self._exit_text(), location=self.artifact.name) from error
        if not succeeded:
            raise BenchError(f"cannot run the file: {answer}", location=self.artifact.name)
        return answer

    def _exit_text(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the process that ran the file ended {reason}{f': {lines[-1]}' if lines else ''}"


class _OwnProcess:
    """Runs an artifact in this process, as a `_Worker` without a process of its own."""

    def __init__(self, artifact: Artifact, prepare: Callable[[Path], Loader]) -> None:
        self.artifact = artifact
        self._calls = TimedCalls(prepare)

    def request(self, order: str, argument: float | Path | None = None) -> Any:
        """Returns the answer to an order. The time to load is 0, because the model is already in memory.

        Raises:
            BenchError: The model raised.
        """
        try:
            answer = self._calls.answer(order, argument)
        except Exception as error:  # the model's code may raise anything
            raise BenchError(f"cannot run the model: {describe_error(error)}", location=self.artifact.name) from error
        return 0.0 if order == "load" else answer

    def send(self, message: object) -> None:
        """Accepts a task, which this artifact does not need."""

    def receive(self) -> None:
        """Does not wait, because nothing starts."""


@contextmanager
def _start_worker(artifact: Artifact, threads: int) -> Iterator[_Worker | _OwnProcess]:
    if artifact.prepare is not None:
        yield _OwnProcess(artifact, artifact.prepare)
        return
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # like allow_spinning in the worker
        "GOMP_SPINCOUNT": "0",  # has precedence over the policy
    }
    with ours, tempfile.TemporaryFile() as stderr:
        process = None
        try:
            with signals.deferred():  # an interrupt before the assignment would leave an orphan process
                process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, str(theirs.fileno()), *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,  # so that Ctrl-C reaches only this process, which ends the worker
                )
            signals.check()
            theirs.close()
            yield _Worker(artifact, process, ours, stderr)
        finally:
            if process is not None:
                process.kill()
                process.wait()


def race(artifacts: Sequence[Artifact], workloads: Sequence[Workload], settings: Settings) -> list[Timing]:
    """Measures artifacts on workloads, one turn each per round, in random order.

    A process serves all workloads, one after the other, to start only once. With several workloads,
    the peak memory is therefore the largest of all.

    Returns:
        Measurements ordered by workload, then by artifact.

    Raises:
        BenchError: An artifact cannot run, or its process ended.
    """
    shuffle = random.Random(0).shuffle  # noqa: S311 - not used for security
    launches: list[list[list[_Launch]]] = [[[] for _ in artifacts] for _ in workloads]
    launch_rounds = [settings.rounds_per_launch] * settings.launches if len(artifacts) > 1 else [settings.rounds]
    start = time.monotonic()
    for index, rounds in enumerate(launch_rounds):
        now = time.monotonic()
        if index and now + (now - start) / index > settings.deadline:
            break
        with ExitStack() as stack:
            workers = [stack.enter_context(_start_worker(artifact, settings.threads)) for artifact in artifacts]
            for artifact, worker in zip(artifacts, workers, strict=True):
                worker.send(Task(artifact.format, artifact.benchmark(settings.threads)))
            for worker in workers:  # they import their runtimes in parallel
                worker.receive()
            for workload, by_artifact in zip(workloads, launches, strict=True):
                new_launches = _take_turns(workers, workload, rounds, settings.seconds, shuffle)
                for launch, earlier in zip(new_launches, by_artifact, strict=True):
                    earlier.append(launch)
    return [
        Timing(
            artifact,
            workload,
            tuple(tuple(launch.turns) for launch in artifact_launches),
            tuple(launch.load_seconds for launch in artifact_launches),
            max((launch.peak_memory for launch in artifact_launches if launch.peak_memory is not None), default=None),
        )
        for workload, by_artifact in zip(workloads, launches, strict=True)
        for artifact, artifact_launches in zip(artifacts, by_artifact, strict=True)
    ]


def _take_turns(
    workers: Sequence[_Worker | _OwnProcess],
    workload: Workload,
    rounds: int,
    seconds: float,
    shuffle: Callable[[list[tuple[_Worker | _OwnProcess, _Launch]]], None],
) -> list[_Launch]:
    """Loads each file, one after the other, and measures rounds of turns on one workload."""
    launches = []
    for worker in workers:
        worker.request("inputs", workload.file)
        launches.append(_Launch(worker.request("load")))
        worker.request("warm up", seconds)
    order = list(zip(workers, launches, strict=True))
    for _ in range(rounds):
        shuffle(order)
        for worker, launch in order:
            launch.turns.append(tuple(worker.request("turn", seconds)))
    for worker, launch in zip(workers, launches, strict=True):
        launch.peak_memory = worker.request("peak")
    return launches
