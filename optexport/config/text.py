"""The text of a config: read as a table, within limits, and without secrets, since its copies go to many."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optexport.bundle.layout import check_utf8
from optexport.config.validation import Mistakes, dotted
from optexport.errors import ConfigError
from optexport.redaction import redact

# More than anybody writes; a file that says more is made to take long.
_BYTES = 1 << 20
_KEYS = 10_000
_DEPTH = 64
# What TOML's whole numbers have at most.
_INTEGERS = range(-(1 << 63), 1 << 63)

# Of keys in small letters, without their "_" and "-".
_SECRET = re.compile(
    r".*(?:password|passwd|passphrase|pwd|secret|credentials?|(?:api|access|private|secret)key)"
    r"|(?:(?:hf|hub|auth|access|api|bearer|useauth)?token|bearer)"
)

# Behind values that end on their line, in which there may be a "#" too.
_COMMENT = re.compile(r"""(?<=[\s\]}"'\w])#.*|^#.*""")

_Place = tuple[int | str, ...]


def read(path: Path) -> str:
    """Reads a config file.

    Raises:
        ConfigError: It cannot be read, is larger than any config, or lies where torch cannot write.
    """
    check_utf8(path.parent)
    try:
        if not path.exists():
            raise ConfigError("there is no such file", location=str(path), hint="optexport init writes one.")
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError("it is no file", location=str(path))
        if path.stat().st_size > _BYTES:
            raise ConfigError(f"it is larger than {_BYTES} bytes", location=str(path))
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", location=str(path)) from error


def parse(text: str, path: Path) -> dict[str, Any]:
    """The tables of a config.

    Raises:
        ConfigError: It is not TOML, or says more, or deeper, or larger numbers than a config does.
    """
    if (line := next((line for line in text.split("\n") if _is_long_key(line)), None)) is not None:
        raise ConfigError(f"it is nested deeper than {_DEPTH}", location=f"{path}: {line.strip()[:20]}...")
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # also for numbers of too many digits
        raise ConfigError(f"it is not TOML: {error}", location=str(path)) from error
    except RecursionError as error:
        raise ConfigError("it is not TOML that can be read: it is nested too deeply", location=str(path)) from error
    for count, (location, value) in enumerate(_items(table)):
        if count >= _KEYS:
            raise ConfigError(f"it holds more than {_KEYS} keys and values", location=str(path))
        if len(location) > _DEPTH:
            raise ConfigError(f"it is nested deeper than {_DEPTH}", location=f"{path}: {dotted(location[:3])}...")
        if isinstance(value, int) and value not in _INTEGERS:
            raise ConfigError(
                "it is no whole number of 64 bits",
                location=f"{path}: {dotted(location)}",
                hint="Write one below 2^63, that is of 18 digits at most.",
            )
    return table


def _is_long_key(line: str) -> bool:
    """Whether a line holds a key of far too many parts, for which the parser would take minutes."""
    if line.count(".") <= _PARTS:
        return False
    # As it is too: a text of several lines that ends here would make what follows look quoted.
    for written in (line, _QUOTED.sub('""', line)):
        words = re.split(r"[^\w.\"-]", re.sub(r"[ \t]*\.[ \t]*", ".", written))
        if any(len(re.findall(r'[\w"-]\.', word)) > _PARTS for word in words):
            return True
    return False


_PARTS = 1000
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


def without_secrets(path: Path) -> str:
    """The text of a config for copies of it: it says the same but for passwords and tokens, of which it has none.

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    text = read(path)
    for _, value in _items(parse(text, path)):
        if isinstance(value, str) and (shown := redact(value)) != value:
            text = text.replace(value, shown)
    # What is no value is a comment, or a key that only looks like that of a secret.
    lines = [_COMMENT.sub(lambda found: redact(found[0]), line) for line in text.splitlines(keepends=True)]
    redacted = "".join(lines)
    return redacted if parse(redacted, path) == parse(text, path) else text


def check_secrets(table: dict[str, Any], text: str, name: str) -> None:
    """Checks that what is secret can be taken out of the copies of a config: of its text, and of its settings.

    Raises:
        ConfigError: It cannot.
    """
    mistakes = Mistakes(name)
    for location, value in _items(table):
        if not isinstance(value, dict | list | bool) and value != "":
            mistakes.of(_check_secret, location, value, text, name)
    mistakes.tell()


def _check_secret(location: _Place, value: Any, text: str, name: str) -> None:
    if location[:2] == ("model", "arguments") and any(_is_secret(key, value) for key in location[2:]):
        raise ConfigError(
            "a config holds no secrets: it is copied into the bundle, and to MLflow",
            location=f"{name}: {dotted(location)}",
            hint="Have the model's code read it from the environment.",
        )
    if isinstance(value, str) and redact(value) != value and value not in text:
        raise ConfigError(
            "it holds a password or token that is written with escapes, and would stay in copies of this text",
            location=f"{name}: {dotted(location)}",
            hint="Write it without a backslash.",
        )


def _is_secret(key: int | str, value: Any) -> bool:
    """Whether a key is one of secrets; a token that is a number is one of a vocabulary."""
    plain = re.sub(r"[\W_]", "", str(key)).lower()
    return _SECRET.fullmatch(plain) is not None and (isinstance(value, str) or not plain.endswith("token"))


def _items(table: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """All that stands in a table, at any depth, with its place; as a loop, since it may be nested without end."""
    left: list[tuple[_Place, Any]] = [((), table)]
    while left:
        location, value = left.pop()
        if location:
            yield location, value
        if isinstance(value, dict):
            left += [((*location, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [((*location, index), inner) for index, inner in enumerate(value)]
