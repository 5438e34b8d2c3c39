"""No secret of a tracking URI gets out: not in a text, not in a bundle, not on the screen."""

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
from optexport.config.text import without_secrets
from optexport.errors import ConfigError, TrackingError, first_line
from optexport.pipeline import run
from optexport.redaction import redact, redact_error
from optexport.tracking import store
from tests._helpers import stores
from tests.tracking.bundles import QUIET

pytestmark = QUIET


SECRET = "hunter2"
SECRET_URIS = [
    f"http://someone:{SECRET}@127.0.0.1:9",
    f"http://{SECRET}@127.0.0.1:9",
    f"http://someone:pa@{SECRET}@127.0.0.1:9",
    f"https://127.0.0.1:9/?token={SECRET}",
    f"https://127.0.0.1:9/?a=b&api_key={SECRET}&c=d",
    f"https://127.0.0.1:9/?api-key={SECRET}",
    f"https://127.0.0.1:9/?apikey={SECRET}",
    f"mysql+pymysql://root:{SECRET}@127.0.0.1:9/db",
    f"postgresql://127.0.0.1:9/db?user=me&password={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3D{SECRET}",
    f"mssql+pyodbc://127.0.0.1/db?Pwd={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D%7Ba%3B{SECRET}%7D",
    f"mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D%7Ba%7D%7D{SECRET}%7D%3B",
    f"mssql+pyodbc:///?odbc_connect=PWD%3D%7Ba%7D%7D{SECRET}",
    f"mssql+pyodbc:///?odbc_connect=PWD+%3D+%7Ba%3B{SECRET}%7D",
    f"mssql+pyodbc:///?Pwd={{a}}}}{SECRET}",
    f"{{mssql+pyodbc:///?Pwd={{a {SECRET}}}}}",
    f"postgresql://127.0.0.1:9/db?password=a%26{SECRET}&user=me",
    f"mssql+pyodbc:///?odbc_connect=Driver%3Dx%3BServer%3D127.0.0.1%3BPWD%3Da%26{SECRET}",
    f"postgresql://someone:a/{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:it's{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:my {SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:{SECRET} is mine@127.0.0.1:9/db",
    f"postgresql://someone:a@b {SECRET}@127.0.0.1:9/db",
    f"http://127.0.0.1:9/?sig={SECRET}",
    f"http://127.0.0.1:9/?a=b&key={SECRET}",
    f'http://127.0.0.1:9/?password="{SECRET} {SECRET}"',
    f"mssql+pyodbc:///?Pwd={{a}}}}{SECRET}}}",
    f"http://127.0.0.1:9 with Authorization: Bearer {SECRET}",
    f"postgresql://someone:{'a/b@' * 1000}{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:{'a/b@' * 1000} {SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:{'a/b' * 1000} {SECRET}@127.0.0.1:9/db",
    f'http://127.0.0.1:9/?token="{"a" * 4000}{SECRET}"',
    f'http://127.0.0.1:9/?token="{SECRET}',
    f"https://s3.example.org/a?X-Amz-Security-Token={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://storage.googleapis.com/a?X-Goog-Credential={SECRET}&X-Goog-Signature={SECRET}",
    f"https://x.blob.core.windows.net/a?sv=1&sig={SECRET}",
    f"AccountName=x;AccountKey={SECRET}==;EndpointSuffix=x",
    f"SharedAccessSignature={SECRET}",
    *(f"https://h/?{key}={SECRET}" for key in ("secret_key", "private.key", "jwt", "subscription-key", "x_sig")),
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD+%3D+{SECRET}",
]
ECHOES = [
    f"{{'Authorization': 'Bearer {SECRET}', 'Accept': '*/*'}}",
    f'{{"headers": {{"Authorization": "Basic {SECRET}"}}}}',
    f"Authorization=Bearer {SECRET}",
    f"<body>Authorization: Bearer {SECRET}</body>",
    f"the server had 'Basic {SECRET}' of us",
    f'{{"password": "{SECRET}", "b": 1}}',
    f"{{'password': '{SECRET}'}}",
    f'{{"password": "a\\"{SECRET}"}}',
    f'password="a\\"{SECRET}"',
    f"password = {SECRET}",
    f"password='{SECRET}",
    f'password=\\"{SECRET}\\"',
    f'"{{\\"token\\": \\"{SECRET}\\"}}"',
    f"x-api-key: {SECRET}",
    f"signature={SECRET}",
    f"Cookie: a=b; session={SECRET}",
    f'Set-Cookie: session="{SECRET}"; Path=/',
    f"{{'Cookie': 'a=b; session={SECRET}', 'Accept': '*/*'}}",
    f'{{\\"Set-Cookie\\": \\"session={SECRET}\\"}}',
    f"'Cookie: session={SECRET}'",
    f"Invalid token: '{SECRET}'",
    f"my_token = {SECRET}",
]


@pytest.mark.parametrize("uri", SECRET_URIS)
def test_no_secret_of_a_uri_stays_in_a_text(uri: str) -> None:
    for text in (uri, f"cannot connect to {uri}: refused", f'uri = "{uri}"', f"({uri})\n{uri}"):
        assert SECRET not in redact(text)
        assert SECRET not in redact_error(text)
    assert "127.0.0.1" in redact(f"http://someone:{SECRET}@127.0.0.1:9")


@pytest.mark.parametrize("echo", ECHOES)
def test_no_secret_of_a_request_that_is_echoed_stays_in_an_error(echo: str) -> None:
    for text in (echo, f"400: {echo}: refused", f"({echo})\n{echo}"):
        assert SECRET not in redact_error(text)
        assert redact_error(redact_error(text)) == redact_error(text)
        assert SECRET not in str(TrackingError(text, location=text, hint=text))
        assert SECRET not in first_line(ConnectionError(text))


