"""Bundles are complete or absent, replace only other bundles, and have no undetected change."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optexport import export
from optexport._utils import atomic_dir
from optexport.bundle import contents, digests
from optexport.bundle.layout import check_replaceable
from optexport.errors import BundleError, ConfigError, OptexportError
from optexport.parity.cases.case import Case
from optexport.parity.reference import Reference
from optexport.parity.reference_file import read_reference, write_reference
from tests._helpers import exports


def leftovers(place: Path) -> list[str]:
    """Returns the names of temporary files next to a bundle."""
    return [path.name for path in place.iterdir() if path.name.startswith(".")]


def earlier_bundle(place: Path) -> Path:
    """Copies a real bundle to a folder, as the output of an earlier run."""
    shutil.copytree(exports.exported().output, place)
    return place


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Returns a copy of a real bundle."""
    return earlier_bundle(tmp_path / "bundle")


def test_draft_is_renamed_when_it_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with atomic_dir.drafting(output, check_replaceable) as draft:
        assert draft.parent == tmp_path
        assert draft.name.startswith(".bundle.partial-")
        (draft / "model.onnx").write_bytes(b"new")
        assert not output.exists()
    assert (output / "model.onnx").read_bytes() == b"new"
    assert leftovers(tmp_path) == []


def test_added_file_prevents_replacement_and_is_named(copied: Path) -> None:
    (copied / "notes.md").write_text("mine", encoding="utf-8")
    message_pattern = r"the folder has files that are not part of its bundle: notes\.md\nHint: Move these files"
    with pytest.raises(ConfigError, match=message_pattern):
        contents.check_output(copied)
    for name in ("a", "b", "c"):
        (copied / name).touch()
    with pytest.raises(ConfigError, match=r"not part of its bundle: a, b, c, \.\.\."):
        contents.check_output(copied)
    assert (copied / "notes.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failed_draft_is_removed(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_dir.drafting(tmp_path / "bundle", check_replaceable) as draft:
        (draft / "inner").mkdir()
        (draft / "inner" / "file").write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_earlier_bundle_is_unchanged_after_a_failed_run(tmp_path: Path) -> None:
    output = earlier_bundle(tmp_path / "bundle")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(RuntimeError), atomic_dir.drafting(output, check_replaceable) as draft:
        (draft / "model.onnx").write_bytes(b"half")
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert leftovers(tmp_path) == []


def test_earlier_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    output = earlier_bundle(tmp_path / "bundle")
    contents.check_output(output)
    with atomic_dir.drafting(output, check_replaceable) as draft:
        (draft / "manifest.json").write_bytes(b"new")
    assert [path.name for path in output.iterdir()] == ["manifest.json"]
    assert leftovers(tmp_path) == []


def test_empty_folder_is_accepted_as_output(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    contents.check_output(tmp_path / "bundle")
    with atomic_dir.drafting(tmp_path / "bundle", check_replaceable) as draft:
        (draft / "file").touch()
    assert (tmp_path / "bundle" / "file").exists()


OTHERS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("mine"),
    "a folder of files": lambda path: (path.mkdir(), (path / "letter.txt").write_text("mine")),
    "a web page": lambda path: (path.mkdir(), (path / "manifest.json").write_text('{"name": "my page"}')),
    "a folder with a broken manifest": lambda path: (path.mkdir(), (path / "manifest.json").write_text("{")),
    "a link to a file": lambda path: (path.with_name("aim").write_text("mine"), path.symlink_to("aim")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_output_with_other_content_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    output = tmp_path / "bundle"
    OTHERS[name](output)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="export.output") as caught:
        contents.check_output(output)
    assert caught.value.hint
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["a file", "a folder of files", "a web page"])
def test_output_with_new_content_is_not_replaced(tmp_path: Path, name: str) -> None:
    output = tmp_path / "bundle"
    contents.check_output(output)
    with pytest.raises(OptexportError), atomic_dir.drafting(output, check_replaceable):
        OTHERS[name](output)
    assert output.is_file() or any(output.iterdir())
    assert leftovers(tmp_path) == []


def test_unwritable_output_is_reported_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="the output cannot be written"):
        contents.check_output(tmp_path / "file" / "bundle")


