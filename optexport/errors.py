"""Every error a user can cause: what went wrong, where, and how to mend it.

Each class owns its exit code, so that the command line and the Python API agree on it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from optexport.bundle.manifest import ParityRecord


# How an error of TorchScript's begins, and how the line that says what it is.
_TORCHSCRIPT = "The following operation failed in the TorchScript interpreter."
_RAISED = re.compile(r"[\w.]+(?:Error|Exception): ")


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
    return redact_error(lines[0]) if lines else type(error).__name__


def root_cause(error: BaseException) -> str:
    """The first line at the root of a chain of exceptions: that of the operator, not of the exporter around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def on_one_line(name: str) -> str:
    """A name in which characters that cannot be printed are written as in Python: a model may give its outputs any."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


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


# A password may hold what a URI should not, spaces too: SQLAlchemy takes it as it is. What follows the port of a host
# is none. The lengths keep the time linear in that of the text; a longer one is made short before.
_NO_PORT = r"(?!\d{1,5}(?:[/?#\s\"',;)\]}]|$))"
_WITH_A_BLANK = r"(?:(?<![\"'>])[ \t](?:(?!://)[^\"\n]){0,256})?"
_CREDENTIALS = re.compile(
    r"(?<=://)(?:"
    rf"[^/\s\"'<>:@\[]*:{_NO_PORT}(?!\s)\S{{0,2048}}{_WITH_A_BLANK}"
    r"|[^/\s\"'<>]*)@"
)
# Begun at a blank alone, and ended with what a password ends with, so that each is gone through once.
_LONG = re.compile(rf"(?<!\S)\S{{2048,}}{_WITH_A_BLANK}@")
_LONG_CREDENTIALS = re.compile(rf"(?<=://)[^/\s\"'<>:@\[]*:{_NO_PORT}(?!\s).*@")
# How a key ends whose value is secret: of its end alone, since `tokenizer` and `token_type_ids` begin like one.
_CONFIDENTIAL = (
    r"(?:pass(?:word|wd|phrase)|token|secret|jwt"
    r"|(?:api|access|account|client|encryption|master|private|secret|service|shared|signing|storage|subscription)"
    r"[-_.]?key(?:[-_.]?id)?)"
)
# A value ends where the next one begins, which is encoded where its own "=" is, in the braces of ODBC, or in quotes,
# of which the second may have been cut off.
_SECRETS = re.compile(
    rf"((?:{_CONFIDENTIAL}|pwd|credentials?|(?<=[\w.\-?&;])sig(?:nature)?"
    r"|(?<=[?&;])(?:key|auth|authorization|pass))(?:=|((?:%20|\+)*%3D))|authorization:\s*(?:bearer|basic)\s+)"
    r"(?(2)(?:%7B.{0,1024}?%7D|(?:(?!%3B|%26)[^&;\s\"'])+)"
    r"|(?:\{(?:[^}\n]|\}\}){0,1024}\}|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    r"|\\{1,3}[\"'][^\"'\n]*[\"']?|[\"']?[^&;\s\"']+))",
    re.IGNORECASE,
)
# What is echoed of a request, as headers, JSON, Python and TOML have it. What follows a colon without quotes is secret
# where it is a single word: of more, it is a sentence.
_ECHOED = re.compile(
    rf"((?:{_CONFIDENTIAL}|pwd|credentials?|sig(?:nature)?|authorization)(?:\\{{0,3}}[\"'])?[ \t]*(?:(=)(?!=)|:)[ \t]*)"
    r"(?:(\\{0,3}[\"'])(?:(?!\3)(?:\\.|[^\\\n]))*(?:\3)?"
    r"|(?:basic|bearer|digest|negotiate|token)[ \t]+[^\s\"'<,;\\]+"
    r"|(?(2)[^&;\s\"'<]+|(?<=[ \t])[^\s\"'<>,;(){}\[\]\\]+(?=[<>,;(){}\[\]\\]|[\"'](?!\w)|:[ \t]|[ \t]*$)))",
    re.IGNORECASE | re.MULTILINE,
)
_ECHOED_ALONE = re.compile(r"([\"'](?:basic|bearer)[ \t]+)[^\s\"'\\]+(?=\\{0,3}[\"'])", re.IGNORECASE)
_QUOTE = re.compile(r"\\{0,3}[\"']")
_OF_ENVIRONMENT = re.compile(rf".*{_CONFIDENTIAL}", re.IGNORECASE)
# In characters: a shorter value may stand anywhere, and mean something else.
_SHORTEST = 6


def redact(text: str) -> str:
    """Takes user names, passwords and tokens out of the URIs in a text."""
    text = _LONG.sub(lambda found: _LONG_CREDENTIALS.sub("***:***@", found[0]), text)
    return _SECRETS.sub(_hidden, _CREDENTIALS.sub("***@", text))


def redact_error(text: str) -> str:
    """The same of what an error says, which may echo a request: headers too, and what the environment keeps secret.

    It takes more for a secret than a copy of a config could bear, which is read again.
    """
    for value in _of_environment():
        text = text.replace(value, "***")
    return _ECHOED_ALONE.sub(_hidden, _ECHOED.sub(_hidden, redact(text)))


def _of_environment() -> list[str]:
    """What variables named as secrets hold, also as a URI has it; the longest first, since one may hold another."""
    known = [value for name, value in os.environ.items() if _OF_ENVIRONMENT.fullmatch(name)]
    known = [value for value in known if len(value) >= _SHORTEST]
    return sorted({*known, *(quote(value, safe="") for value in known)}, key=len, reverse=True)


def _hidden(found: re.Match[str]) -> str:
    """A key whose value is no more, in the quotes that it had: the text may be one that is read again."""
    key, value = found[1], found[0].removeprefix(found[1])
    begun = _QUOTE.match(value)
    mark = begun[0] if begun is not None and value.endswith(begun[0]) else ""
    return f"{key}{mark}***{mark}"


class OptexportError(Exception):
    """Base of all errors that optexport raises on purpose. Its message holds no secret that a URI carries.

    Args:
        cause: What is wrong, as one sentence.
        place: Where it is wrong: a file, a key of the config, a node, an input. It is written on one line: others name
            files, and could write a line of ours.
        mend: What the user can do about it.
        proof: All that was compared, as the manifest of a bundle would hold it; None where it did not come to that.

    Attributes:
        exit_code: The exit status that the command line ends with.
    """

    exit_code = 1

    def __init__(
        self, cause: str, *, place: str | None = None, mend: str | None = None, proof: ParityRecord | None = None
    ) -> None:
        self.proof = proof
        self.cause = redact_error(cause)
        self.place = None if place is None else on_one_line(redact_error(place))
        self.mend = None if mend is None else redact_error(mend)
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.place}: {self.cause}" if self.place else self.cause
        return f"{text}\n  {self.mend}" if self.mend else text


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
            place="trace",
            mend="If they are the same in every call, give them as inputs.constants.",
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
