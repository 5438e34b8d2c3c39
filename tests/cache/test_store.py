"""The cache store: an entry is complete and unchanged, or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from optexport.cache import results, store

FILE = "results.safetensors"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def keep(*parts: object, value: float = 1.0) -> str:
    entry = store.entry_key("test", *parts)
    results.write(entry, [{"y": torch.full((256,), value)}, {}], {"note": [1, 2]})
    return entry


def test_entry_is_found_by_its_name_only() -> None:
    entry = keep("a")
    cached = results.read(entry)
    assert cached is not None
    (first, second), notes = cached
    assert torch.equal(first["y"], torch.ones(256))
    assert (second, notes) == ({}, {"note": [1, 2]})
    assert results.read(store.entry_key("test", "b")) is None


def test_renamed_entry_is_ignored(place: Path) -> None:
    """Entries can be mixed up in a cache that was merged by hand. The results of another graph would be used."""
    entry, other_entry = keep("a"), keep("b", value=2.0)
    (place / entry).rename(place / "aside")
    (place / other_entry).rename(place / entry)
    assert results.read(entry) is None


def test_pipe_link_or_file_in_place_of_an_entry_is_replaced(place: Path, tmp_path: Path) -> None:
    """With Python 3.11, shutil.rmtree of a pipe waits forever."""
    (tmp_path / "elsewhere").mkdir()
    for make in (os.mkfifo, Path.touch, lambda path: path.symlink_to(tmp_path / "elsewhere")):
        shutil.rmtree(place / keep("a"))
        make(place / store.entry_key("test", "a"))
        entry = keep("a")
        assert results.read(entry) is not None
        assert not (place / entry).is_symlink()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["entry.json", FILE, "more"])
def test_pipe_in_an_entry_is_not_read(place: Path, name: str) -> None:
    entry = keep("a")
    (place / entry / name).unlink(missing_ok=True)
    os.mkfifo(place / entry / name)
    assert results.read(entry) is None


def test_entry_names_depend_on_kind_and_key() -> None:
    assert store.entry_key("a", [1]) == store.entry_key("a", [1])
    assert (
        len(
            {
                store.entry_key("a", [1]),
                store.entry_key("a", [2]),
                store.entry_key("a", ["1"]),
                store.entry_key("b", [1]),
            }
        )
        == 4
    )


def test_entry_names_depend_on_the_number_of_threads() -> None:
    threads, before = torch.get_num_threads(), store.entry_key("a")
    try:
        torch.set_num_threads(threads + 1)
        assert store.entry_key("a") != before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "ORT_TENSORRT_FP16_ENABLE"])
def test_entry_names_depend_on_variables_of_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.entry_key("a")
    monkeypatch.setenv(name, "BF16")
    assert store.entry_key("a") != before


@pytest.mark.sample(4)
@pytest.mark.parametrize("damage", [b"", b"not a tensor", b"[" * 100_000 + b"]" * 100_000, None])
@pytest.mark.parametrize("file", [FILE, "entry.json"])
def test_damaged_entry_is_ignored_and_replaced(place: Path, file: str, damage: bytes | None) -> None:
    entry = keep("a")
    path = place / entry / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert results.read(entry) is None
    keep("a")
    assert results.read(entry) is not None


def test_changed_byte_in_an_entry_is_detected(place: Path) -> None:
    """The file can still be read, and its results would be used."""
    entry = keep("a")
    path = place / entry / FILE
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert results.read(entry) is None


def test_digests_of_an_entry_cover_files_notes_and_key(place: Path) -> None:
    entry = keep("a")
    record = json.loads((place / entry / "entry.json").read_bytes())
    files = {FILE: hashlib.sha256((place / entry / FILE).read_bytes()).hexdigest()}
    signed = json.dumps([entry, files, [2, {"note": [1, 2]}]], sort_keys=True)
    assert record == {
        "files": files,
        "notes": [2, {"note": [1, 2]}],
        "sha256": hashlib.sha256(signed.encode()).hexdigest(),
    }


@pytest.mark.parametrize("digest", ["0" * 64, hashlib.sha256(b"").hexdigest()])
def test_wrong_digest_of_a_file_is_not_accepted(place: Path, digest: str) -> None:
    """The digest of the entry itself is right, as if the entry had been written with a wrong digest of its file."""
    entry = keep("a")
    path = place / entry / "entry.json"
    record = json.loads(path.read_bytes())
    files = {FILE: digest}
    forged = {**record, "files": files, "sha256": store._digest(entry, files, record["notes"])}
    path.write_text(json.dumps(forged), encoding="utf-8")
    assert results.read(entry) is None


@pytest.mark.parametrize("change", [{"notes": [2, None]}, {"files": {}}, {"sha256": ""}])
def test_edited_entry_is_ignored(place: Path, change: dict[str, object]) -> None:
    entry = keep("a")
    path = place / entry / "entry.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}), encoding="utf-8")
    assert results.read(entry) is None


@pytest.mark.parametrize("file", [FILE, None, "more"])
def test_entry_with_missing_or_additional_files_is_ignored(place: Path, file: str | None) -> None:
    entry = keep("a")
    if file == FILE:
        (place / entry / file).unlink()
    else:
        (place / entry / "more").write_text("", encoding="utf-8")
    assert results.read(entry) is None


def test_nothing_is_stored_without_a_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    assert results.read(keep("a")) is None
    assert not place.exists()


def test_disabled_store_is_neither_read_nor_written(place: Path) -> None:
    entry = keep("a")
    with store.disabled():
        assert not store.enabled()
        assert results.read(entry) is None
        keep("b")
    assert results.read(entry) is not None
    assert len(list(place.iterdir())) == 1


def test_unwritable_store_is_ignored_without_a_message(place: Path) -> None:
    place.write_text("a file where the folder should be", encoding="utf-8")
    assert results.read(keep("a")) is None


def test_least_recently_used_entries_are_evicted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [keep(index) for index in range(3)]
    for index, entry in enumerate(entries):
        os.utime(place / entry / "entry.json", (index, index))
    (place / "of somebody else").mkdir()
    (place / "of somebody else" / "entry.json").write_text("{}", encoding="utf-8")
    size = sum(path.stat().st_size for path in (place / entries[0]).iterdir())
    monkeypatch.setattr(store, "_ALL_BYTES", 2 * size + 1)
    assert results.read(entries[0]) is not None  # marks it as used
    last = keep(3)
    assert {path.name for path in place.iterdir()} == {entries[0], last, "of somebody else"}


def test_oversized_entry_is_not_stored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_ENTRY_BYTES", 1000)
    assert results.read(keep("a")) is None
    assert not place.exists()


def test_partly_removed_entry_is_deleted_at_once(place: Path) -> None:
    """Such an entry was neither counted nor removed."""
    half = place / keep("a")
    (half / "entry.json").unlink()
    keep("b")
    assert not half.exists()


def test_drafts_of_killed_runs_are_deleted_after_a_day(place: Path) -> None:
    for name, age in (("draft-old", 90_000), ("draft-new", 0)):
        (place / name).mkdir(parents=True)
        then = (place / name).stat().st_mtime - age
        os.utime(place / name, (then, then))
    keep("a")
    assert not (place / "draft-old").exists()
    assert (place / "draft-new").exists()
