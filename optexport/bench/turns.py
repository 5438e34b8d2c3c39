"""Lets artifacts take turns, each in a process of its own, so that whatever disturbs one disturbs all alike."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from optexport._utils import signals
from optexport.bench.artifact import Artifact
from optexport.bench.worker import Task
from optexport.bench.workload import Workload
from optexport.errors import BenchError

# As multiprocessing starts a process afresh, but without the caller's main module, which may be heavy.
_WORKER = "import sys; sys.path[:] = sys.argv[2:]; from optexport.bench.worker import main; main()"


# Where its memory happens to lie makes a process faster or slower, by 1 to 3 % as seen here, for as long as it lives.
# So that this is drawn anew, artifacts that are compared are started afresh after so many rounds.
ROUNDS_PER_LAUNCH = 2


@dataclass(frozen=True)
class Settings:
    """How is measured.

    Attributes:
        threads: Threads of each artifact.
        rounds: How often each artifact has its turn; a multiple of `ROUNDS_PER_LAUNCH`, to which it is rounded up.
        seconds: How long a turn is; it has three calls at the least, or as many as begin within ten times as long.
    """

    threads: int = 1
    rounds: int = 20
    seconds: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", -(-self.rounds // ROUNDS_PER_LAUNCH) * ROUNDS_PER_LAUNCH)


@dataclass(frozen=True)
class Timing:
    """What was measured of one artifact on one workload.

    Attributes:
        turns: Seconds of each call, of shape [launches, rounds, calls]; as many calls as fit into a turn.
        load_seconds: From the file to a model that can be called, by launch.
        peak_memory: Bytes resident at the peak beyond those before loading, those on a card not counted; None where the
            system does not tell.
    """

    artifact: Artifact
    workload: Workload
    turns: tuple[tuple[tuple[float, ...], ...], ...]
    load_seconds: tuple[float, ...]
    peak_memory: int | None

    @property
    def medians(self) -> list[list[float]]:
        """The median call of each turn, in seconds, of shape [launches, rounds]."""
        return [[statistics.median(turn) for turn in launch] for launch in self.turns]

    @property
    def calls(self) -> list[float]:
        """Seconds of every call."""
        return [seconds for launch in self.turns for turn in launch for seconds in turn]


@dataclass
class _Launch:
    """What a process measured of its artifact on one workload, as in `Timing`."""

    load_seconds: float
    turns: list[tuple[float, ...]] = field(default_factory=list)
    peak_memory: int | None = None


class _Worker:
    """The process of one artifact, as its caller sees it."""

    def __init__(self, artifact: Artifact, process: subprocess.Popen[bytes], calls: Connection, stderr: Any) -> None:
        self.artifact = artifact
        self._process = process
        self._calls = calls
        self._stderr = stderr

    def ask(self, order: str, given: float | Path | None = None) -> Any:
        """Gives an order, with what it needs, and returns the answer.

        Raises:
            BenchError: The artifact raised, or its process died.
        """
        self.tell((order, given))
        return self.answer()

    def tell(self, message: object) -> None:
        """Sends a message whose answer can wait."""
        try:
            self._calls.send(message)
        except OSError as error:
            raise BenchError(self._death(), location=self.artifact.name) from error

    def answer(self) -> Any:
        """Waits for the answer to a message."""
        try:
            good, answer = self._calls.recv()
        except (EOFError, OSError) as error:
            raise BenchError(self._death(), location=self.artifact.name) from error
        if not good:
            raise BenchError(f"it cannot be run: {answer}", location=self.artifact.name)
        return answer

    def _death(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}{f': {lines[-1]}' if lines else ''}"


@contextmanager
def _working(artifact: Artifact, threads: int) -> Iterator[_Worker]:
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # as for ONNX Runtime's threads, see the worker
    }
    with ours, tempfile.TemporaryFile() as stderr:
        process = None
        try:
            with signals.deferred():  # or an interrupt might leave a process that nobody knows of
                process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, str(theirs.fileno()), *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,  # what the terminal sends comes to us alone, and we end the worker
                )
            signals.check()
            theirs.close()
            yield _Worker(artifact, process, ours, stderr)
        finally:
            if process is not None:
                process.kill()
                process.wait()


def race(artifacts: Sequence[Artifact], workloads: Sequence[Workload], settings: Settings) -> list[Timing]:
    """Measures artifacts on workloads: in every round each has its turn, in an order that changes.

    A process serves one workload after the other. So a start is paid for once; but the peak of memory, which a runtime
    may not give back, is that of one workload only where no more than one is measured.

    Returns:
        What was measured, by workload and then by artifact, in the order of both.

    Raises:
        BenchError: One of them cannot be run, or ends its process.
    """
    shuffle = random.Random(0).shuffle  # noqa: S311 - no secret
    found: list[list[list[_Launch]]] = [[[] for _ in artifacts] for _ in workloads]
    launches = settings.rounds // ROUNDS_PER_LAUNCH
    for rounds in [ROUNDS_PER_LAUNCH] * launches if len(artifacts) > 1 else [ROUNDS_PER_LAUNCH * launches]:
        with ExitStack() as stack:
            workers = [stack.enter_context(_working(artifact, settings.threads)) for artifact in artifacts]
            for artifact, worker in zip(artifacts, workers, strict=True):
                worker.tell(Task(artifact.path, artifact.format, artifact.inputs, settings.threads, artifact.device))
            for worker in workers:  # they import their runtimes all at once, and load their files one by one
                worker.answer()
            for workload, all_of_it in zip(workloads, found, strict=True):
                measured = _take_turns(workers, workload, rounds, settings.seconds, shuffle)
                for launch, earlier in zip(measured, all_of_it, strict=True):
                    earlier.append(launch)
    return [
        Timing(
            artifact,
            workload,
            tuple(tuple(launch.turns) for launch in own),
            tuple(launch.load_seconds for launch in own),
            max((launch.peak_memory for launch in own if launch.peak_memory is not None), default=None),
        )
        for workload, all_of_it in zip(workloads, found, strict=True)
        for artifact, own in zip(artifacts, all_of_it, strict=True)
    ]


def _take_turns(
    workers: Sequence[_Worker],
    workload: Workload,
    rounds: int,
    seconds: float,
    shuffle: Callable[[list[tuple[_Worker, _Launch]]], None],
) -> list[_Launch]:
    """Lets each worker load its file and have its turns on one workload."""
    launches = []
    for worker in workers:
        worker.ask("inputs", workload.file)
        launches.append(_Launch(worker.ask("load")))
        worker.ask("warm up", seconds)
    order = list(zip(workers, launches, strict=True))
    for _ in range(rounds):
        shuffle(order)
        for worker, launch in order:
            launch.turns.append(tuple(worker.ask("turn", seconds)))
    for worker, launch in zip(workers, launches, strict=True):
        launch.peak_memory = worker.ask("peak")
    return launches
