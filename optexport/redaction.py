"""Hides secrets in text for others: credentials in URIs, and secrets of this process."""

from __future__ import annotations

import contextlib
import os
import re
from base64 import b64encode
from urllib.parse import quote, unquote, unquote_plus, urlsplit

HIDDEN = "***"
# A user name or password may contain an apostrophe.
_URI = re.compile(r"(?<=://)(?:[^/\s\"<>@]*@)?[^\s\"'<>]+")
# Endings of names with secret values, in lower case without separators. They do not match "tokenizer" and
# "max_tokens".
_SECRET_ENDINGS = (
    *("password", "passwd", "passphrase", "pwd", "secret", "token", "jwt", "credential", "credentials"),
    *("signature", "sig"),
    *(f"{kind}key{suffix}" for kind in ("api", "access", "account", "private", "secret") for suffix in ("", "id")),
    *(f"{kind}key" for kind in ("client", "encryption", "master", "service", "shared", "signing", "subscription")),
)
# Names of query parameters. ODBC stores a whole connection string in odbc_connect.
_SECRET_NAMES = ("key", "auth", "authorization", "pass", "odbcconnect")
# Assignments outside of URIs, as in connection strings, JSON and Python.
_ASSIGNMENT = re.compile(
    r"((?:password|passwd|passphrase|pwd|secret|(?:api|access|account|private|secret)[-_.]?key|sharedaccesssignature)"
    r"(?:\s*=(?!=)\s*|\\?[\"']\s*:\s*)|authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer)\s+)?)"
    r"(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\\?[\"']?[^\s&;,\"'<>(){}\[\]\\]+)",
    re.IGNORECASE,
)
# Environment variables of a shell that end like a password, and hold folders that a message must show.
_FOLDER_VARIABLES = {"PWD", "OLDPWD"}
# In characters. A shorter value could be an ordinary word of a message.
_SHORTEST_SECRET = 6
# In characters. Servers may answer with whole pages.
_LONGEST_ERROR = 1 << 16
# User names, passwords and tokens without a user name in the tracking URIs of this process.
_credentials: set[tuple[str, str]] = set()


def redact(text: str) -> str:
    """Hides user names, passwords and tokens in the URIs and connection strings of a text."""
    return _ASSIGNMENT.sub(_redact_assignment, _URI.sub(lambda match: _redact_uri(match[0]), text))


def redact_error(text: str) -> str:
    """Hides the same as `redact`, and the secrets of this process.

    A server may repeat the secrets in any encoding of URIs and headers.
    """
    for value in _known_secrets():
        text = text.replace(value, HIDDEN)
    return redact(text)[:_LONGEST_ERROR]


def keep_secret(uri: str) -> None:
    """Makes `redact_error` hide the credentials of a URI anywhere in a message."""
    with contextlib.suppress(ValueError):  # not a URI
        parts = urlsplit(uri)
        if parts.password:
            _credentials.add((unquote(parts.username or ""), unquote(parts.password)))
        for parameter in parts.query.split("&"):
            name, _, value = parameter.partition("=")
            if _is_secret_name(name):
                _credentials.add(("", unquote_plus(value)))


def _redact_uri(uri: str) -> str:
    """Hides credentials in a URI without its scheme."""
    location, question_mark, query = uri.partition("?")
    authority, slash, path = location.partition("/")
    host, colon, port = authority.partition(":")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    elif "@" in path and colon and host and not authority.startswith("[") and not port.isdecimal():
        # The "port" is the start of a password that contains a slash.
        authority, slash, path = path.rpartition("@")[2].partition("/")
        authority = f"{HIDDEN}@{authority}"
    parameters = (_redact_parameter(parameter) for parameter in query.split("&"))
    return f"{authority}{slash}{path}{question_mark}{'&'.join(parameters)}"


def _redact_parameter(parameter: str) -> str:
    name, equals, _ = parameter.partition("=")
    return f"{name}={HIDDEN}" if equals and _is_secret_name(name) else parameter


def _redact_assignment(match: re.Match[str]) -> str:
    quote_mark = match[2][0] if match[2][0] == match[2][-1] and match[2][0] in "\"'" else ""
    return f"{match[1]}{quote_mark}{HIDDEN}{quote_mark}"


def _is_secret_name(name: str) -> bool:
    plain = re.sub(r"[\W_]", "", unquote_plus(name)).lower()
    return plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDINGS)


def _known_secrets() -> list[str]:
    """Returns the secrets of this process with their encodings, longest first."""
    environment = os.environ
    secrets = {value for name, value in environment.items() if _is_secret_name(name) and name not in _FOLDER_VARIABLES}
    mlflow = (environment.get("MLFLOW_TRACKING_USERNAME", ""), environment.get("MLFLOW_TRACKING_PASSWORD", ""))
    for user, password in {*_credentials, mlflow}:
        secrets |= {password, b64encode(f"{user}:{password}".encode()).decode() if password else ""}
    secrets = {value for value in secrets if len(value) >= _SHORTEST_SECRET}
    return sorted({*secrets, *(quote(value, safe="") for value in secrets)}, key=len, reverse=True)