def test_parent_folders_of_the_bundle_are_created(tmp_path: Path) -> None:
    model, inputs = torch.nn.Linear(2, 2).eval(), {"input": torch.ones(1, 2)}
    result = export(model, inputs, tmp_path / "a" / "b", formats=["pt2"], transformations=[], effort="quick")
    assert result.files["pt2"] == tmp_path / "a" / "b" / "model.pt2"


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_permissions_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        export(
            exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, transformations=[],
            formats=["torchscript", "pt2"],
        )  # fmt: skip
    finally:
        os.umask(before)
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o777 & ~mask
    for path in (tmp_path / "bundle").iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path.name


def test_complete_bundle_is_read(copied: Path) -> None:
    assert sorted(path.name for path in copied.iterdir()) == sorted(exports.FILES)
    manifest = digests.read_manifest(copied)
    assert manifest.model_dump(exclude={"digest"}) == exports.exported().manifest.model_dump(exclude={"digest"})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", exports.FILES)
def test_changed_byte_in_any_file_is_detected_and_named(copied: Path, name: str) -> None:
    path = copied / name
    content = path.read_bytes()
    positions = {0, len(content) - 1, *random.Random(0).sample(range(len(content)), 40)}
    for position in positions:
        for bit in (0x01, 0x80):
            changed = bytearray(content)
            changed[position] ^= bit
            path.write_bytes(changed)
            with pytest.raises(BundleError) as caught:
                digests.read_manifest(copied)
            assert caught.value.location == str(copied / name)
            assert caught.value.exit_code == 4
    path.write_bytes(content)
    digests.read_manifest(copied)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", exports.FILES)
def test_truncated_or_extended_file_is_detected(copied: Path, name: str) -> None:
    content = (copied / name).read_bytes()
    for changed in (content[:-1], b"", content + b"\n", content + content):
        (copied / name).write_bytes(changed)
        with pytest.raises(BundleError) as caught:
            digests.read_manifest(copied)
        assert caught.value.location == str(copied / name)


@pytest.mark.parametrize("name", [n for n in OTHERS if n != "a link to a file"])
def test_other_folder_is_not_read_as_a_bundle(tmp_path: Path, name: str) -> None:
    OTHERS[name](tmp_path / "bundle")
    with pytest.raises((ConfigError, BundleError)):
        digests.read_manifest(tmp_path / "bundle")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file more": (lambda b: (b / "more.txt").write_text("hello"), "more.txt"),
    "a hidden file more": (lambda b: (b / ".more").write_text("hello"), ".more"),
    "a file in a folder more": (lambda b: ((b / "inner").mkdir(), (b / "inner" / "f").touch()), "inner"),
    "an empty folder more": (lambda b: (b / "inner").mkdir(), "inner"),
    "a pipe more": (lambda b: os.mkfifo(b / "pipe"), "pipe"),
    "a model less": (lambda b: (b / "model.onnx").unlink(), "model.onnx"),
    "the measurements less": (lambda b: (b / "measurements.json").unlink(), "measurements.json"),
    "the report less": (lambda b: (b / "report.html").unlink(), "report.html"),
    "a word of the report": (lambda b: (b / "report.html").write_text("passed"), "report.html"),
    "a folder for a file": (lambda b: ((b / "model.onnx").unlink(), (b / "model.onnx").mkdir()), "model.onnx"),
    "a link in place of a file": (
        lambda b: ((b / "model.onnx").rename(b.parent / "aim"), (b / "model.onnx").symlink_to(b.parent / "aim")),
        "model.onnx",
    ),
    "a link in place of the manifest": (
        lambda b: (
            (b / "manifest.json").rename(b.parent / "aim"),
            (b / "manifest.json").symlink_to(b.parent / "aim"),
        ),
        "manifest.json",
    ),
    "a link to a folder": (lambda b: (b / "inner").symlink_to(b.parent), "inner"),
    "two files exchanged": (
        lambda b: (
            (b / "graph_before.txt").rename(b.parent / "aim"),
            (b / "graph_after.txt").rename(b / "graph_before.txt"),
            (b.parent / "aim").rename(b / "graph_after.txt"),
        ),
        "graph_",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_added_removed_or_replaced_entries_are_named(copied: Path, name: str) -> None:
    spoil, place = SPOILED[name]
    spoil(copied)
    with pytest.raises(BundleError) as caught:
        digests.read_manifest(copied)
    assert str(caught.value.location).startswith(str(copied / place))


@pytest.mark.parametrize(
    ("version", "hint"), [(3, "Upgrade optexport"), (1, "Export the"), (0, "Export the"), (None, "Export the")]
)
def test_bundle_of_another_version_is_refused(copied: Path, version: int | None, hint: str) -> None:
    exports.edit_json(copied / "manifest.json", lambda document: document.update(manifest_version=version))
    with pytest.raises(BundleError, match=rf"another version \(expected 2, found {version}\)\nHint: {hint}"):
        digests.read_manifest(copied)


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/hostname", "inner/../../outside.txt", ""])
def test_manifest_cannot_name_files_outside_the_bundle(copied: Path, path: str) -> None:
    (copied.parent / "outside.txt").write_text("outside")
    exports.edit_json(copied / "manifest.json", lambda document: document["files"][0].update(path=path))
    with pytest.raises(BundleError):
        digests.read_manifest(copied)


def test_artifact_missing_from_the_file_list_is_refused(copied: Path) -> None:
    exports.edit_json(copied / "manifest.json", lambda document: document["artifacts"][0].update(path="other.pt"))
    with pytest.raises(BundleError, match=r"other\.pt"):
        digests.read_manifest(copied)


def _reference(sizes: list[int], dtype: torch.dtype = torch.float32) -> Reference:
    cases = tuple(Case(f"size {size}", {"x": torch.full((size,), float(i))}) for i, size in enumerate(sizes))
    outputs = tuple({"a.b": case.batch["x"].to(dtype), "n": torch.tensor(i)} for i, case in enumerate(cases))
    return Reference(cases, outputs, tuple({"a.b": o["a.b"].double(), "n": o["n"]} for o in outputs))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int32])
