"""Reads the text of a config, and removes secrets from copies of it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optexport._utils.paths import check_utf8
from optexport.config.source import is_model_source, is_other_model_file, refuse_file
from optexport.config.validation import Mistakes, format_key
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

_Key = tuple[int | str, ...]


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
            raise ConfigError(
                "the config file does not exist",
                location=str(path),
                hint="Correct the path, or write a config with: optexport init SOURCE",
            )
        if not path.is_file():  # reading a pipe would block
            raise ConfigError("the path is not a file", location=str(path), hint="Give the path of a TOML file.")
        if path.stat().st_size > _BYTES:
            raise ConfigError(
                f"the file has more than {_BYTES:,} bytes, so it is not a config",
                location=str(path),
                hint="Give the path of a TOML file. For a model file, write a config with: optexport init SOURCE",
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the file is not UTF-8: {error}", location=str(path), hint="Save the file as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read: {error}", location=str(path), hint="Check the permissions of the file."
        ) from error


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
        raise ConfigError(
            f"the file is not valid TOML: {error}",
            location=str(path),
            hint='Correct this line. Tables are written as [model], values as source = "./my-model".',
        ) from error
    except RecursionError as error:
        raise ConfigError(f"the file is nested deeper than {_DEPTH} levels", location=str(path)) from error
    for parts, value in _items(table):
        if len(parts) > _DEPTH:
            raise ConfigError(
                f"the table is nested deeper than {_DEPTH} levels", location=f"{path}: {format_key(parts[:3])}..."
            )
        if isinstance(value, int) and value not in _INTEGERS:
            raise ConfigError(
                "the integer has more than 64 bits",
                location=f"{path}: {format_key(parts)}",
                hint="Write an integer of at most 18 digits.",
            )
    return table


def read_config(path: Path) -> str:
    """Reads a config file; the error for a model's source names the command that exports it.

    Raises:
        ConfigError: As for `read`, or the path is a model's source or a file of weights.
    """
    if is_model_source(str(path)):
        command = shlex.join(["optexport", "export", str(path)])
        raise ConfigError(
            "this is the source of a model, not a config",
            location=str(path),
            hint=f"To export it without a config, run: {command}",
        )
    if is_other_model_file(path):
        refuse_file(str(path), Path(), str(path))
    return read(path)


def read_redacted(path: Path) -> str:
    """Returns the text of a config without passwords and tokens, for copies of it.

    Raises:
        ConfigError: The config cannot be read, or is not TOML.
    """
    return redact_text(read_config(path), path)


def redact_text(text: str, path: Path) -> str:
    """Returns the text of a config without passwords and tokens.

    Args:
        text: The text.
        path: The file, for error messages.

    Raises:
        ConfigError: The text is not TOML.
    """
    for _, value in _items(parse(text, path)):
        if isinstance(value, str) and (redacted := redact(value)) != value:
            text = text.replace(value, redacted)
    # Other secrets can only be in comments. A key that looks like a secret stays.
    lines = [_COMMENT.sub(lambda match: redact(match[0]), line) for line in text.splitlines(keepends=True)]
    without_comments = "".join(lines)
    return without_comments if parse(without_comments, path) == parse(text, path) else text


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
    for parts, value in _items(table):
        if not isinstance(value, dict | list | bool) and value != "":
            mistakes.collect(_check_secret, parts, value, text, name)
    mistakes.raise_all()


def _check_secret(parts: _Key, value: Any, text: str, name: str) -> None:
    if parts[:2] == ("model", "arguments") and any(_is_secret(key, value) for key in parts[2:]):
        raise ConfigError(
            "the key looks like a secret, and configs are copied into the bundle and to MLflow",
            location=f"{name}: {format_key(parts)}",
            hint="Remove the key, and read the secret from an environment variable in the code of the model.",
        )
    if isinstance(value, str) and redact(value) != value and value not in text:
        raise ConfigError(
            "the text has a password or token with escapes, which would stay in copies of the config",
            location=f"{name}: {format_key(parts)}",
            hint="Write the text without backslashes.",
        )


def _is_secret(key: int | str, value: Any) -> bool:
    """Returns True if a key names a secret. A numeric token belongs to a vocabulary."""
    plain = re.sub(r"[\W_]", "", str(key)).lower()
    return _SECRET.fullmatch(plain) is not None and (isinstance(value, str) or not plain.endswith("token"))


def _items(table: dict[str, Any]) -> Iterator[tuple[_Key, Any]]:
    """Yields every value of a table at any depth, with its key.

    The function is iterative, because deep tables would exceed Python's recursion limit.
    """
    pending: list[tuple[_Key, Any]] = [((), table)]
    while pending:
        parts, value = pending.pop()
        if parts:
            yield parts, value
        if isinstance(value, dict):
            pending += [((*parts, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [((*parts, index), inner) for index, inner in enumerate(value)]
