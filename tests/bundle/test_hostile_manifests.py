"""Manifests changed by someone who also made their digests fit: each is verified or refused, and none is a crash."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.bundle import digests, sealed_json
from optexport.bundle.places import MANIFEST, MEASUREMENTS
from optexport.bundle.verification import unchecked_gates, verify
from optexport.errors import BundleError, OptexportError
from tests import exports

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def every_place(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value inside a document is."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from every_place(each, (*place, key))


def put(document: Any, place: tuple[Any, ...], value: Any) -> None:
    *parents, last = place
    for key in parents:
        document = document[key]
    document[last] = value


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to change, again and again."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    return Path(shutil.copytree(exports.exported().output, folder))


@settings(max_examples=60)
@given(st.data())
def test_a_changed_manifest_is_verified_or_refused(small: Path, data: st.DataObject) -> None:
    kept = {name: (small / name).read_bytes() for name in (MANIFEST, MEASUREMENTS)}
    document = json.loads(kept[MANIFEST])
    # What tells of results is where the harm is; the rest is prose.
    guarded = [
        p for p in every_place(document) if p[0] in ("parity", "artifacts", "files", "inputs", "outputs", "dims")
    ]
    place = data.draw(st.sampled_from(guarded))
    value = data.draw(ANYTHING)
    try:
        exports.edit_json(small / MANIFEST, lambda manifest: put(manifest, place, value))
        verify(small)
        unchecked_gates(digests.read_manifest(small))
    except OptexportError:
        pass
    finally:
        for name, content in kept.items():
            (small / name).write_bytes(content)


def test_a_manifest_that_is_too_large_to_be_one_is_not_read(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(small, folder)
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(sealed_json.LARGEST + 1)  # a hole, which takes no room on the disk
    with pytest.raises(BundleError, match="larger than"):
        digests.read_manifest(folder)
