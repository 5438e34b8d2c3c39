"""Every error a user can cause: what went wrong, where, and how to mend it.

Each class owns its exit code, so that the command line and the Python API agree on it.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from optexport.redaction import redact, redact_error

# How an error of TorchScript's begins, and how the line that says what it is.
_TORCHSCRIPT = "The following operation failed in the TorchScript interpreter."
_RAISED = re.compile(r"[\w.]+(?:Error|Exception): ")
# Lines that are told where the first one announces a list.
_ANNOUNCED = 5


def first_line(error: BaseException) -> str:
    """The first line of another library's error that says something, or its type.

    TorchScript says what failed last, after the lines of its program that led there. It holds no secret of a URI: who
    cuts it could cut off what shows that one is there.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # an error of a model's own may fail to say what it is
        lines = []
    if lines and lines[0] == _TORCHSCRIPT:
        return redact_error(next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1]))
    listed = [line for line in lines[1:_ANNOUNCED] if lines[0].endswith(":") and lines[1].startswith("(")]
    return redact_error(" ".join([lines[0], *listed])) if lines else type(error).__name__


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Makes what a library written in Rust ends a call with, which is no ``Exception``, a ``RuntimeError``.

    A tokenizer's pattern that takes too long to find does so, and a pattern is its file's choice.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(first_line(error)) from error


def root_cause(error: BaseException) -> str:
    """The first line at the root of a chain of exceptions: that of the operator, not of the exporter around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


# What GitHub's runner takes for a command to itself: the one at the beginning of a line, the other anywhere.
_COMMAND = re.compile(r"^(\s*):(?=:)|(?<=##)\[")


def on_one_line(name: str) -> str:
    """A name in which characters that cannot be printed are written as in Python: a model may give its outputs any.

    So are those that would make it a command to GitHub's runner, which reads them in what a step prints.
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
    return _COMMAND.sub(lambda found: f"{found[1] or ''}\\x{ord(found[0][-1]):02x}", shown)


def short_line(text: str, longest: int = 2000) -> str:
    """Of a foreign document: one line, cut; secrets go first, since a cut could hide that one is there."""
    text = redact(text)
    return on_one_line(text if len(text) <= longest else f"{text[: longest - 3]}...")


def printable(text: str) -> str:
    """Lines in which characters that would steer a terminal, or turn the order of letters, are written as in Python."""
    return "\n".join(map(on_one_line, text.split("\n")))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the nearest known word, or at all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f'Did you mean "{near[0]}"?'
    return f"Known are: {', '.join(names)}." if names else "None are known."


class OptexportError(Exception):
    """Base of all errors that optexport raises on purpose. Its message holds no secret that a URI carries.

    Args:
        message: What is wrong, as one sentence.
        location: Where it is wrong: a file, a key of the config, a node or an input. It is printed on one line, because
            file names come from others.
        hint: What the user can do about it.
        proof: All that was compared, as the manifest of a bundle would hold it; None where it did not come to that.

    Attributes:
        exit_code: The exit status that the command line ends with.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, location: str | None = None, hint: str | None = None, proof: Any = None
    ) -> None:
        self.proof = proof
        self.message = redact_error(message)
        self.location = None if location is None else on_one_line(redact_error(location))
        self.hint = None if hint is None else redact_error(hint)
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.location}: {self.message}" if self.location else self.message
        return f"{text}\n  {self.hint}" if self.hint else text


class ConfigError(OptexportError):
    """The config, or the way the program was called, is wrong."""

    exit_code = 2


class SourceError(OptexportError):
    """The model could not be loaded."""

    exit_code = 3


class DeviceError(OptexportError):
    """The device that the model is to run on cannot be had here."""

    exit_code = 3


class TraceError(OptexportError):
    """The model was loaded, but could not be traced to a graph as asked for."""

    exit_code = 3


class UntraceableError(TraceError):
    """``torch.export`` could not trace the model, though it runs; with fewer sizes dynamic it may."""


class ValuesAskedError(UntraceableError):
    """A model asks for the values of inputs, which a trace does not know.

    Attributes:
        inputs: Their arguments.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        super().__init__(
            f"the model asks for the values of {' and '.join(sorted(inputs))}, which a graph does not know",
            location="trace",
            hint="If they are the same in every call, give them as inputs.constants.",
        )
        self.inputs = inputs


class ParityError(OptexportError):
    """A graph or a file does not compute what the original computes."""

    exit_code = 4


class ExportError(OptexportError):
    """A file could not be written in its format."""

    exit_code = 5


class BenchError(OptexportError):
    """A file could not be run to be measured."""

    exit_code = 5


class TransformationError(OptexportError):
    """A transformation failed, or cannot be undone."""

    exit_code = 5


class GateError(OptexportError):
    """What the config demands of the result does not hold."""

    exit_code = 6


class TrackingError(OptexportError):
    """The run could not be tracked; the bundle on disk is whole."""

    exit_code = 7


class BundleError(OptexportError):
    """A bundle is damaged, incomplete, or not one of ours."""

    exit_code = 4


def unreadable(error: Exception, path: str | Path, hint: str | None = None) -> OptexportError:
    """Why a file of a bundle cannot be read: no bundle is damaged since this user may not read it."""
    if isinstance(error, PermissionError):
        return ConfigError(
            "this user may not read it",
            location=str(path),
            hint="Let this user read all files of the bundle, and run again.",
        )
    return BundleError(f"it cannot be read: {error}", location=str(path), hint=hint)
