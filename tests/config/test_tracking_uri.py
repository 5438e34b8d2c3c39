"""URIs of stores: what can be one passes, and a slip is told without what is secret in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.config.tracking_uri import check_uri

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
]
SLIPS = [
    ("sqllite:///x.db", 'Did you mean "sqlite"'),
    ("http://", "names no host"),
    ("http://:5000", "names no host"),
    ("http://someone:SECRET@:5000", "names no host"),
    ("http://host:99999", "beyond 65535"),
    ("http://u:a[SECRET@[::1]:5000", "is no address"),
    ("http://[u:SECRETa]@h", "is no address"),
    ("http://host:0", "names no port"),
    ("file://", "names no folder"),
    ("HTTP://someone:SECRET@host", "small letters: http://"),
    ("sqlite://mlflow.db", "sqlite:///FILE"),
    ("sqlite+pysqlite:///mlflow.db", "sqlite:///FILE"),
    ("sqlite:///file:mlflow.db?mode=ro&uri=true", "sqlite:///FILE"),
    *((uri, "names no file") for uri in ("sqlite://", "sqlite:///", "sqlite://?cache=shared")),
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
]
NEITHER = [
    "postgresql//someone:SECRET@host/db",
    "postgresql:/someone:SECRET@host/db",
    "postgresql:///someone:SECRET@host/db",
    "postgresql:someone:SECRET@host/db",
    "postgresql//someone:SECRET@host/db?proxy=http://x",
    "http//someone:SECRET@host",
    "http:/someone:SECRET@host",
    "http:///someone:SECRET@host",
    "http:someone:SECRET@host",
    "//someone:SECRET@host:5000",
    "someone:SECRET@host:5000",
    "someone:SECRET@http://host:5000",
    "127.0.0.1:5000",
    "postgresql//host/db",
]
HIDDEN_KEYS = [
    "postgresql://host/db?user=x&passw%6Frd=SECRET",
    "postgresql://host/db?user=x&passw%6frd=SECRET",
    "postgresql://host/db?user=x#&passw%6Frd=SECRET",
    "postgresql://host/db?password%20=SECRET",
    "postgresql://host/db?password+=SECRET",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BP%57D%3DSECRET",
    "http://host/?tok%65n=SECRET",
]


@pytest.mark.parametrize("uri", URIS)
def test_what_mlflow_takes_passes(uri: str) -> None:
    assert check_uri(uri) == uri


@pytest.mark.parametrize("uri", MALFORMED)
def test_a_password_that_is_not_encoded_is_refused_and_not_told(uri: str) -> None:
    """Nobody could tell where it ends, so that a part of it would stay in copies of the config."""
    with pytest.raises(ValueError, match="percent-encoded") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("uri", NEITHER)
def test_a_uri_with_a_slip_in_it_is_no_folder_and_is_not_told(uri: str) -> None:
    """It was taken for the name of a folder, and written into the bundle, password and all."""
    with pytest.raises(ValueError, match="neither a folder nor a URI") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://host/db?user=v&password=ab;SECRET",
        "postgresql:///db?password=ab SECRET",
        "http://host/?token=ab;SECRET",
        'postgresql:///db?host=h&password="ab"SECRET',
        "mssql+pyodbc:///?odbc_connect=Driver={ODBC};Pwd=correct SECRET",
        "postgresql://host/db?password=a\u00a0SECRET",
    ],
)
def test_a_value_of_a_query_that_seems_to_end_in_its_middle_is_refused_and_not_told(uri: str) -> None:
    """SQLAlchemy took it whole, and the rest of the password was written into the bundle."""
    with pytest.raises(ValueError, match="holds a character that a URI cannot have there") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("uri", HIDDEN_KEYS)
def test_a_key_that_is_encoded_is_refused_and_not_told(uri: str) -> None:
    """SQLAlchemy decodes it, and nobody else would know that a password follows."""
    with pytest.raises(ValueError, match="its query hides what a key is called") as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(("uri", "told"), SLIPS)
def test_a_slip_is_told(uri: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        check_uri(uri)
    assert "SECRET" not in str(caught.value)


def test_a_kind_that_a_package_brings_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may be near one of MLflow's own."""
    (tmp_path / "stores-1.dist-info").mkdir()
    (tmp_path / "stores-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stores\nVersion: 1\n")
    (tmp_path / "stores-1.dist-info" / "entry_points.txt").write_text(
        "[mlflow.tracking_store]\nsqlites = stores:Store\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert check_uri("sqlites:///x") == "sqlites:///x"
    with pytest.raises(ValueError, match="no store of the kind"):
        check_uri("sqlitez:///x")
