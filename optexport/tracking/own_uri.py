"""The store that a bundle alone names, as whoever made it wrote it there: where it may be asked."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from optexport.errors import ConfigError
from optexport.tracking import store

_WEB = ("http", "https")


def check_server(uri: str, place: str, mend: str) -> None:
    """Checks that it is a server that is sent nothing of this machine's.

    Args:
        place: The bundle.
        mend: How to say that it is the right one.

    Raises:
        ConfigError: It is none, or would be sent credentials; or a bundle does not tell which it is.
    """
    if _scheme(uri) not in _WEB or "***" in uri:
        raise ConfigError(
            f"its config says {uri}, which does not tell where that is", place=place, mend=f"Say so: {mend}"
        )
    if store.has_credentials(uri):
        raise ConfigError(
            f"its config names {uri}, and whoever made it would be sent the credentials of this machine",
            place=place,
            mend=f"If that is where they belong, say so: {mend}",
        )


def check_source(uri: str, place: str, mend: str) -> None:
    """Checks that a model may be fetched from it: as `check_server`, or from an embedded database that is MLflow's.

    Args:
        uri: With an absolute path.
        place, mend: As for `check_server`.

    Raises:
        ConfigError: It may not.
    """
    if _scheme(uri) != "sqlite":
        check_server(uri, place, mend)
    elif not _is_of_mlflow(Path(uri.partition(":///")[2].partition("?")[0])):
        raise ConfigError(
            f"its config names {uri}, which is no database of MLflow's", place=place, mend=f"Name another one: {mend}"
        )


def _scheme(uri: str) -> str:
    return uri.partition(":")[0].partition("+")[0].lower()


def _is_of_mlflow(database: Path) -> bool:
    """Whether a file is one, found without writing to it: MLflow would make its tables in any."""
    try:
        with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as reading:
            found = reading.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
    except sqlite3.Error:  # no database, or none that may be read
        return False
    return bool(found)
