"""Access to the MLflow store, a database or a server, with short timeouts."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import logging
import os
import re
import select
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
from optexport.config.tracking_uri import ENVIRONMENT_URI
from optexport.errors import ConfigError, TrackingError, first_line
from optexport.redaction import keep_secret, redact

T = TypeVar("T")

_SQLITE = "sqlite:///"
# In characters. Another program may answer in place of MLflow's server, with a whole page.
_MAX_MESSAGE = 500
# Error of MLflow's server for a host name that is neither localhost nor a private address.
_FOREIGN_HOST = "Invalid Host header"
# Error of MLflow for an unknown run, and of SQLite for a file that it cannot open or write.
_RUN_NOT_FOUND = re.compile("Run (?:with id=|')\\w+'? not found")
_NOT_WRITABLE = re.compile("unable to open|readonly")
# Errors of databases for a row that another process has written in the meantime.
_WRITTEN_MEANWHILE = re.compile("UniqueViolation|UNIQUE constraint|duplicate key|Duplicate entry")
# Temporary table of an MLflow migration. It remains if the process is killed.
_INCOMPLETE = "table _alembic_tmp"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# Names of the connection timeout, in seconds, in each database driver.
_TIMEOUT_OPTIONS = {
    **dict.fromkeys(("psycopg", "mysqldb", "pymysql", "mysqlconnector"), "connect_timeout"),
    "pg8000": "timeout",
}

# Modules that an upload imports.
_LATER_IMPORTS = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "mlflow.data.numpy_dataset",
    "mlflow.pyfunc",
    "onnx",
    "onnxruntime",
    "safetensors",
)
# Query of a page's address: MLflow 3 shows its pages for agents by default, which have no list of runs.
_WORKFLOW = "workflowType=machine_learning"

# By default mlflow waits minutes for a server that is down. Settings of the user take precedence.
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_TIMEOUTS = {
    _RETRIES: "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Otherwise a server may request a delay of an hour.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
_SHORT_TIMEOUTS = {**_TIMEOUTS, "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}

# The end of urllib3's text about a server that does not answer: "... [Errno 111] Connection refused'))".
_NO_CONNECTION = re.compile(r"Failed to establish a new connection: \[Errno -?\d+\] ([\w ]+)")

# In seconds: limits for a connection to a database, unless the URI sets one, and for each part of an answer of
# PostgreSQL.
_CONNECTION_TIMEOUT = 5
_ANSWER_TIMEOUT = 60
# True after PostgreSQL's first timeout; later waits then use the shorter limit.
_is_silent = False


def import_mlflow() -> Any:
    """Imports mlflow with telemetry and output turned off and with short timeouts."""
    telemetry.disable()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # mlflow prints the URL of a run, including a password, to stdout, which may carry JSON output.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for name, value in _TIMEOUTS.items():
        os.environ.setdefault(name, value)
    import mlflow
    import mlflow.onnx

    # mlflow logs tracebacks of errors that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow


def prepare(uri: str) -> None:
    """Imports and reads what a run in this store needs later."""
    import_mlflow()
    for name in _LATER_IMPORTS:
        importlib.import_module(name)
    if uri.startswith(_DATABASES):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    # mlflow lists the modules of all installed packages the first time that it looks at a requirement.
    requirements = importlib.import_module("mlflow.utils.requirements_utils")
    requirements.warn_dependency_requirement_mismatches(["mlflow"])


@contextlib.contextmanager
def short_timeout() -> Iterator[None]:
    """Shortens the server timeout to 5 seconds within the block.

    This suits small requests, and requests to a server that has just failed to answer.
    """
    defaults = [name for name, value in _TIMEOUTS.items() if os.environ.get(name) == value]
    os.environ.update({name: _SHORT_TIMEOUTS[name] for name in defaults})
    try:
        yield
    finally:
        os.environ.update({name: _TIMEOUTS[name] for name in defaults})


def create_once(
    create: Callable[[], T], find: Callable[[], T | None], delete: Callable[[T], object] | None = None
) -> T:
    """Creates an object on a server only once, even if the answer is lost.

    mlflow repeats a request without an answer, which may create a second object. This function searches for the first
    object instead.

    Args:
        create: Creates the object and returns it, or its id.
        find: Returns the new object or an older one that serves the same purpose, or None.
        delete: Deletes the new object if `find` returns an older one afterwards. A request of a killed process may have
            created that one. The default skips this second search.

    Returns:
        The object that counts: the older one if there are two.
    """
    new = _create_or_find(create, find)
    first = new if delete is None else find()
    if delete is None or first is None or first == new:
        return new
    with contextlib.suppress(Exception):  # a user with the right to create may lack the right to delete
        delete(new)
    return first


def _create_or_find(create: Callable[[], T], find: Callable[[], T | None]) -> T:
    retries = os.environ[_RETRIES]
    os.environ[_RETRIES] = "0"
    try:
        return create()
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own errors
        os.environ[_RETRIES] = retries
        try:
            with short_timeout():
                match = find()
        except Exception:  # the first error is more informative
            raise error from None
        if match is None:
            raise
        return match
    finally:
        os.environ[_RETRIES] = retries


def open_store(uri: str, folder: Path) -> Any:
    """Returns an `MlflowClient` of the store and makes it the default store of mlflow.

    Args:
        folder: The folder that a relative path in the URI starts from.
    """
    mlflow = import_mlflow()
    uri = resolved_uri(uri, folder)
    keep_secret(uri)
    if uri.startswith("postgresql"):
        _limit_postgresql()
    _check_database(uri)
    _set_default_store(mlflow, uri)
    if not uri.startswith(_SQLITE):
        return mlflow.MlflowClient(uri)
    with locked(_database(uri), wait=True):  # if two processes make the tables at the same time, one fails
        _make_tables(mlflow, uri)
        return mlflow.MlflowClient(uri)


def _set_default_store(mlflow: Any, uri: str) -> None:
    """Sets the default store, but not the environment: the next run in this process would take that for its user's."""
    before = os.environ.get(ENVIRONMENT_URI)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(ENVIRONMENT_URI, None)
    else:
        os.environ[ENVIRONMENT_URI] = before


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
            "the database does not exist", location=redact(uri), hint="Check the path, or name the store of the model."
        )


