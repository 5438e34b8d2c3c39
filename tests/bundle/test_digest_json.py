"""JSON documents that contain their digest: round trips, and detection of any changed byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optexport.bundle import digest_json
from optexport.errors import BundleError

# UTF-8 cannot encode surrogates.
TEXT = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(TEXT.filter(lambda key: key != "digest"), VALUES, max_size=4)
# Each example overwrites the file of the previous one.
overwriting = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@given(DOCUMENTS)
@overwriting
def test_document_survives_a_round_trip(tmp_path: Path, document: dict[str, Any]) -> None:
    path = tmp_path / "document.json"
    digest_json.write(path, document)
    read = digest_json.read(path)
    assert len(read.pop("digest")) == 64
    assert read == document


@given(DOCUMENTS)
@overwriting
def test_key_order_does_not_change_the_file(tmp_path: Path, document: dict[str, Any]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    digest_json.write(first, document)
    digest_json.write(second, dict(reversed(document.items())))
    assert first.read_bytes() == second.read_bytes()


@given(DOCUMENTS, st.data())
@overwriting
def test_any_changed_byte_is_detected(tmp_path: Path, document: dict[str, Any], data: Any) -> None:
    path = tmp_path / "document.json"
    digest_json.write(path, document)
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[index]))
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"document\.json"):
        digest_json.read(path)


@given(DOCUMENTS, st.data())
@overwriting
def test_added_or_removed_byte_is_detected(tmp_path: Path, document: dict[str, Any], data: Any) -> None:
    path = tmp_path / "document.json"
    digest_json.write(path, document)
    content = path.read_bytes()
    index = data.draw(st.integers(0, len(content) - 1))
    extra = bytes([data.draw(st.sampled_from([0x20, 0x0A, 0x30, 0x00, 0xEF]))])
    for changed in (content[:index] + content[index + 1 :], content[:index] + extra + content[index:], content + extra):
        path.write_bytes(changed)
        with pytest.raises(BundleError):
            digest_json.read(path)


@pytest.mark.parametrize("indent", [None, 4])
def test_changed_whitespace_is_detected(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "document.json"
    digest_json.write(path, {"a": [1, 2], "b": "ä"})
    same = json.loads(path.read_bytes())
    path.write_text(json.dumps(same, indent=indent, sort_keys=True, ensure_ascii=False) + "\n")
    with pytest.raises(BundleError, match="the content does not match its own digest"):
        digest_json.read(path)


def test_digest_of_another_document_is_detected(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    digest_json.write(first, {"a": 1})
    digest_json.write(second, {"a": 2})
    forged = {"a": 2, "digest": json.loads(first.read_bytes())["digest"]}
    second.write_text(json.dumps(forged, indent=2, sort_keys=True) + "\n")
    with pytest.raises(BundleError, match="the content does not match its own digest"):
        digest_json.read(second)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"{}",
        b"\xff\xfe\x00",
        b'{"a": 1, "a": 1}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"a":' * 200_000,
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
def test_invalid_content_is_a_bundle_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=rf"^{re.escape(str(path))}: ") as caught:
        digest_json.read(path)
    assert caught.value.exit_code == 4
    assert caught.value.hint


def test_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"document\.json: the file is missing"):
        digest_json.read(tmp_path / "document.json")


def test_folder_at_the_path_is_a_bundle_error(tmp_path: Path) -> None:
    (tmp_path / "document.json").mkdir()
    with pytest.raises(BundleError, match="the path is not a regular file"):
        digest_json.read(tmp_path / "document.json")
