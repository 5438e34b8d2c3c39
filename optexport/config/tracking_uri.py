"""What can be the URI of a tracking server or database, and what is a slip."""

from __future__ import annotations

import importlib.metadata
import os
import re
from urllib.parse import urlsplit

from optexport.errors import ConfigError, did_you_mean

_VARIABLE = "MLFLOW_TRACKING_URI"
# The kinds of stores that MLflow has itself; packages may add others.
_STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks")

_SCHEME = re.compile(r"[a-z][\w.+\-]*", re.ASCII | re.IGNORECASE)
_NEITHER = (
    "it is neither a folder nor a URI: write http://HOST:PORT, sqlite:///FILE or postgresql://HOST/DATABASE, say, "
    "or a folder as ./FOLDER"
)
_PARAMETER = re.compile(r"[\w.\-]*(?:=.*)?", re.ASCII)
# What redaction takes for the end of a value, and SQLAlchemy does not.
_ENDING = re.compile(r"[\s;\"'<>\\^`{}|]")
# A letter, a digit, or one of - . _ in another form: SQLAlchemy decodes keys, and those of ODBC stand in a value.
_ENCODED = re.compile(r"%(?:2D|2E|3\d|[46][1-9A-F]|[57][\dA]|5F)", re.ASCII | re.IGNORECASE)


def check_uri(uri: str) -> str:
    """Refuses a URI that names no place, one of a kind that is none of MLflow's, and a malformed one.

    What stands before a host has to be percent-encoded, or nobody could tell where a password ends; and a key of the
    query must not be, or nobody could tell that a password begins.

    Raises:
        ValueError: It is one of these; no part of a password is told.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        _check_name(uri)
        return uri
    kind = scheme.partition("+")[0]
    if kind not in _STORES and not _is_of_a_package(scheme):
        if kind.lower() in _STORES:
            raise ValueError(f"the kind of a store is written in small letters: {kind.lower()}://")
        raise ValueError(f"MLflow tracks in no store of the kind {kind}. {did_you_mean(kind, _STORES)}")
    if kind == "sqlite":
        _check_embedded(scheme, rest)
    elif kind != "file" and rest.startswith("/") and "@" in rest.partition("?")[0]:
        raise ValueError(_NEITHER)
    if kind in ("http", "https") and not rest.strip("/"):
        raise ValueError("it names no host")
    if uri == "file://":
        raise ValueError("file:// names no folder")
    if not rest.startswith("/") and not _is_encoded(rest, of_web=kind in ("http", "https")):
        raise ValueError(
            "it holds a character that a URI cannot have there: write those of user and password percent-encoded "
            "(a blank is %20, / is %2F, @ is %40, a quote %22)"
        )
    query = rest.partition("?")[2]
    if _ENCODED.search(query) or not all(map(_PARAMETER.fullmatch, query.split("&"))):
        raise ValueError(
            "its query hides what a key is called: write keys with letters, digits, - . and _ alone, and none of these "
            "percent-encoded, in values either"
        )
    if _ENDING.search(query):
        raise ValueError(
            "its query holds a character that a URI cannot have there: write it percent-encoded (a blank is %20, "
            "; is %3B, a quote %22)"
        )
    if kind in ("http", "https"):
        _check_address(uri)
    return uri


def of_environment() -> str | None:
    """The URI that ``MLFLOW_TRACKING_URI`` gives; None where it gives none.

    Raises:
        ConfigError: As a ValueError of `check_uri`.
    """
    uri = os.environ.get(_VARIABLE)
    try:
        return check_uri(uri) if uri else None
    except ValueError as error:
        raise ConfigError(str(error), location=_VARIABLE) from error


def _check_name(name: str) -> None:
    """Raises where what has no ``://`` is neither a folder nor a name of MLflow's, and may be a URI with a slip in it.

    Of such a one nobody could tell where a password is.
    """
    if not re.search(r"[@:?]|//", name) or re.match(r"\.|/(?!/)|file:/(?!/)|file:[^@:?]*$", name):
        return
    if not _is_of_a_package(name.partition(":")[0]):
        raise ValueError(_NEITHER)


def _check_embedded(scheme: str, rest: str) -> None:
    """Raises where no file is meant that MLflow, SQLAlchemy and SQLite would all take for the same."""
    file, _, query = rest.partition("?")
    if not file.strip("/"):
        raise ValueError("it names no file, and what a database kept in memory would end with the program")
    if scheme != "sqlite" or not rest.startswith("/") or file.startswith("/file:") or "uri=" in query:
        raise ValueError("write a database of SQLite as sqlite:///FILE, or sqlite:////PATH/FILE")


def _check_address(uri: str) -> None:
    """Raises where no server of the web can be."""
    try:
        address = urlsplit(uri)
        port = address.port
    except ValueError:  # which may tell a part of a password
        raise ValueError("it is no address: its port is beyond 65535, or its brackets hold no IPv6 address") from None
    if not address.hostname or port == 0:
        raise ValueError(f"it names no {'port that a server has' if address.hostname else 'host'}")


def _is_of_a_package(scheme: str) -> bool:
    """Whether an installed package gives MLflow stores of that kind."""
    return scheme in importlib.metadata.entry_points(group="mlflow.tracking_store").names


def _is_encoded(rest: str, *, of_web: bool) -> bool:
    """Whether all is encoded that has to be, in what follows the scheme."""
    if re.search(r"[\s\"'<>\\^`{}|]", rest):
        return False
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not of_web:  # SQLAlchemy takes all up to the last @ for a password, whatever is in it
        return "@" not in rest.removeprefix(authority) and authority.count("@") <= 1
    if "@" not in authority and "@" in rest.partition("?")[0]:  # which may be a password that begins as a port does
        return False
    _, separator, port = re.sub(r"\[.*\]", "", authority.rpartition("@")[2]).partition(":")
    return authority.count("@") <= 1 and (not separator or port == "" or port.isdecimal())
