"""Takes secrets out of texts that others may read: passwords in URIs, values of keys that are named as secret."""

from __future__ import annotations

import contextlib
import os
import re
from base64 import b64encode
from urllib.parse import quote, unquote, urlsplit

# A password may hold what a URI should not, spaces too: SQLAlchemy takes it as it is. What follows the port of a host
# is none. The lengths keep the time linear in that of the text; a longer one is made short before.
_NO_PORT = r"(?!\d{1,5}(?:[/?#\s\"',;)\]}]|$))"
_WITH_A_BLANK = r"(?:(?<![\"'>])[ \t](?:(?!://)[^\"\n]){0,256})?"
_CREDENTIALS = re.compile(
    r"(?<=://)(?:"
    rf"[^/\s\"'<>:@\[]*:{_NO_PORT}(?!\s)\S{{0,2048}}{_WITH_A_BLANK}"
    r"|[^/\s\"'<>]*)@"
)
# Begun at a blank alone, and ended with what a password ends with, so that each is gone through once.
_LONG = re.compile(rf"(?<!\S)\S{{2048,}}{_WITH_A_BLANK}@")
_LONG_CREDENTIALS = re.compile(rf"(?<=://)[^/\s\"'<>:@\[]*:{_NO_PORT}(?!\s).*@")
# How a key ends whose value is secret: of its end alone, since `tokenizer` and `token_type_ids` begin like one. The
# special tokens of tokenizers are none, nor are counts, nor is what a parser expected.
_CONFIDENTIAL = (
    r"(?:pass(?:word|wd|phrase)|secret|jwt"
    r"|(?<!\b(?:eos|bos|pad|unk|cls|sep|max|min|num|per)_)(?<!\b(?:mask|next|last)_)(?<!\bfirst_)"
    r"(?<!\bexpected )(?<!\bunexpected )token"
    r"|(?:api|access|account|client|encryption|master|private|secret|service|shared|signing|storage|subscription)"
    r"[-_.]?key(?:[-_.]?id)?)"
)
# What is in the braces of ODBC, in which a second one stands for one of the value. Where it does not add up, the braces
# may be those of the text around. Python before 3.11.5 does not match possessive groups, as "(...)*+", as it should.
_IN_BRACES = (
    r"\{[^}\n]{0,1024}(?:(?:\}\}[^}\n]{0,1024}){0,32}\}(?!\})|\}[^&;\s\"']*)",
    r"%7B(?:(?!%7D).){0,1024}(?:(?:%7D%7D(?:(?!%7D).){0,1024}){0,32}%7D(?!%7D)|%7D(?:(?!%3B)[^&;\s\"'])*)",
)
# A value ends where the next one begins, which is encoded where its own "=" is, in those braces, or in quotes, of which
# the second may have been cut off.
_SECRETS = re.compile(
    rf"((?:{_CONFIDENTIAL}|pwd|credentials?|(?<=[\w.\-?&;])sig(?:nature)?"
    r"|(?<=[?&;])(?:key|auth|authorization|pass))(?:=|((?:%20|\+)*%3D))|authorization:\s*(?:bearer|basic)\s+)"
    rf"(?(2)(?:(?:%20|\+)*{_IN_BRACES[1]}|(?:(?!%3B)[^&;\s\"'])+)"
    rf"|(?:{_IN_BRACES[0]}|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    r"|\\{1,3}[\"'][^\"'\n]*[\"']?|[\"']?[^&;\s\"']+))",
    re.IGNORECASE,
)
# What is echoed of a request, as headers, JSON, Python and TOML have it. What follows a colon without quotes is secret
# where it is a single word: of more, it is a sentence.
_ECHOED = re.compile(
    rf"((?:{_CONFIDENTIAL}|pwd|credentials?|sig(?:nature)?|authorization)(?:\\{{0,3}}[\"'])?[ \t]*(?:(=)(?!=)|:)[ \t]*)"
    r"(?:(\\{0,3}[\"'])(?:(?!\3)(?:\\.|[^\\\n]))*(?:\3)?"
    r"|(?:basic|bearer|digest|negotiate|token)[ \t]+[^\s\"'<,;\\]+"
    r"|(?(2)[^&;\s\"'<]+|(?<=[ \t])[^\s\"'<>,;(){}\[\]\\]+(?=[<>,;(){}\[\]\\]|[\"'](?!\w)|:[ \t]|[ \t]*$)))",
    re.IGNORECASE | re.MULTILINE,
)
# Of what follows a cookie's name and "=" all to the line's end, since more cookies follow.
_COOKIES = re.compile(
    r"(\b(?:set-)?cookie2?(?:\\{0,3}[\"'])?[ \t]*[:=][ \t]*)(\\{0,3}[\"'])?[^\s\"'<>=:;,]{1,256}=[^\r\n<]*",
    re.IGNORECASE,
)
_ECHOED_ALONE = re.compile(r"([\"'](?:basic|bearer)[ \t]+)[^\s\"'\\]+(?=\\{0,3}[\"'])", re.IGNORECASE)
_QUOTE = re.compile(r"\\{0,3}[\"']")
_OF_ENVIRONMENT = re.compile(rf".*{_CONFIDENTIAL}", re.IGNORECASE)
# As servers write a header back that they were sent; of a sentence with these words no part has digits.
_AUTHORIZED = re.compile(r"\b(basic|bearer)([ \t]+)(?=\S*[\d=])[\w+/=.~-]{8,}", re.IGNORECASE)
# What a secret may begin with: of a line that was cut, nothing from there on is shown.
_BEGUN = re.compile(
    rf"://|(?:{_CONFIDENTIAL}|pwd|credentials?|sig(?:nature)?|authorization|[?&;](?:key|auth|pass)|cookie2?)"
    r"[\\\"' \t]*(?:%20|\+)*(?:[=:]|%3D)|\b(?:basic|bearer)[ \t]",
    re.IGNORECASE,
)
# In characters: of an error no more is ever shown.
_LONGEST_ERROR = 1 << 16
# In characters, as far as a password may reach that is looked for behind "://".
_REACH = 2400
# In characters: a shorter value may stand anywhere, and mean something else.
_SHORTEST = 6
# Users and passwords of the URIs that were asked.
_PAIRS: set[tuple[str, str]] = set()


def redact(text: str) -> str:
    """Takes user names, passwords and tokens out of the URIs in a text."""
    text = _LONG.sub(lambda found: _LONG_CREDENTIALS.sub("***:***@", found[0]), text)
    return _SECRETS.sub(_hidden, _without_credentials(text))


def redact_error(text: str) -> str:
    """The same of what an error says, which may echo a request: headers too, and what is kept secret otherwise.

    It takes more for a secret than a copy of a config could bear, which is read again.
    """
    for value in _sent():
        text = text.replace(value, "***")
    text = redact(_cut(text))
    for echoed in (_COOKIES, _ECHOED, _ECHOED_ALONE):
        text = echoed.sub(_hidden, text)
    return _AUTHORIZED.sub(r"\1\2***", text)


def keep_secret(uri: str) -> None:
    """Has no error tell the user and password of a URI that is asked, in whatever form a server sends them back."""
    with contextlib.suppress(ValueError):  # which is no URI that could be asked
        split = urlsplit(uri)
        if split.password:
            _PAIRS.add((unquote(split.username or ""), unquote(split.password)))


def _cut(text: str) -> str:
    """As much of an error as is shown, and no part of a secret that does not end there; each ends with its line."""
    if len(text) <= _LONGEST_ERROR:
        return text
    whole = text.rfind("\n", 0, _LONGEST_ERROR) + 1
    begun = _BEGUN.search(text, whole, _LONGEST_ERROR)
    return text[: _LONGEST_ERROR if begun is None else begun.start()]


def _without_credentials(text: str) -> str:
    """A text whose URIs have none; those alone are looked at behind which an "@" may end some."""
    done, parts = 0, []
    for begun in re.finditer("://", text):
        if begun.end() < done or text.find("@", begun.end(), begun.end() + _REACH) < 0:
            continue
        if found := _CREDENTIALS.match(text, begun.end()):
            parts += [text[done : found.start()], "***@"]
            done = found.end()
    return "".join([*parts, text[done:]])


def _sent() -> list[str]:
    """What servers are sent that is secret, as URIs and headers have it too; the longest first: it may hold others."""
    known = [value for name, value in os.environ.items() if _OF_ENVIRONMENT.fullmatch(name)]
    pairs = {*_PAIRS, (os.environ.get("MLFLOW_TRACKING_USERNAME", ""), os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))}
    known += [password for _, password in pairs]
    known += [b64encode(f"{user}:{password}".encode()).decode() for user, password in pairs if password]
    known = [value for value in known if len(value) >= _SHORTEST]
    return sorted({*known, *(quote(value, safe="") for value in known)}, key=len, reverse=True)


def _hidden(found: re.Match[str]) -> str:
    """A key whose value is no more, in the quotes that it had: the text may be one that is read again."""
    key, value = found[1], found[0].removeprefix(found[1])
    begun = _QUOTE.match(value)
    mark = begun[0] if begun is not None and value.endswith(begun[0]) else ""
    return f"{key}{mark}***{mark}"
