"""Checks the URI of a tracking store before anything connects to it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from optexport.errors import ConfigError, did_you_mean

_VARIABLE = "MLFLOW_TRACKING_URI"
# Stores of MLflow itself; packages may add others.
_STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks")
_FILES = ("sqlite", "file")
_WEB = ("http", "https")

_SCHEME = re.compile(r"[a-z][\w.+\-]*", re.ASCII | re.IGNORECASE)
_NOT_ENCODED = re.compile(r"[\s\"'<>\\^`|]")
_NOT_A_URI = (
    "it is neither a folder nor a URI: write http://HOST:PORT, sqlite:///FILE or postgresql://HOST/DATABASE, say, "
    "or a folder as ./FOLDER"
)
_ENCODE = (
    "it holds a character that a URI cannot have there: percent-encode it in the user and the password "
    "(a blank is %20, / is %2F, @ is %40, a quote %22)"
)

_NO_ADDRESS = "its port is not a number up to 65535, or its brackets hold no IPv6 address"


def check_uri(uri: str) -> str:
    """Checks that MLflow has a store for a URI, and that the end of its password is clear.

    Returns:
        The URI.

    Raises:
        ValueError: The URI is refused. The message contains no part of a password.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        _check_name(uri)
        return uri
    kind = scheme.partition("+")[0]
    if kind not in _STORES and not _is_from_package(scheme):
        if kind.lower() in _STORES:
            raise ValueError(f"write the kind of a store in small letters: {kind.lower()}://")
        raise ValueError(f"MLflow has no store of the kind {kind}. {did_you_mean(kind, _STORES)}")
    if kind == "sqlite":
        _check_sqlite(scheme, rest)
    elif uri == "file://":
        raise ValueError("file:// names no folder")
    elif kind not in _FILES:
        _check_server(uri, is_web=kind in _WEB)
    return uri


def of_environment() -> str | None:
    """Returns the URI in ``MLFLOW_TRACKING_URI``, or None if the variable is empty.

    Raises:
        ConfigError: `check_uri` refuses the URI.
    """
    uri = os.environ.get(_VARIABLE)
    try:
        return check_uri(uri) if uri else None
    except ValueError as error:
        raise ConfigError(str(error), location=_VARIABLE) from error


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
            f'MLflow cannot keep a database in a folder with "{match[0]}" in its name',
            location=f"{path}: tracking.uri",
            hint="Name a database elsewhere, as sqlite:////PATH/mlflow.db, or set enabled = false.",
        )


def _check_name(name: str) -> None:
    """Refuses a text without ``://`` that may be a mistyped URI, with an unknown password.

    Raises:
        ValueError: The text is not clearly a folder or a name of MLflow's.
    """
    if not re.search(r"[@:?]|//", name) or re.match(r"\.|/(?!/)|file:/(?!/)|file:[^@:?]*$", name):
        return
    if not _is_from_package(name.partition(":")[0]):
        raise ValueError(_NOT_A_URI)


def _check_sqlite(scheme: str, rest: str) -> None:
    """Refuses other spellings than ``sqlite:///FILE``.

    MLflow, SQLAlchemy and SQLite resolve them differently.
    """
    file, _, query = rest.partition("?")
    if not file.strip("/"):
        raise ValueError("it names no file, and a database in memory would end with the program")
    if scheme != "sqlite" or not rest.startswith("/") or file.startswith("/file:") or "uri=" in query:
        raise ValueError("write a database of SQLite as sqlite:///FILE, or sqlite:////PATH/FILE")


def _check_server(uri: str, *, is_web: bool) -> None:
    """Refuses an impossible address, and a password that is not percent-encoded.

    Raises:
        ValueError: The URI is refused.
    """
    if _NOT_ENCODED.search(uri):
        raise ValueError(_ENCODE)
    try:
        parts = urlsplit(uri)
    except ValueError:  # its message may contain a part of a password
        raise ValueError(_NO_ADDRESS) from None
    # SQLAlchemy takes a slash or a question mark before an "@" as a part of the password; urllib does not.
    behind = parts.path if is_web else f"{parts.path}?{parts.query}#{parts.fragment}"
    if parts.netloc.count("@") > 1 or ("@" in behind and "@" not in parts.netloc):
        raise ValueError(_ENCODE)
    if is_web:
        try:
            port = parts.port
        except ValueError:  # as above
            raise ValueError(_NO_ADDRESS) from None
        if not parts.hostname or port == 0:
            raise ValueError(f"it names no {'port of a server' if parts.hostname else 'host'}")


def _is_from_package(scheme: str) -> bool:
    """Returns True if an installed package adds stores of this scheme to MLflow."""
    return scheme in importlib.metadata.entry_points(group="mlflow.tracking_store").names