def test_reference_tensors_survive_a_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = _reference([3, 1, 0], dtype)
    names = write_reference(tmp_path / "reference.safetensors", reference)
    read = read_reference(tmp_path / "reference.safetensors", names, ["a.b", "n"])
    by_name = {case.name: i for i, case in enumerate(reference.cases)}
    assert sorted(names) == sorted(by_name)
    for i, case in enumerate(read.cases):
        j = by_name[case.name]
        for got, want in (
            (case.batch, reference.cases[j].batch),
            (read.outputs[i], reference.outputs[j]),
            (read.exact[i], reference.exact[j]),
        ):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype for key in want)


def test_traced_case_is_always_stored_and_large_cases_are_not(tmp_path: Path) -> None:
    large = 3 << 20
    names = write_reference(tmp_path / "reference.safetensors", _reference([large, 5, large - 1, 7]))
    assert names == [f"size {large}", "size 5", "size 7"] or names == [f"size {large}"]
    few = write_reference(tmp_path / "reference.safetensors", _reference([4, large, 5, 7]))
    assert few == ["size 4", "size 5", "size 7"]


def test_tensors_that_share_memory_are_stored_separately(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    reference = Reference((Case("only", {"x": tensor, "y": tensor}),), ({"z": tensor.T},), ({"z": tensor.T.double()},))
    names = write_reference(tmp_path / "reference.safetensors", reference)
    read = read_reference(tmp_path / "reference.safetensors", names, ["z"])
    assert torch.equal(read.outputs[0]["z"], tensor.T)
    assert torch.equal(read.cases[0].batch["y"], tensor)


def test_reference_without_an_output_is_refused(tmp_path: Path) -> None:
    names = write_reference(tmp_path / "reference.safetensors", _reference([2]))
    with pytest.raises(BundleError, match="the file does not have exactly the outputs that the manifest lists"):
        read_reference(tmp_path / "reference.safetensors", names, ["a.b", "n", "more"])


def test_damaged_reference_is_a_bundle_error(tmp_path: Path) -> None:
    (tmp_path / "reference.safetensors").write_bytes(b"\x10" + b"\0" * 40)
    with pytest.raises(BundleError, match=r"reference\.safetensors: the file cannot be read"):
        read_reference(tmp_path / "reference.safetensors", ["only"], ["y"])


def test_varying_values_are_in_measurements_not_the_manifest(copied: Path) -> None:
    measurements = json.loads((copied / "measurements.json").read_bytes())
    assert {"date", "host", "seconds", "digest"} <= set(measurements)
    assert measurements["host"] not in (copied / "manifest.json").read_text()