def test_what_the_environment_keeps_secret_stays_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{name[::2]}/{SECRET} it is")
        for said in (os.environ[name], quote(os.environ[name], safe="")):
            assert redact_error(f"the server had {said} of us") == "the server had *** of us"
    monkeypatch.setenv("HF_TOKEN", "of us")
    assert redact_error("the server had none of us") == "the server had none of us"


@pytest.mark.parametrize("begin", ["http://", "http://127.0.0.1:9/?token=", "postgresql://someone:a/"])
def test_a_secret_that_is_longer_than_a_message_is_hidden_before_the_message_is_cut(begin: str) -> None:
    told = ConnectionError(f"cannot reach {begin}{SECRET * 200}@127.0.0.1:9")
    assert SECRET not in first_line(told)
    assert SECRET not in str(store.failure(told, "http://127.0.0.1:9", "Again."))


@pytest.mark.parametrize("secret", [*SECRET_URIS, *ECHOES])
@pytest.mark.parametrize("before", ["a b\n", "ab "])
def test_of_a_secret_that_lies_across_the_end_of_what_is_shown_no_part_is(
    before: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_LONGEST_ERROR", 1 << 13)
    text = (before * (1 << 13))[: redaction._LONGEST_ERROR - secret.rindex(SECRET) - len(SECRET) + 1]
    told = redact_error(f"{text}{secret}")
    assert SECRET[:-1] not in told
    assert len(told) > len(text) - 20


def test_a_value_of_the_environment_across_the_end_of_what_is_shown_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"{SECRET}\n{SECRET}")
    text = "a" * (redaction._LONGEST_ERROR - 10)
    assert SECRET[:3] not in redact_error(f"{text}{SECRET}\n{SECRET}")


def test_a_mistake_in_a_config_tells_no_part_of_a_uri(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[model]\nsource = "x"\n[tracking]\nuri = ["http://someone:{SECRET}{"x" * 80}@127.0.0.1:9"]\n')
    with pytest.raises(ConfigError, match=r"tracking\.uri") as caught:
        load_config(config)
    assert SECRET not in str(caught.value)


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
        "mine.toml: model.arguments.token: a config holds no secrets",
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
        "Cookie: none was sent, set a=b",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text
    assert redact_error(text) == text


def test_what_a_config_may_hold_stays_in_its_copies() -> None:
    """They are read again, where an error is only read."""
    for text in ('signature = "serving_default"', 'arguments = {signature="x"}', 'pad_token = "[PAD]"'):
        assert redact(text) == text


def test_what_a_server_is_sent_of_its_uri_is_told_in_no_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_PAIRS", set())
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of the environment")
    redaction.keep_secret("https://joe:hunt%25er2x@example.org")
    for user, password in (("joe", "hunt%er2x"), ("ann", "of the environment")):
        sent = base64.b64encode(f"{user}:{password}".encode()).decode()
        for echo in (
            f"LDAP bind of {user} with {password} failed",
            f"header Authorization Basic {sent}; cookie {sent}",
            f"map[Accept:[*/*] Authorization:[Basic {sent}]]",
            f"<td>Authorization</td><td>Basic {sent}</td>",
        ):
            told = redact_error(echo)
            assert password not in told
            assert sent not in told
    assert "QWxhZGRpbjpvcGVuIHNlc2FtZQ" not in redact_error("bad credentials Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")


def test_a_copy_of_a_config_says_the_same_but_for_its_secrets(tmp_path: Path) -> None:
    """The copy made another model where a special token was taken for a secret."""
    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\narguments = { eos_token="</s>" } # was http://joe:hunter2@old\n[inputs.dynamic]\ntoken=[1, 16]\n'
        f'# uri = "http://joe:{SECRET}@there"\n[tracking]\nuri = "http://joe:{SECRET}@here#x"\n'
    )
    copy = without_secrets(config)
    said, kept = tomllib.loads(config.read_text()), tomllib.loads(copy)
    assert said.pop("tracking") != kept.pop("tracking")
    assert said == kept
    assert SECRET not in copy
    assert "hunter2" not in copy


@pytest.mark.parametrize(
    "text",
    [
        *("token={ ", "token%3D%7B&", "://x", "a://b:c'", 'password="', "authorization: bearer ", "token='", "token\\"),
        *("x://a:", "x://a:" + "b" * 50 + "  @"),
        *('"password": "', "token: bearer", "token: ", "token ", "token+", 'token=\\"', "'basic ", "sig: a\\", "a_"),
    ],
)
def test_a_text_that_is_made_to_take_long_takes_no_longer_than_others(text: str) -> None:
    """Of a megabyte it would have taken most of an hour: the time grew with the square of the length."""

    def seconds(length: int) -> float:
        start = time.process_time()
        redact_error(text * (length // len(text)))
        return time.process_time() - start

    redact_error(text)
    longest = redaction._LONGEST_ERROR
    assert seconds(longest) < 16 * max(seconds(longest // 8), 0.02)
    assert seconds(8 * longest) < 16 * max(seconds(longest), 0.02)


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def test_no_secret_of_the_tracking_uri_gets_out_of_a_run(
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


def test_an_error_that_announces_what_follows_is_told_with_that() -> None:
    """Of a tokenizer that needs a package it ended in the middle of the sentence."""
    told = first_line(ValueError("Couldn't instantiate it from one of: \n(1) a file,\n(2) a class.\n3\n4\n5\n6"))
    assert told == "Couldn't instantiate it from one of: (1) a file, (2) a class. 3 4"
