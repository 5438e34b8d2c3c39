"""Errors that users can cause, each with a message, a location and a hint.

Each class has its exit code, which the command line and the Python API share.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from optexport.redaction import redact, redact_error

# The first line of a TorchScript error, and the pattern of the line with the cause.
_TORCHSCRIPT = "The following operation failed in the TorchScript interpreter."
_RAISED = re.compile(r"[\w.]+(?:Error|Exception): ")
# How many lines are shown if the first one announces a list.
_ANNOUNCED = 5


def describe_error(error: BaseException) -> str:
    """Returns the type and the first meaningful line of another library's error, without secrets."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Returns the first meaningful line of another library's error, without secrets.

    In TorchScript errors the last line has the cause, after lines of the program. Remove secrets before shortening a
    text, because half a URI may hide that it has a secret.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # a model's exception may fail in its own __str__
        lines = []
    if lines and lines[0] == _TORCHSCRIPT:
        return redact_error(next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1]))
    is_announced = len(lines) > 1 and lines[0].endswith(":")
    is_listed = is_announced and (lines[1].startswith("(") or lines[0].startswith("Error(s) in loading state_dict"))
    listed = lines[1:_ANNOUNCED] if is_listed else []
    return redact_error(" ".join([lines[0], *listed])) if lines else type(error).__name__


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Converts panics of Rust libraries, which are not an ``Exception``, to ``RuntimeError``.

    For example, a tokenizer panics if a pattern from its file takes too long to match.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(first_line(error)) from error


def root_cause(error: BaseException) -> str:
    """Returns the first line of the error at the root of a chain: the operator's error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


# Commands to GitHub's runner: the first pattern at the start of a line, the second anywhere.
_COMMAND = re.compile(r"^(\s*):(?=:)|(?<=##)\[")


def on_one_line(name: str) -> str:
    """Escapes unprintable characters and line breaks of a name that a model defines.

    Also escapes commands to GitHub's runner, which reads them from the output of a step.
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
    return _COMMAND.sub(lambda match: f"{match[1] or ''}\\x{ord(match[0][-1]):02x}", shown)


def short_line(text: str, longest: int = 2000) -> str:
    """Returns one line of untrusted text, without secrets and then shortened."""
    text = redact(text)
    return on_one_line(text if len(text) <= longest else f"{text[: longest - 3]}...")


def printable(text: str) -> str:
    """Escapes characters that control a terminal or the order of letters; keeps the lines."""
    return "\n".join(map(on_one_line, text.split("\n")))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint with the most similar known word, or with all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f'Did you mean "{near[0]}"?'
    return f"Choose one of: {', '.join(names)}." if names else "There is no name to choose from."


def with_hint(message: str, hint: str | None) -> str:
    """Adds a line ``Hint: ...`` to a message. Further lines of the hint are aligned with the first."""
    return f"{message}\nHint: {hint.replace(chr(10), chr(10) + ' ' * 6)}" if hint else message


class OptexportError(Exception):
    """Base class of all errors that optexport raises on purpose; removes secrets of URIs.

    Args:
        message: What is wrong, as one sentence.
        location: A file, a key of the config, a node or an input. It is printed on one line, because others may choose
            the names of files.
        hint: What the user can do about it.
        details: Further facts, one a line. They are printed, indented, between the message and the hint.
        parity: The parity record up to the error; None if no target was compared.

    Attributes:
        exit_code: The exit status of the command line.
        run_id: The MLflow run that the error ended; None without one.
    """

    exit_code = 1
    run_id: str | None = None

    def __init__(
        self,
        message: str,
        *,
        location: str | None = None,
        hint: str | None = None,
        details: str | None = None,
        parity: Any = None,
    ) -> None:
        self.parity = parity
        self.message = redact_error(message)
        self.location = None if location is None else on_one_line(redact_error(location))
        self.details = redact_error(details) if details else None
        self.hint = None if hint is None else redact_error(hint)
        super().__init__(str(self))

    def locate(self, location: str) -> None:
        """Replaces the location."""
        self.location = on_one_line(redact_error(location))
        self.args = (str(self),)

    def add_detail(self, line: str) -> None:
        """Adds a fact after the details."""
        self.details = "\n".join(filter(None, (self.details, redact_error(line))))
        self.args = (str(self),)

    def __str__(self) -> str:
        return self._text(f"{self.location}: {self.message}" if self.location else self.message)

    @property
    def labelled(self) -> str:
        """The text for a terminal. It starts with "Error: "."""
        return f"Error: {self}"

    def _text(self, message: str) -> str:
        details = [] if self.details is None else [f"  {line}" for line in self.details.splitlines()]
        return with_hint("\n".join([message, *details]), self.hint)


class ConfigError(OptexportError):
    """An error in the config, or in the call of the program."""

    exit_code = 2


class SourceError(OptexportError):
    """A failure to load the model."""

    exit_code = 3


class DeviceError(OptexportError):
    """A device that is not available on this machine."""

    exit_code = 3


class TraceError(OptexportError):
    """A failure to trace the loaded model to a graph as requested."""

    exit_code = 3


class ModelError(TraceError):
    """A failure of the model itself on its inputs, without a trace."""


class UntraceableError(TraceError):
    """A failure of ``torch.export`` on a model that runs; fewer dynamic sizes may help."""


class FixedSizeError(TraceError):
    """A dynamic size that a trace fixes; another way to trace may not."""


class BranchSizeError(TraceError):
    """Sizes of the inputs at which a model takes a branch that it does not take at all declared sizes."""


class ValuesAskedError(UntraceableError):
    """A model that reads values of its inputs, which a trace does not know.

    Attributes:
        inputs: The arguments whose values the model reads.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        super().__init__(
            f"the model reads the values of {' and '.join(sorted(inputs))}, which are unknown during a trace",
            location="trace",
            hint="If they are the same in every call, set them in inputs.constants.",
        )
        self.inputs = inputs


class CheckError(OptexportError):
    """A check of results that failed.

    If targets were compared, each line of the message is one failure.

    Attributes:
        folder: The folder with the tensors of the failure; None if none was written.
    """

    folder: Path | None = None

    @property
    def labelled(self) -> str:
        if self.parity is None:
            return super().labelled
        message = f"{self.location}: {self.message}" if self.location else self.message
        return self._text("\n".join(f"FAILED  {line}" for line in message.splitlines()))


class ParityError(CheckError):
    """A graph or a file whose results differ from the original."""

    exit_code = 4


class ExportError(OptexportError):
    """A failure to write a file in its format."""

    exit_code = 5


class BenchError(OptexportError):
    """A failure to run a file for a benchmark."""

    exit_code = 5


class TransformationError(OptexportError):
    """A failure to apply or undo a transformation."""

    exit_code = 5


class GateError(CheckError):
    """A gate of the config that fails."""

    exit_code = 6


class TrackingError(OptexportError):
    """A failure to track the run; the bundle on disk is complete."""

    exit_code = 7


class BundleError(OptexportError):
    """A damaged or incomplete bundle, or a folder that is not a bundle."""

    exit_code = 4


def unreadable(error: Exception, path: str | Path, hint: str | None = None) -> OptexportError:
    """Returns the error for a file that cannot be read; missing permission is a ConfigError."""
    if isinstance(error, PermissionError):
        return ConfigError(
            "this user has no permission to read the file",
            location=str(path),
            hint="Give this user permission to read all files of the bundle, and run again.",
        )
    return BundleError(f"the file cannot be read: {error}", location=str(path), hint=hint)