def _make_tables(mlflow: Any, uri: str) -> None:
    """Creates a new database under a temporary name, as MLflow cannot repair a partial one."""
    database = _database(uri).resolve()
    drafts = f".{database.name}.partial-"
    for leftover in database.parent.glob(f"{glob.escape(drafts)}*"):  # drafts of killed processes
        shutil.rmtree(leftover, ignore_errors=True)
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
    with short_timeout():
        experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    # Without a server, artifacts go next to the database and not into the working directory.
    uri = client.tracking_uri
    if uri.startswith(_SQLITE):
        folder = _database(uri).parent
    location = (folder / "mlartifacts").resolve().as_uri() if uri.startswith(_DATABASES) else None

    def find() -> str | None:
        experiment = client.get_experiment_by_name(name)
        return None if experiment is None else str(experiment.experiment_id)

    return create_once(lambda: str(client.create_experiment(name, artifact_location=location)), find)


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
    path = f"#/experiments/{experiment}/runs/{run_id}?{_WORKFLOW}"
    if uri.startswith("http"):
        return f"{redact(uri).replace('//***@', '//').rstrip('/')}/{path}"
    # The virtual environment may not be active in the user's shell.
    program = shutil.which("mlflow") or str(Path(sys.executable).with_name("mlflow"))
    return f"{shlex.join([program, 'ui', '--backend-store-uri', redact(uri)])}\nhttp://127.0.0.1:5000/{path}"


def failure(error: Exception, uri: str, hint: str) -> TrackingError:
    """Converts an error of a store to a `TrackingError`."""
    cause = _driver_error(error)
    # Neither text contains a secret, so a cut cannot expose one.
    message = error.message if isinstance(error, TrackingError) else f"{type(cause).__name__}: {first_line(cause)}"
    if (refusal := _NO_CONNECTION.search(message)) is not None:
        message = f"cannot connect to the server: {refusal[1].lower()}"
    failure = TrackingError(message[:_MAX_MESSAGE], location=f"tracking.uri: {uri}", hint=hint)
    failure.__cause__ = error
    return failure


def _driver_error(error: Exception) -> BaseException:
    """Returns the database driver's error that SQLAlchemy wraps, or else the error itself."""
    for raised in (error, error.__cause__):
        if isinstance(driver := getattr(raised, "orig", None), Exception):
            return driver
    return error


def retry_condition(error: Exception) -> str:
    """Returns the condition for another attempt, as the start of a sentence."""
    if isinstance(error, TrackingError):
        return "When the store keeps all uploaded files"
    if _FOREIGN_HOST in str(error):
        return "When the server accepts its host name (mlflow server --allowed-hosts)"
    if _status(error) in (401, 403):
        return (
            "When the credentials are correct (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
            "or user and password in the URI)"
        )
    if isinstance(cause := _driver_error(error), sqlite3.OperationalError) and _NOT_WRITABLE.search(str(cause)):
        return "When the folder of the database exists, and this user may write to both"
    if _INCOMPLETE in str(error):
        return "MLflow was interrupted while it created the database. When you have deleted it or named another one"
    if isinstance(error, ImportError) and error.name:
        return f"When the Python package {error.name} is installed"
    if _RUN_NOT_FOUND.search(str(error)):
        return "The run of this bundle may be in another store. To start a new run in this one"
    if _WRITTEN_MEANWHILE.search(str(error)):
        return "Another process uploads this bundle or a copy of it. When that process has ended"
    if _status(error) in (400, 404):
        return "When the cause is fixed"
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
        option = _TIMEOUT_OPTIONS.get(url.get_driver_name())
        timeout = {option: _CONNECTION_TIMEOUT} if option is not None and option not in url.query else {}
        with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool, connect_args=timeout).connect():
            pass


@functools.cache
def _limit_postgresql() -> None:
    """Sets time limits for all psycopg2 connections of this process.

    Otherwise libpq waits forever for a silent server, and ignores signals meanwhile.
    """
    with contextlib.suppress(ImportError):
        from psycopg2 import extensions
        from sqlalchemy import Engine, event

        event.listen(Engine, "do_connect", _connect_psycopg2)
        extensions.set_wait_callback(_wait_for_answer)


def _connect_psycopg2(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> Any:  # noqa: ARG001 - SQLAlchemy's
    """Connects through libpq without our wait callback, so that libpq's timeout and host list work."""
    if dialect.driver != "psycopg2":
        return None
    from psycopg2 import extensions

    options.setdefault("connect_timeout", _CONNECTION_TIMEOUT)
    extensions.set_wait_callback(None)
    try:
        return dialect.connect(*arguments, **options)
    finally:
        extensions.set_wait_callback(_wait_for_answer)


def _wait_for_answer(connection: Any) -> None:
    global _is_silent
    from psycopg2 import OperationalError, extensions

    while (state := connection.poll()) != extensions.POLL_OK:
        readers = [connection] if state == extensions.POLL_READ else []
        writers = [connection] if state == extensions.POLL_WRITE else []
        seconds = _CONNECTION_TIMEOUT if _is_silent else _ANSWER_TIMEOUT
        if not any(select.select(readers, writers, [], seconds)):
            _is_silent = True
            raise OperationalError(f"the server did not answer within {seconds} seconds")
