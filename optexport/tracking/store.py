"""Where MLflow keeps what it is given: an embedded database or a server, and how long one is waited for."""

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
# In characters: what answers may be no server of MLflow's, and say it with a page.
_LONGEST = 500
# What MLflow's server says where it is called by a name that is neither localhost's nor a private address.
_FOREIGN_HOST = "Invalid Host header"
# What SQLite says of a file that it cannot open or write, beside one that others write at the time.
_NO_RUN = re.compile("Run (?:with id=|')\\w+'? not found")
_NO_FILE = re.compile("unable to open|readonly")
# What a database says of a row that another process has written meanwhile.
_TAKEN = re.compile("UniqueViolation|UNIQUE constraint|duplicate key|Duplicate entry")
# A table that MLflow makes as it changes another, and that a killed program leaves.
_CUT_OFF = "table _alembic_tmp"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# What the drivers of databases call the seconds that they wait for a server to take a connection.
_IN_TIME = {
    **dict.fromkeys(("psycopg", "mysqldb", "pymysql", "mysqlconnector"), "connect_timeout"),
    "pg8000": "timeout",
}

# mlflow waits minutes for a server that is down. A user's own setting stays.
_TRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_PATIENCE = {
    _TRIES: "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # A server may ask for an hour.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
_HASTE = {**_PATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


def import_mlflow() -> Any:
    """mlflow, which calls nobody, prints nothing and waits less than it would."""
    telemetry.off()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # It prints the address of a run, password and all, into what may be our JSON.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow
    import mlflow.onnx

    # It prints tracebacks of errors that it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow


@contextlib.contextmanager
def hastily() -> Iterator[None]:
    """Within it a server has seconds to answer: for small questions, and where the last one was not answered."""
    ours = [name for name, value in _PATIENCE.items() if os.environ.get(name) == value]
    os.environ.update({name: _HASTE[name] for name in ours})
    try:
        yield
    finally:
        os.environ.update({name: _PATIENCE[name] for name in ours})


def made_once(make: Callable[[], T], find: Callable[[], T | None], drop: Callable[[T], object] | None = None) -> T:
    """What is made by one call to a server, where a second call would make another.

    mlflow sends again what was not answered. Here it is looked for instead: it may have been made, and only the answer
    lost.

    Args:
        find: Gives what the call made, or an older one; None where there is none.
        drop: Removes what was made where an older one is found afterwards, which then counts: a call of a program that
            was ended may have been answered meanwhile. Without it nothing is looked for.
    """
    made = _made(make, find)
    first = made if drop is None else find()
    if drop is None or first is None or first == made:
        return made
    with contextlib.suppress(Exception):  # who may make something need not be allowed to remove it
        drop(made)
    return first


def _made(make: Callable[[], T], find: Callable[[], T | None]) -> T:
    tries = os.environ[_TRIES]
    os.environ[_TRIES] = "0"
    try:
        return make()
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own
        os.environ[_TRIES] = tries
        try:
            with hastily():
                found = find()
        except Exception:  # what failed first says more
            raise error from None
        if found is None:
            raise
        return found
    finally:
        os.environ[_TRIES] = tries


def open_store(uri: str, folder: Path) -> Any:
    """An `MlflowClient` of the store, which from now on is also that of mlflow's own functions.

    Args:
        folder: What a relative path in the URI is taken from.
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
    """Checks that a store of which something is asked is none that would only be made.

    One whose folder is not there may be on a disk that is not there now.

    Raises:
        ConfigError: It is a database that is not there.
    """
    if not (uri := resolved_uri(uri, folder)).startswith(_SQLITE):
        return
    if (database := _database(uri).resolve()).parent.is_dir() and _is_new(database):
        raise ConfigError(
            "there is no such database", location=redact(uri), hint="Name the store that holds the model."
        )


def _make_tables(mlflow: Any, uri: str) -> None:
    """Has mlflow make a new database under another name: what a signal leaves of one, it never goes on with."""
    database = _database(uri).resolve()
    drafts = f".{database.name}.partial-"
    for left in database.parent.glob(f"{glob.escape(drafts)}*"):  # of a program that was killed
        shutil.rmtree(left, ignore_errors=True)
    if not _is_new(database) or "%" in uri:  # of which mlflow makes folders by two names
        return
    with tempfile.TemporaryDirectory(prefix=drafts, dir=database.parent) as folder:
        draft = Path(folder) / database.name
        mlflow.MlflowClient(f"{_SQLITE}{draft}{''.join(uri.partition('?')[1:])}")
        with contextlib.suppress(OSError):  # as of a file that is mounted, which mlflow has to make where it is
            if _is_new(database):
                draft.replace(database)


def _is_new(database: Path) -> bool:
    return not database.exists() or database.stat().st_size == 0


def experiment_id(client: Any, name: str, folder: Path) -> str:
    """The id of an experiment, which is made where it is not there yet."""
    with hastily():
        found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A database has no server to say where files go: beside it, not wherever the program is called.
    uri = client.tracking_uri
    if uri.startswith(_SQLITE):
        folder = _database(uri).parent
    beside = (folder / "mlartifacts").resolve().as_uri() if uri.startswith(_DATABASES) else None

    def known() -> str | None:
        made = client.get_experiment_by_name(name)
        return None if made is None else str(made.experiment_id)

    return made_once(lambda: str(client.create_experiment(name, artifact_location=beside)), known)


def resolved_uri(uri: str, folder: Path) -> str:
    """A tracking URI whose relative SQLite path is taken from a folder: the config's, as all paths are."""
    path = uri.removeprefix(_SQLITE)
    if path == uri or path.startswith("/"):
        return uri
    return f"{_SQLITE}{(folder / path).resolve()}"


def page(uri: str, experiment: str, run_id: str) -> str:
    """The address of a run in MLflow's own page, after the command that serves it where no server does."""
    path = f"#/experiments/{experiment}/runs/{run_id}"
    if uri.startswith("http"):
        return f"{redact(uri).replace('//***@', '//').rstrip('/')}/{path}"
    # The program may have been called by its path, from an environment that the shell does not know.
    program = shutil.which("mlflow") or str(Path(sys.executable).with_name("mlflow"))
    return f"{shlex.join([program, 'ui', '--backend-store-uri', redact(uri)])}\nhttp://127.0.0.1:5000/{path}"


def failure(error: Exception, uri: str, hint: str) -> TrackingError:
    """What went wrong with a store, as one message: mlflow, SQLAlchemy and requests each raise their own."""
    raised = _of_driver(error)
    # Neither holds a secret that the cut could lay bare.
    said = error.message if isinstance(error, TrackingError) else f"{type(raised).__name__}: {first_line(raised)}"
    told = TrackingError(said[:_LONGEST], location=f"tracking.uri: {uri}", hint=hint)
    told.__cause__ = error
    return told


def _of_driver(error: Exception) -> BaseException:
    """What the driver of a database raised, which SQLAlchemy puts its own words before; else the error itself."""
    for raised in (error, error.__cause__):
        if isinstance(driver := getattr(raised, "orig", None), Exception):
            return driver
    return error


def when(error: Exception) -> str:
    """When it is worth to ask a store again that has failed, as the beginning of a sentence."""
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
    """The status that a server of the web answered with; None where it did not."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()  # type: ignore[no-untyped-call]
    else:  # of requests, where files are sent
        status = getattr(getattr(error, "response", None), "status_code", None)
    return None if status is None else int(status)


def _database(uri: str) -> Path:
    """The file of an embedded database."""
    return Path(unquote(uri.removeprefix(_SQLITE).partition("?")[0]))


def _check_database(uri: str) -> None:
    """Raises at once where mlflow would try for two minutes to open a database that it cannot."""
    if uri.startswith(_SQLITE):
        with contextlib.closing(sqlite3.connect(_database(uri), isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE optexport_may_write (number)")  # which tells of a file that is read-only
            database.execute("ROLLBACK")
    elif uri.startswith(_DATABASES):
        import sqlalchemy

        url = sqlalchemy.make_url(uri)
        limit = _IN_TIME.get(url.get_driver_name())
        in_time = {limit: postgresql.CONNECTS_IN} if limit is not None and limit not in url.query else {}
        with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool, connect_args=in_time).connect():
            pass
