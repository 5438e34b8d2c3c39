"""URIs of stores: what can be one passes, and a slip is told without what is secret in it."""

from __future__ import annotations

import pytest

from optexport.config.tracking_uri import check_uri

URIS = [
    "sqlite:///mlflow.db",
    "sqlite:////home/a@b/c d.db",
    "mlruns",
    "file:///tmp/x y",
    "databricks",
    "databricks://profile",
    "http://127.0.0.1:5000",
    "http://someone:secret@host:5000/path/x@y",
    "http://[::1]:5000",
    "https://host/?token=x",
    "postgresql://someone:sec%20ret%2F%40@host/db",
    "postgresql+psycopg2://someone:secret@host:5432/db?sslmode=require",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx",
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


@pytest.mark.parametrize(("uri", "told"), [("sqllite:///x.db", 'Did you mean "sqlite"'), ("http://", "names no host")])
def test_a_slip_is_told(uri: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_uri(uri)
