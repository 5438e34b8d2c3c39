"""A tracker in a process of its own, so that MLflow's imports and a server's answers do not delay the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from optexport._utils import forked, signals
from optexport.config.schema import TrackingConfig
from optexport.errors import OptexportError, TrackingError
from optexport.redaction import keep_secret
from optexport.tracking import store
from optexport.tracking.registry.registration import Registered
from optexport.tracking.run import LATER_VARIABLE, Tracker, reason_of

# In seconds: how long an interrupted call may take to end.
_PATIENCE = 10


@dataclass(frozen=True)
class TrackingProcess:
    """A process that serves one tracker.

    Attributes:
        connection: Takes the name of a method of `Tracker` and its arguments, and returns an answer.
    """

    process: BaseProcess
    connection: Connection


@dataclass(frozen=True)
class _Answer:
    """The attributes of a `Tracker` after a call.

    Attributes:
        error: The error that `end` received, with what `end` added to it.
        interrupt: The interrupt that ended the call.
    """

    run_id: str | None
    page: str | None
    failure: TrackingError | None
    registered: Registered | None
    error: BaseException | None
    interrupt: KeyboardInterrupt | None


@contextlib.contextmanager
def tracking_process(config: TrackingConfig) -> Iterator[TrackingProcess | None]:
    """Starts a process for a tracker, which imports mlflow at once; ends it with the block.

    Yields None if nothing is tracked, or if the tracker should rather work in this process.
    """
    is_tracked = config.enabled and not os.environ.get(LATER_VARIABLE)
    if not is_tracked or not _is_useful():
        yield None
        return
    connection, other_end = Pipe()
    process = forked.start(_serve, config.store, other_end, connection)
    other_end.close()
    try:
        yield None if process is None else TrackingProcess(process, connection)
    finally:
        connection.close()
        if process is not None:
            forked.stop(process)


def _is_useful() -> bool:
    """Returns True if a fork is safe and small: torch would bring its memory and its threads."""
    return "torch" not in sys.modules and forked.is_useful()


def make_tracker(config: TrackingConfig, path: Path | None, bundle: Path, process: TrackingProcess | None) -> Tracker:
    """Returns a tracker that works in a process, or in this one if there is none; the other arguments are its own."""
    return Tracker(config, path, bundle) if process is None else _BackgroundTracker(config, path, bundle, process)


class _BackgroundTracker(Tracker):
    """A tracker whose methods run in another process."""

    def __init__(self, config: TrackingConfig, path: Path | None, bundle: Path, process: TrackingProcess) -> None:
        super().__init__(config, path, bundle)
        self._process, self._connection = process.process, process.connection

    def start(self, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        keep_secret(self._config.store)  # for the messages of this process
        self._call("start", self._config, self._path, self._bundle, settings, tags)

    def send(self) -> None:
        self._call("send")

    def end(self, error: BaseException | None = None) -> None:
        sent = error
        if error is not None and not isinstance(error, OptexportError | KeyboardInterrupt | SystemExit):
            sent = RuntimeError(reason_of(error))  # the error may have attributes that cannot be sent
        answer = self._call("end", sent)
        if error is not None and answer is not None and answer.error is not None:
            vars(error).update(vars(answer.error))

    def _call(self, method: str, *arguments: Any) -> _Answer | None:
        """Calls a method in the process, and takes over its answer; returns None if the process has ended.

        Raises:
            KeyboardInterrupt: This process was interrupted, which interrupts the call.
        """
        try:
            with signals.deferred():
                self._connection.send((method, *arguments))
            self._wait()
            with signals.deferred():
                answer: _Answer = self._connection.recv()
        except (EOFError, OSError):
            self._note_end()
            return None
        self.run_id, self.page, self.failure = answer.run_id, answer.page, answer.failure
        self.registered = answer.registered
        if answer.interrupt is not None:
            raise answer.interrupt
        return answer

    def _wait(self) -> None:
        """Waits for an answer. An interrupt goes to the process, which then answers with it."""
        try:
            self._connection.poll(None)
        except KeyboardInterrupt:
            if self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGINT)
            if not self._connection.poll(_PATIENCE):
                forked.stop(self._process)
                raise

    def _note_end(self) -> None:
        if self.failure is None:
            self.failure = TrackingError(
                "the process that sends the run to MLflow has ended",
                location=f"tracking.uri: {self._config.store}",
                hint=f"The bundle on disk is complete. To upload it, run: {self._upload_command()}",
            )


def _serve(uri: str, connection: Connection, other_end: Connection) -> None:
    """Serves the calls of one tracker until the other process closes its connection."""
    other_end.close()
    with contextlib.suppress(Exception):  # the first call raises it again
        store.prepare(uri)
    tracker: Tracker | None = None
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        if tracker is None:  # the first call is "start"
            config, path, bundle, *arguments = arguments
            tracker = Tracker(config, path, bundle)
        interrupt = _call(getattr(tracker, method), *arguments)
        if tracker.failure is not None and tracker.failure.__cause__ is not None:  # a cause cannot be sent
            tracker.failure.add_note("".join(traceback.format_exception(tracker.failure.__cause__)))
            tracker.failure.__cause__ = None
        error = arguments[0] if method == "end" else None
        answer = _Answer(tracker.run_id, tracker.page, tracker.failure, tracker.registered, error, interrupt)
        connection.send(answer)


def _call(method: Callable[..., None], *arguments: Any) -> KeyboardInterrupt | None:
    """Calls a method; only meanwhile, a signal interrupts it. Returns the interrupt that ended the call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        method(*arguments)
    except KeyboardInterrupt as interrupt:
        return interrupt
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return None
