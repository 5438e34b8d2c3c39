"""Reads the text of a config, and removes secrets from copies of it."""

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

# A larger file is not a config; the user may have passed a model.
_BYTES = 1 << 20
# pydantic raises a RecursionError for deeper tables.
_DEPTH = 64
# Range of TOML's integers. Python reads larger ones, but torch and JSON do not accept them.
_INTEGERS = range(-(1 << 63), 1 << 63)

# Names of secrets, in lower case without "_" and "-".
_SECRET = re.compile(
    r".*(?:password|passwd|passphrase|pwd|secret|credentials?|(?:api|access|private|secret)key)"
    r"|(?:(?:hf|hub|auth|access|api|bearer|useauth)?token|bearer)"
)

# A comment after a value on the same line. The value may contain a "#" too.
_COMMENT = re.compile(r"""(?<=[\s\]}"'\w])#.*|^#.*""")

_Place = tuple[int | str, ...]


def read(path: Path) -> str:
    """Reads a config file.

    Args:
        path: The file.

    Raises:
        ConfigError: The file cannot be read, is too large, or is in a folder where torch cannot write.
    """
    check_utf8(path.parent)
    try:
        if not path.exists():
            raise ConfigError("there is no such file", location=str(path), hint="Write one with: optexport init")
        if not path.is_file():  # reading a pipe would block
            raise ConfigError("it is not a file", location=str(path))
        if path.stat().st_size > _BYTES:
            raise ConfigError(f"it is larger than {_BYTES} bytes", location=str(path))
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", location=str(path)) from error


def parse(text: str, path: Path) -> dict[str, Any]:
    """Parses the text of a config into its tables.

    Args:
        text: The text.
        path: The file, for error messages.

    Raises:
        ConfigError: The text is not TOML, nested too deeply, or contains an integer of more than 64 bits.
    """
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # also for numbers with too many digits
        raise ConfigError(f"it is not TOML: {error}", location=str(path)) from error
    except RecursionError as error:
        raise ConfigError(f"it is nested deeper than {_DEPTH}", location=str(path)) from error
    for location, value in _items(table):
        if len(location) > _DEPTH:
            raise ConfigError(f"it is nested deeper than {_DEPTH}", location=f"{path}: {dotted(location[:3])}...")
        if isinstance(value, int) and value not in _INTEGERS:
            raise ConfigError(
                "the integer has more than 64 bits",
                location=f"{path}: {dotted(location)}",
                hint="Write an integer of at most 18 digits.",
            )
    return table


def without_secrets(path: Path) -> str:
    """Returns the text of a config without passwords and tokens, for copies of it.

    Raises:
        ConfigError: The config cannot be read, or is not TOML.
    """
    text = read(path)
    for _, value in _items(parse(text, path)):
        if isinstance(value, str) and (shown := redact(value)) != value:
            text = text.replace(value, shown)
    # Other secrets can only be in comments. A key that looks like a secret stays.
    lines = [_COMMENT.sub(lambda match: redact(match[0]), line) for line in text.splitlines(keepends=True)]
    redacted = "".join(lines)
    return redacted if parse(redacted, path) == parse(text, path) else text


def check_secrets(table: dict[str, Any], text: str, name: str) -> None:
    """Checks that a config contains no secret that would stay in its copies.

    Args:
        table: The tables of the config.
        text: The text of the config without secrets.
        name: The config, for error messages.

    Raises:
        ConfigError: The config contains such a secret.
    """
    mistakes = Mistakes(name)
    for location, value in _items(table):
        if not isinstance(value, dict | list | bool) and value != "":
            mistakes.of(_check_secret, location, value, text, name)
    mistakes.tell()


def _check_secret(location: _Place, value: Any, text: str, name: str) -> None:
    if location[:2] == ("model", "arguments") and any(_is_secret(key, value) for key in location[2:]):
        raise ConfigError(
            "a config holds no secrets: it is copied into the bundle and to MLflow",
            location=f"{name}: {dotted(location)}",
            hint="Read it from the environment in the model's code.",
        )
    if isinstance(value, str) and redact(value) != value and value not in text:
        raise ConfigError(
            "it holds a password or token that is written with escapes, and would stay in copies of this text",
            location=f"{name}: {dotted(location)}",
            hint="Write it without a backslash.",
        )


def _is_secret(key: int | str, value: Any) -> bool:
    """Returns True if a key names a secret. A numeric token belongs to a vocabulary."""
    plain = re.sub(r"[\W_]", "", str(key)).lower()
    return _SECRET.fullmatch(plain) is not None and (isinstance(value, str) or not plain.endswith("token"))


def _items(table: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """Yields every value of a table at any depth, with its place.

    The function is iterative, because deep tables would exceed Python's recursion limit.
    """
    left: list[tuple[_Place, Any]] = [((), table)]
    while left:
        location, value = left.pop()
        if location:
            yield location, value
        if isinstance(value, dict):
            left += [((*location, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [((*location, index), inner) for index, inner in enumerate(value)]
