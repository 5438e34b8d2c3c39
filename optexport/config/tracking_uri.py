"""Checks the URI of a tracking store before anything connects to it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from optexport.config.validation import InvalidValueError
from optexport.errors import ConfigError, did_you_mean

ENVIRONMENT_URI = "MLFLOW_TRACKING_URI"
# Stores of MLflow itself; packages may add others.
_STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks")
_FILES = ("sqlite", "file")
_WEB = ("http", "https")

_SCHEME = re.compile(r"[a-z][\w.+\-]*", re.ASCII | re.IGNORECASE)
_FORBIDDEN = re.compile(r"[\s\"'<>\\^`|]")
# Messages with their hints. They show nothing of the URI, because it may have a password.
_NOT_A_URI = (
    "the text is neither a URI nor a folder",
    "Write a URI, such as http://HOST:PORT, sqlite:///FILE or postgresql://HOST/DATABASE, or a folder as ./FOLDER.",
)
_NOT_ENCODED = (
    "the URI has a character that is not allowed in a user name, password or query",
    "Percent-encode it: a space is %20, / is %2F, @ is %40, a quote is %22.",
)
_NO_ADDRESS = (
    "the port is not a number up to 65535, or the brackets do not contain an IPv6 address",
    "Write http://HOST:PORT, such as http://127.0.0.1:5000.",
)
_NO_HOST = ("the URI has no host", "Write http://HOST:PORT, such as http://127.0.0.1:5000.")
_PORT_ZERO = ("the port of the server is 0", "Write the port that the MLflow server listens on.")
_NO_SQLITE_FILE = (
    "the URI has no file, and a database in memory would be lost at the end of the run",
    "Write sqlite:///FILE, such as sqlite:///mlflow.db.",
)
_FILE_ALONE = (
    "the URI is the path of a database file",
    "Write sqlite:///FILE, such as sqlite:///mlflow.db.",
)
_SQLITE_FORM = (
    "the URI of a SQLite database has an unsupported form",
    "Write sqlite:///FILE, or sqlite:////PATH/FILE for an absolute path.",
)


def check_uri(uri: str) -> str:
    """Checks that MLflow has a store for a URI, and that it is unambiguous where its password ends.

    Returns:
        The URI.

    Raises:
        InvalidValueError: The URI is refused. The message contains no part of a password.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        _check_name(uri)
        return uri
    kind = scheme.partition("+")[0]
    if kind not in _STORES and not _is_from_package(scheme):
        if kind.lower() in _STORES:
            raise InvalidValueError(
                f"the scheme {kind}:// must be in lower case", f"Write the scheme as {kind.lower()}://."
            )
        raise InvalidValueError(f'MLflow has no tracking store "{kind}"', did_you_mean(kind, _STORES))
    if kind == "sqlite":
        _check_sqlite(scheme, rest)
    elif uri == "file://":
        raise InvalidValueError("the URI file:// has no folder", "Write a folder, such as ./mlruns.")
    elif kind not in _FILES:
        _check_server(uri, is_web=kind in _WEB)
    return uri


def find_environment_uri() -> str | None:
    """Returns the URI in ``MLFLOW_TRACKING_URI``, or None if the variable is empty.

    Raises:
        ConfigError: `check_uri` refuses the URI.
    """
    uri = os.environ.get(ENVIRONMENT_URI)
    try:
        return check_uri(uri) if uri else None
    except InvalidValueError as error:
        raise ConfigError(error.message, location=ENVIRONMENT_URI, hint=error.hint) from error


def find_uri(uri: str | None, location: str, hint: str) -> str:
    """Returns a user's URI, or else the one in ``MLFLOW_TRACKING_URI``.

    Args:
        location: The name of the user's argument, for errors.
        hint: How to set a URI.

    Raises:
        ConfigError: `check_uri` refuses the URI, or nothing sets one.
    """
    if uri is not None and not isinstance(uri, str):
        raise ConfigError(f"{uri!r} is not a text", location=location)
    try:
        store_uri = check_uri(uri) if uri else find_environment_uri()
    except InvalidValueError as error:
        raise ConfigError(error.message, location=location, hint=error.hint) from error
    if store_uri is None:
        raise ConfigError("no MLflow store is set", location=location, hint=hint)
    return store_uri


def check_database_folder(uri: str, path: Path) -> None:
    """Checks that MLflow can open a database next to a config.

    Args:
        uri: The tracking URI in the config.
        path: The path of the config.

    Raises:
        ConfigError: The folder's name has characters with a special meaning in a URI.
    """
    match = re.search(r"\?|%[\da-fA-F]{2}", str(path.parent.resolve()))
    is_relative = uri.startswith("sqlite:///") and not uri.startswith("sqlite:////")
    if match is not None and is_relative:
        raise ConfigError(
            f'MLflow cannot open a database in {path.parent}, because the path has "{match[0]}" in it',
            location=f"{path}: tracking.uri",
            hint="Write the path of a database in another folder: sqlite:////PATH/mlflow.db. Or set enabled = false.",
        )


def _check_name(name: str) -> None:
    """Refuses a text without ``://`` that may be a mistyped URI, with an unknown password.

    Raises:
        InvalidValueError: The text is not clearly a folder or a name of MLflow's.
    """
    if re.search(r"\.(db|sqlite3?)$", name):
        raise InvalidValueError(*_FILE_ALONE)
    if not re.search(r"[@:?]|//", name) or re.match(r"\.|/(?!/)|file:/(?!/)|file:[^@:?]*$", name):
        return
    if not _is_from_package(name.partition(":")[0]):
        raise InvalidValueError(*_NOT_A_URI)


def _check_sqlite(scheme: str, rest: str) -> None:
    """Refuses other spellings than ``sqlite:///FILE``.

    MLflow, SQLAlchemy and SQLite resolve them differently.
    """
    file, _, query = rest.partition("?")
    if not file.strip("/"):
        raise InvalidValueError(*_NO_SQLITE_FILE)
    if scheme != "sqlite" or not rest.startswith("/") or file.startswith("/file:") or "uri=" in query:
        raise InvalidValueError(*_SQLITE_FORM)


def _check_server(uri: str, *, is_web: bool) -> None:
    """Refuses an impossible address, and a password that is not percent-encoded.

    Raises:
        InvalidValueError: The URI is refused.
    """
    if _FORBIDDEN.search(uri):
        raise InvalidValueError(*_NOT_ENCODED)
    try:
        parts = urlsplit(uri)
    except ValueError:  # its message may contain a part of a password
        raise InvalidValueError(*_NO_ADDRESS) from None
    # SQLAlchemy takes a slash or a question mark before an "@" as a part of the password; urllib does not.
    behind = parts.path if is_web else f"{parts.path}?{parts.query}#{parts.fragment}"
    if parts.netloc.count("@") > 1 or ("@" in behind and "@" not in parts.netloc):
        raise InvalidValueError(*_NOT_ENCODED)
    if is_web:
        try:
            port = parts.port
        except ValueError:  # as above
            raise InvalidValueError(*_NO_ADDRESS) from None
        if not parts.hostname:
            raise InvalidValueError(*_NO_HOST)
        if port == 0:
            raise InvalidValueError(*_PORT_ZERO)


def _is_from_package(scheme: str) -> bool:
    """Returns True if an installed package adds stores of this scheme to MLflow."""
    return scheme in importlib.metadata.entry_points(group="mlflow.tracking_store").names
