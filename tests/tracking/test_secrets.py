"""Tests that no message, bundle or terminal output shows a secret of a tracking URI."""

from __future__ import annotations

import base64
import os
import socket
import time
import tomllib
from pathlib import Path
from urllib.parse import quote

import pytest

from optexport import redaction
from optexport.config.load import load_config
from optexport.config.toml_file import read_redacted
from optexport.errors import ConfigError, TrackingError, first_line
from optexport.pipeline import run
from optexport.redaction import redact, redact_error
from optexport.tracking import store
from tests._helpers import stores
from tests.tracking.bundles import QUIET

pytestmark = QUIET


SECRET = "hunter2"
URIS_WITH_SECRETS = [
    f"http://someone:{SECRET}@127.0.0.1:9",
    f"http://{SECRET}@127.0.0.1:9",
    f"http://someone:pa@{SECRET}@127.0.0.1:9",
    f"mysql+pymysql://root:{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:it's{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:a/{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:{'a/b@' * 1000}{SECRET}@127.0.0.1:9/db",
    f"postgresql://127.0.0.1:9/db?user=me&password={SECRET}",
    f"postgresql://127.0.0.1:9/db?user=me&passw%6Frd={SECRET}",
    f"postgresql://127.0.0.1:9/db?password%20={SECRET}",
    f"postgresql://127.0.0.1:9/db?password=a%26{SECRET}&user=me",
    f"postgresql://127.0.0.1:9/db?password=ab;{SECRET}&user=me",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3D{SECRET}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BP%57D%3D{SECRET}",
    f"mssql+pyodbc:///?odbc_connect=PWD+%3D+%7Ba%3B{SECRET}%7D",
    f"mssql+pyodbc://127.0.0.1/db?Pwd={{a}}}}{SECRET}}}",
    *(
        f"https://127.0.0.1:9/?a=b&{name}={SECRET}&c=d"
        for name in (
            *("token", "api_key", "api-key", "apikey", "key", "sig", "x_sig", "secret_key", "private.key", "jwt"),
            *("subscription-key", "X-Amz-Security-Token", "X-Amz-Signature", "X-Goog-Credential"),
        )
    ),
    f"AccountName=x;AccountKey={SECRET}==;EndpointSuffix=x",
    f"SharedAccessSignature={SECRET}",
    f"http://127.0.0.1:9 with Authorization: Bearer {SECRET}",
]
ECHOES = [
    f"{{'Authorization': 'Bearer {SECRET}', 'Accept': '*/*'}}",
    f'{{"headers": {{"Authorization": "Basic {SECRET}"}}}}',
    f"<body>Authorization: Bearer {SECRET}</body>",
    f'{{"password": "{SECRET}", "b": 1}}',
    f"{{'password': '{SECRET}'}}",
    f'{{"password": "a\\"{SECRET}"}}',
    f"password = {SECRET}",
    f"password='{SECRET}",
    f'password=\\"{SECRET}\\"',
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("uri", URIS_WITH_SECRETS)
def test_redact_hides_secrets_of_uris(uri: str) -> None:
    for text in (uri, f"cannot connect to {uri}: refused", f'uri = "{uri}"', f"({uri})\n{uri}"):
        assert SECRET not in redact(text)
        assert SECRET not in redact_error(text)
        assert redact(redact(text)) == redact(text)


def test_redact_leaves_the_rest_of_a_uri() -> None:
    assert (
        redact(f"to http://someone:{SECRET}@127.0.0.1:9/x?a=b&token={SECRET}")
        == "to http://***@127.0.0.1:9/x?a=b&token=***"
    )
    assert redact(f"postgresql://someone:a/{SECRET}@host/db") == "postgresql://***@host/db"


@pytest.mark.sample(4)
@pytest.mark.parametrize("echo", ECHOES)
def test_redact_error_hides_secrets_in_echoed_requests(echo: str) -> None:
    for text in (echo, f"400: {echo}: refused", f"({echo})\n{echo}"):
        assert SECRET not in redact_error(text)
        assert redact_error(redact_error(text)) == redact_error(text)
        assert SECRET not in str(TrackingError(text, location=text, hint=text))
        assert SECRET not in first_line(ConnectionError(text))


def test_redact_error_hides_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{name[::2]}/{SECRET} it is")
        for value in (os.environ[name], quote(os.environ[name], safe="")):
            assert redact_error(f"the server had {value} of us") == "the server had *** of us"
    monkeypatch.setenv("HF_TOKEN", "of us")
    assert redact_error("the server had none of us") == "the server had none of us"


def test_redact_error_shows_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell exports it as PWD, which ends like the name of a password."""
    monkeypatch.setenv("PWD", "/home/ann/project")
    monkeypatch.setenv("OLDPWD", "/home/ann/models")
    monkeypatch.setenv("DB_PWD", "open sesame")
    text = "python /home/ann/project/build/reproduce.py /home/ann/models/a.onnx {}"
    assert redact_error(text.format("open sesame")) == text.format("***")


@pytest.mark.parametrize("start", ["http://", "http://127.0.0.1:9/?token=", "postgresql://someone:a/"])
def test_secret_is_hidden_before_a_message_is_cut(start: str) -> None:
    error = ConnectionError(f"cannot reach {start}{SECRET * 200}@127.0.0.1:9")
    assert SECRET not in first_line(error)
    assert SECRET not in str(store.failure(error, "http://127.0.0.1:9", "Again."))


def test_message_about_a_config_hides_the_uri(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[model]\nsource = "x"\n[tracking]\nuri = ["http://someone:{SECRET}{"x" * 80}@127.0.0.1:9"]\n')
    with pytest.raises(ConfigError, match=r"tracking\.uri") as caught:
        load_config(config)
    assert SECRET not in str(caught.value)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///mlflow.db",
        "sqlite:////home/a@b/mlflow.db",
        "http://127.0.0.1:5000",
        "http://127.0.0.1:5000/name@alias",
        '{"uri":"http://127.0.0.1:5000","model":"name@alias"}',
        "mlflow:models:/name@alias",
        "user@example.org",
        "http://127.0.0.1:5000 does not know user@example.org",
        "http://localhost: no such host, ask user@example.org",
        "a=b",
        "tokenizer=bert, max_tokens=5, token_type_ids=3, pad_token_id=0, sort_key=x, design=1, bypass=x",
        "mine.toml: model.arguments.token: the key looks like a secret",
        "parity: onnx, next_token: 3 times the floor",
        "outputs: token int64 [?]",
        "if token == 5:",
        "Bearer token is missing",
        "'MLFLOW_TRACKING_PASSWORD'",
        "Expected token: 'EOF'",
        "JSON: Unexpected token: '<'",
        "max_token = 5",
        '{"pad_token": "[PAD]", "unk_token": null, "eos_token":"</s>", "mask_token" = "x"}',
        '"per_token" : 3.0',
    ],
)
def test_redact_leaves_texts_without_secrets(text: str) -> None:
    assert redact(text) == text
    assert redact_error(text) == text


def test_redact_leaves_special_tokens_of_configs() -> None:
    """Copies of a config are read again."""
    for text in ('signature = "serving_default"', 'arguments = {signature="x"}', 'pad_token = "[PAD]"'):
        assert redact(text) == text


def test_redact_error_hides_tracking_credentials_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_credentials", set())
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of the environment")
    redaction.keep_secret("https://joe:hunt%25er2x@example.org/?token=tok%25en2x")
    for user, password in (("joe", "hunt%er2x"), ("ann", "of the environment"), ("", "tok%en2x")):
        header = base64.b64encode(f"{user}:{password}".encode()).decode()
        for echo in (
            f"LDAP bind of {user} with {password} failed",
            f"Invalid token: '{password}'",
            f"Cookie: session={quote(password, safe='')}",
            f"header Authorization Basic {header}; cookie {header}",
            f"map[Accept:[*/*] Authorization:[Basic {header}]]",
        ):
            message = redact_error(echo)
            assert password not in message
            assert quote(password, safe="") not in message
            assert header not in message


def test_copy_of_a_config_differs_only_in_its_secrets(tmp_path: Path) -> None:
    """A special token is not a secret, and redacting writing this path would change the model."""
    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\narguments = { eos_token="</s>" } # was http://joe:hunter2@old\n[inputs.dynamic]\ntoken=[1, 16]\n'
        f'# uri = "http://joe:{SECRET}@there"\n[tracking]\nuri = "http://joe:{SECRET}@here#x"\n'
    )
    copy = read_redacted(config)
    original, copied = tomllib.loads(config.read_text()), tomllib.loads(copy)
    assert original.pop("tracking") != copied.pop("tracking")
    assert original == copied
    assert SECRET not in copy
    assert "hunter2" not in copy


@pytest.mark.parametrize(
    "text",
    ["x://a:b", "x://a:b@", "x://a:/@b?a=b&", 'password="', "password ", "authorization: bearer ", "://", "a'b'"],
)
def test_redaction_takes_linear_time(text: str) -> None:
    def seconds(length: int) -> float:
        start = time.process_time()
        redact_error(text * (length // len(text)))
        return time.process_time() - start

    assert seconds(1 << 20) < 32 * max(seconds(1 << 17), 0.02)


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_run_shows_no_secret_of_the_tracking_uri(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://someone:{SECRET}@127.0.0.1:{closed_port()}"
    result = run.run(stores.project(tmp_path, uri, formats='["pt2"]'))
    assert result.tracking_failure is not None
    assert SECRET not in str(result.tracking_failure)
    assert SECRET not in str(result.run_page)
    for path in result.output.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path.name
    written = capfd.readouterr()
    assert SECRET not in written.out + written.err


def test_first_line_includes_an_announced_list() -> None:
    """The message about a missing tokenizer package ended in the middle of a sentence."""
    line = first_line(ValueError("Couldn't instantiate it from one of: \n(1) a file,\n(2) a class.\n3\n4\n5\n6"))
    assert line == "Couldn't instantiate it from one of: (1) a file, (2) a class. 3 4"
