"""Access to the MLflow store, a database or a server, with short timeouts."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shlex
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from optexport._utils import telemetry
from optexport._utils.atomic_dir import locked
from optexport.errors import ConfigError, TrackingError, first_line
from optexport.redaction import keep_secret, redact
from optexport.tracking import postgresql

T = TypeVar("T")

_SQLITE = "sqlite:///"
# In characters. Another program may answer in place of MLflow's server, with a whole page.
_LONGEST = 500
# Error of MLflow's server for a host name that is neither localhost nor a private address.
_FOREIGN_HOST = "Invalid Host header"
# Error of MLflow for an unknown run, and of SQLite for a file that it cannot open or write.
_NO_RUN = re.compile("Run (?:with id=|')\\w+'? not found")
_NO_FILE = re.compile("unable to open|readonly")
# Errors of databases for a row that another process has written in the meantime.
_TAKEN = re.compile("UniqueViolation|UNIQUE constraint|duplicate key|Duplicate entry")
# Temporary table of an MLflow migration. It remains if the process is killed.
_CUT_OFF = "table _alembic_tmp"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# Names of the connection timeout, in seconds, in each database driver.
_IN_TIME = {
    **dict.fromkeys(("psycopg", "mysqldb", "pymysql", "mysqlconnector"), "connect_timeout"),
    "pg8000": "timeout",
}

# By default mlflow waits minutes for a server that is down. Settings of the user take precedence.
_TRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_PATIENCE = {
    _TRIES: "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Otherwise a server may request a delay of an hour.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
_HASTE = {**_PATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


def import_mlflow() -> Any:
    """Imports mlflow with telemetry and output turned off and with short timeouts."""
    telemetry.off()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # mlflow prints the URL of a run, including a password, to stdout, which may carry JSON output.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow
    import mlflow.onnx

    # mlflow logs tracebacks of errors that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow


@contextlib.contextmanager
def hastily() -> Iterator[None]:
    """Shortens the server timeout to 5 seconds within the block.

    This suits small requests, and requests to a server that has just failed to answer.
    """
    ours = [name for name, value in _PATIENCE.items() if os.environ.get(name) == value]
    os.environ.update({name: _HASTE[name] for name in ours})
    try:
        yield
    finally:
        os.environ.update({name: _PATIENCE[name] for name in ours})


def made_once(make: Callable[[], T], find: Callable[[], T | None], drop: Callable[[T], object] | None = None) -> T:
    """Creates an object on a server only once, even if the answer is lost.

    mlflow repeats a request without an answer, which may create a second object. This function searches for the first
    object instead.

    Args:
        make: Creates the object and returns it, or its id.
        find: Returns the new object or an older one that serves the same purpose, or None.
        drop: Removes the new object if `find` returns an older one afterwards. A request of a killed process may have
            created that one. The default skips this second search.

    Returns:
        The object that counts: the older one if there are two.
    """
    made = _made(make, find)
    first = made if drop is None else find()
    if drop is None or first is None or first == made:
        return made
    with contextlib.suppress(Exception):  # a user with the right to create may lack the right to delete
        drop(made)
    return first


def _made(make: Callable[[], T], find: Callable[[], T | None]) -> T:
    tries = os.environ[_TRIES]
    os.environ[_TRIES] = "0"
    try:
        return make()
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own errors
        os.environ[_TRIES] = tries
        try:
            with hastily():
                found = find()
        except Exception:  # the first error is more informative
            raise error from None
        if found is None:
            raise
        return found
    finally:
        os.environ[_TRIES] = tries


def open_store(uri: str, folder: Path) -> Any:
    """Returns an `MlflowClient` of the store and makes it the default store of mlflow.

    Args:
        folder: The start of a relative path in the URI.
    """
    mlflow = import_mlflow()
    uri = resolved_uri(uri, folder)
    keep_secret(uri)
    if uri.startswith("postgresql"):
        postgresql.answer_in_time()
    _check_database(uri)
    mlflow.set_tracking_uri(uri)
    if not uri.startswith(_SQLITE):
        return mlflow.MlflowClient(uri)
    with locked(_database(uri), wait=True):  # if two processes make the tables at the same time, one fails
        _make_tables(mlflow, uri)
        return mlflow.MlflowClient(uri)


def check_not_new(uri: str, folder: Path) -> None:
    """Checks that a store is not a SQLite database that MLflow would only create now.

    The check passes if the folder is missing, because its disk may not be mounted.

    Raises:
        ConfigError: The database does not exist.
    """
    if not (uri := resolved_uri(uri, folder)).startswith(_SQLITE):
        return
    if (database := _database(uri).resolve()).parent.is_dir() and _is_new(database):
        raise ConfigError(
            "there is no such database", location=redact(uri), hint="Name the store that holds the model."
        )


def _make_tables(mlflow: Any, uri: str) -> None:
    """Creates a new database under a temporary name, as MLflow cannot repair a partial one."""
    database = _database(uri).resolve()
    drafts = f".{database.name}.partial-"
    for left in database.parent.glob(f"{glob.escape(drafts)}*"):  # drafts of killed processes
        shutil.rmtree(left, ignore_errors=True)
    if not _is_new(database) or "%" in uri:  # mlflow then uses two different folder names
        return
    with tempfile.TemporaryDirectory(prefix=drafts, dir=database.parent) as folder:
        draft = Path(folder) / database.name
        mlflow.MlflowClient(f"{_SQLITE}{draft}{''.join(uri.partition('?')[1:])}")
        # A mounted file cannot be replaced; mlflow then creates the tables in place.
        with contextlib.suppress(OSError):
            if _is_new(database):
                draft.replace(database)


def _is_new(database: Path) -> bool:
    return not database.exists() or database.stat().st_size == 0


def experiment_id(client: Any, name: str, folder: Path) -> str:
    """Returns the id of an experiment; creates the experiment if needed."""
    with hastily():
        found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # Without a server, artifacts go next to the database and not into the working directory.
    uri = client.tracking_uri
    if uri.startswith(_SQLITE):
        folder = _database(uri).parent
    beside = (folder / "mlartifacts").resolve().as_uri() if uri.startswith(_DATABASES) else None

    def known() -> str | None:
        made = client.get_experiment_by_name(name)
        return None if made is None else str(made.experiment_id)

    return made_once(lambda: str(client.create_experiment(name, artifact_location=beside)), known)


def resolved_uri(uri: str, folder: Path) -> str:
    """Resolves a relative SQLite path in a tracking URI, starting at the config's folder."""
    path = uri.removeprefix(_SQLITE)
    if path == uri or path.startswith("/"):
        return uri
    return f"{_SQLITE}{(folder / path).resolve()}"


