"""A tracker in a separate process, which imports mlflow while this process imports torch."""

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
from optexport.errors import CheckError, ConfigError, ModelError, OptexportError, SourceError, TrackingError
from optexport.redaction import keep_secret, redact_error
from optexport.tracking import store
from optexport.tracking.registry.registration import Registered
from optexport.tracking.run import Tracker, is_tracked, reason_of

# Seconds until an interrupted call is killed; it may first look up the run that it has just created.
_PATIENCE = 15


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
        error: The copy of the error that `end` received, with what `end` added to it.
        notes: The notes of the interrupt that ended the call.
    """

    run_id: str | None
    page: str | None
    failure: TrackingError | None
    registered: Registered | None
    error: BaseException | None
    notes: tuple[str, ...]


@contextlib.contextmanager
def tracking_process(config: TrackingConfig) -> Iterator[TrackingProcess | None]:
    """Starts a process for a tracker, which imports mlflow at once; ends it with the block.

    Yields None if nothing is tracked, or if a second process is not useful.
    """
    if not is_tracked(config) or not _is_useful():
        yield None
        return
    connection, other_end = Pipe()
    with connection, forked.running(_serve, config.store, other_end, connection) as process:
        other_end.close()
        yield None if process is None else TrackingProcess(process, connection)


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
        answer = self._call("end", _sendable(error))
        if not isinstance(error, OptexportError) or answer is None or not isinstance(answer.error, OptexportError):
            return
        error.run_id = answer.error.run_id
        if answer.error.details != error.details:
            error.details = None
            error.add_detail(str(answer.error.details))

    def _call(self, method: str, *arguments: Any) -> _Answer | None:
        """Calls a method in the process, and takes over its answer; returns None if the process has ended.

        Raises:
            KeyboardInterrupt: This process was interrupted, which interrupts the call.
        """
        try:
            with signals.deferred():
                self._connection.send((method, *arguments))
            self._connection.poll(None)
            with signals.deferred():
                return self._receive()
        except KeyboardInterrupt as interrupt:
            with signals.deferred():
                answer = self._interrupt_call()
            for note in answer.notes if answer is not None else ():
                interrupt.add_note(note)
            raise
        except OSError:
            self._note_end()
            return None

    def _interrupt_call(self) -> _Answer | None:
        """Interrupts the running call, and takes over its answer; returns None if the process has ended."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)
        if self._connection.poll(_PATIENCE):
            return self._receive()
        self._process.kill()
        return None

    def _receive(self) -> _Answer | None:
        """Takes over an answer; returns None if the process has ended."""
        try:
            answer: _Answer = self._connection.recv()
        except (EOFError, OSError):
            self._note_end()
            return None
        self.run_id, self.page, self.failure = answer.run_id, answer.page, answer.failure
        self.registered = answer.registered
        return answer

    def _note_end(self) -> None:
        if self.failure is None:
            self.failure = TrackingError(
                "the process that sends the run to MLflow has ended",
                location=f"tracking.uri: {self._config.store}",
                hint=f"The bundle on disk is complete. To upload it, run: {self._upload_command()}",
            )


def _sendable(error: BaseException | None) -> BaseException | None:
    """Returns an error with everything that `Tracker.end` needs, of a class that the other process has."""
    if isinstance(error, OptexportError):
        kinds = (ConfigError, SourceError, ModelError, CheckError, OptexportError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        copy = kind(error.message, location=error.location, hint=error.hint, details=error.details, parity=error.parity)
        if isinstance(error, CheckError) and isinstance(copy, CheckError):
            copy.folder = error.folder
        return copy
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, SystemExit):
        return SystemExit(error.code if isinstance(error.code, int) else str(error.code))
    return None if error is None else RuntimeError(redact_error(reason_of(error)))


def _serve(uri: str, connection: Connection, other_end: Connection) -> None:
    """Serves the calls of one tracker until the other process closes its connection."""
    other_end.close()
    interrupts = _Interrupts()
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
        if method == "end":
            interrupts.forget()  # the signal was for an earlier call, which had ended
        notes = interrupts.call(getattr(tracker, method), *arguments)
        if tracker.failure is not None and tracker.failure.__cause__ is not None:  # a cause cannot be sent
            tracker.failure.add_note("".join(traceback.format_exception(tracker.failure.__cause__)))
            tracker.failure.__cause__ = None
        error = arguments[0] if method == "end" else None
        answer = _Answer(tracker.run_id, tracker.page, tracker.failure, tracker.registered, error, notes)
        connection.send(answer)


class _Interrupts:
    """Lets SIGINT interrupt the current call, or the next one if there is none."""

    def __init__(self) -> None:
        self._is_calling = self._is_interrupted = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        self._is_interrupted = True
        if self._is_calling:
            self._is_calling = False
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Forgets a signal that came between two calls."""
        self._is_interrupted = False

    def call(self, method: Callable[..., None], *arguments: Any) -> tuple[str, ...]:
        """Calls a method; returns the notes of the interrupt that ended the call, if any."""
        try:
            self._is_calling = True
            if self._is_interrupted:
                raise KeyboardInterrupt
            method(*arguments)
        except KeyboardInterrupt as interrupt:
            return tuple(getattr(interrupt, "__notes__", ()))
        finally:
            self._is_calling = False
        return ()
