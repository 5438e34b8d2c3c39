"""URIs of tracking stores: valid ones pass, and errors about invalid ones contain no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.schema import TrackingConfig
from optexport.config.tracking_uri import check_uri
from optexport.errors import ConfigError

URIS = [
    "sqlite:///mlflow.db",
    "sqlite:////home/a@b/c d.db",
    "mlruns",
    "file:///tmp/x y",
    "databricks",
    "databricks://profile",
    "/home/a@b/mlruns",
    "./a:b",
    "file:/tmp/x",
    "file:mlruns",
    "postgresql:///db?host=/var/run/postgresql",
    "postgresql://[::1]/db?options=-c%20statement_timeout%3D9&host=[::1]:5432,other:5433",
    "http://127.0.0.1:5000",
    "http://someone:secret@host:5000/path/x@y",
    "http://[::1]:5000",
    "https://host/?token=x",
    "postgresql://someone:sec%20ret%2F%40@host/db",
    "postgresql+psycopg2://someone:secret@host:5432/db?sslmode=require",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BODBC+Driver%7D%3BPWD+%3D%7Ba%20b%7D",
    "mssql+pyodbc://host/db?driver=ODBC+Driver+18&TrustServerCertificate=yes",
    "postgresql://host/db?user=x&password=a%26%2B%25",
    "sqlite:///mlflow.db?",
    "postgresql://host/db?user=v&password=ab;c",
    "postgresql://host/db?user=x&passw%6Frd=x",
]
SLIPS = [
    ("sqllite:///x.db", 'Did you mean "sqlite"'),
    ("http://", "has no host"),
    ("http://:5000", "has no host"),
    ("http://someone:SECRET@:5000", "has no host"),
    ("http://host:99999", "the port is not a number up to 65535"),
    ("http://u:a[SECRET@[::1]:5000", "do not contain an IPv6 address"),
    ("http://[u:SECRETa]@h", "do not contain an IPv6 address"),
    ("http://host:0", "the port of the server is 0"),
    ("file://", "has no folder"),
    ("mlflow.db", "the path of a database file"),
    ("/data/mlflow.sqlite3", "path of a database file"),
    ("HTTP://someone:SECRET@host", "Write the scheme as http://"),
    ("sqlite://mlflow.db", "sqlite:///FILE"),
    ("sqlite+pysqlite:///mlflow.db", "sqlite:///FILE"),
    ("sqlite:///file:mlflow.db?mode=ro&uri=true", "sqlite:///FILE"),
    *((uri, "has no file") for uri in ("sqlite://", "sqlite:///", "sqlite://?cache=shared")),
]
MALFORMED = [
    "postgresql://someone:my SECRET@host/db",
    "postgresql://some one:SECRET@host/db",
    "postgresql://someone:\tSECRET@host/db",
    "postgresql://someone:1234/SECRET@host/db",
    'postgresql://someone:12"SECRET@host/db',
    "postgresql://someone:a@SECRET@host/db",
    "http://someone:my SECRET@host",
    "http://someone:SECRET/x@host",
    "http://someone:12345/SECRET@host",
    "postgresql://someone:12?SECRET@host/db",
    "postgresql:///someone:SECRET@host/db",
    "http:///someone:SECRET@host",
    "postgresql:///db?password=ab SECRET",
    'postgresql:///db?host=h&password="ab"SECRET',
    "mssql+pyodbc:///?odbc_connect=Driver={ODBC};Pwd=correct SECRET",
    "postgresql://host/db?password=a\u00a0SECRET",
]
NEITHER = [
    "postgresql//someone:SECRET@host/db",
    "postgresql:/someone:SECRET@host/db",
    "postgresql:someone:SECRET@host/db",
    "postgresql//someone:SECRET@host/db?proxy=http://x",
    "http//someone:SECRET@host",
    "http:/someone:SECRET@host",
    "http:someone:SECRET@host",
    "//someone:SECRET@host:5000",
    "someone:SECRET@host:5000",
    "someone:SECRET@http://host:5000",
    "127.0.0.1:5000",
    "postgresql//host/db",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("uri", URIS)
def test_uri_of_a_store_passes(uri: str) -> None:
    assert check_uri(uri) == uri


@pytest.mark.sample(4)
@pytest.mark.parametrize("uri", MALFORMED)
def test_password_that_is_not_encoded_is_refused(uri: str) -> None:
    """Without the encoding, the end of the password is ambiguous, and copies of the config would contain part of it."""
    with pytest.raises(ValueError, match="Percent-encode") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.sample(4)
@pytest.mark.parametrize("uri", NEITHER)
def test_mistyped_uri_is_not_used_as_a_folder(uri: str) -> None:
    """The bundle would contain the folder name, including the password."""
    with pytest.raises(ValueError, match="neither a URI nor a folder") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("uri", "message"), SLIPS)
def test_message_names_the_error(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.slow
def test_store_of_a_package_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be similar to a built-in store of MLflow."""
    (tmp_path / "stores-1.dist-info").mkdir()
    (tmp_path / "stores-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stores\nVersion: 1\n")
    (tmp_path / "stores-1.dist-info" / "entry_points.txt").write_text(
        "[mlflow.tracking_store]\nsqlites = stores:Store\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert check_uri("sqlites:///x") == "sqlites:///x"
    with pytest.raises(ValueError, match="no tracking store"):
        check_uri("sqlitez:///x")


def test_environment_names_the_store_unless_the_config_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in CI logged into a database that was thrown away with the job."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert TrackingConfig().store == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5057")
    assert TrackingConfig().store == "http://127.0.0.1:5057"
    assert TrackingConfig(uri="sqlite:///mine.db").store == "sqlite:///mine.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "SQLite:///x.db")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        _ = TrackingConfig().store