def page(uri: str, experiment: str, run_id: str) -> str:
    """Returns the URL of a run.

    Without a server, the command that starts MLflow's UI comes first.
    """
    path = f"#/experiments/{experiment}/runs/{run_id}"
    if uri.startswith("http"):
        return f"{redact(uri).replace('//***@', '//').rstrip('/')}/{path}"
    # The virtual environment may not be active in the user's shell.
    program = shutil.which("mlflow") or str(Path(sys.executable).with_name("mlflow"))
    return f"{shlex.join([program, 'ui', '--backend-store-uri', redact(uri)])}\nhttp://127.0.0.1:5000/{path}"


def failure(error: Exception, uri: str, hint: str) -> TrackingError:
    """Converts an error of a store to a `TrackingError`."""
    raised = _of_driver(error)
    # Neither text contains a secret, so a cut cannot expose one.
    said = error.message if isinstance(error, TrackingError) else f"{type(raised).__name__}: {first_line(raised)}"
    told = TrackingError(said[:_LONGEST], location=f"tracking.uri: {uri}", hint=hint)
    told.__cause__ = error
    return told


def _of_driver(error: Exception) -> BaseException:
    """Returns the database driver's error that SQLAlchemy wraps, or else the error itself."""
    for raised in (error, error.__cause__):
        if isinstance(driver := getattr(raised, "orig", None), Exception):
            return driver
    return error


def when(error: Exception) -> str:
    """Returns the condition for another attempt, as the start of a sentence."""
    if isinstance(error, TrackingError):
        return "When the store keeps what it is sent"
    if _FOREIGN_HOST in str(error):
        return "When the server has been told of that host (mlflow server --allowed-hosts)"
    if _status(error) in (401, 403):
        return (
            "When the credentials are right (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
            "or user and password in the URI)"
        )
    if isinstance(raised := _of_driver(error), sqlite3.OperationalError) and _NO_FILE.search(str(raised)):
        return "When its folder is there, and this user may write to both"
    if _CUT_OFF in str(error):
        return "Its tables were cut off as MLflow made them. When it is removed, or another one is named"
    if isinstance(error, ImportError) and error.name:
        return f"When {error.name} is installed, which its driver needs"
    if _NO_RUN.search(str(error)):
        return "This store does not know the run that was begun, which another may have. To begin one here"
    if _TAKEN.search(str(error)):
        return "Another process writes the same, as of a copy of this bundle. When it has ended"
    if _status(error) in (400, 404):
        return "When what it says is mended"
    return "When the store answers"


def _status(error: Exception) -> int | None:
    """Returns the HTTP status of an error, or None."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()  # type: ignore[no-untyped-call]
    else:  # an error of requests, which uploads files
        status = getattr(getattr(error, "response", None), "status_code", None)
    return None if status is None else int(status)


def _database(uri: str) -> Path:
    """Returns the path of a SQLite database."""
    return Path(unquote(uri.removeprefix(_SQLITE).partition("?")[0]))


def _check_database(uri: str) -> None:
    """Opens the database once, because mlflow would try for two minutes before it fails."""
    if uri.startswith(_SQLITE):
        with contextlib.closing(sqlite3.connect(_database(uri), isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE optexport_may_write (number)")  # fails if the file is read-only
            database.execute("ROLLBACK")
    elif uri.startswith(_DATABASES):
        import sqlalchemy

        url = sqlalchemy.make_url(uri)
        limit = _IN_TIME.get(url.get_driver_name())
        in_time = {limit: postgresql.CONNECTS_IN} if limit is not None and limit not in url.query else {}
        with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool, connect_args=in_time).connect():
            pass
