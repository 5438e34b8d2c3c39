"""Generative models are signed and verified as a folder, with all their parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optexport.bundle.signing.folder_signature import check, sign
from optexport.errors import BundleError
from optexport.generation.export import check_output
from tests._helpers import exports, signed
from tests._helpers.cli import message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return signed.generation(tmp_path / "folder")


def test_one_signature_covers_all_parts(folder: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    assert signed.call("sign", folder, private).exit_code == 0
    assert {path.name for path in folder.iterdir()} == {
        *("encoder", "decoder", "generation.json"),
        *("bundle.sig", "provenance.json", "sbom.cdx.json"),
    }
    check_output(folder)
    document = json.loads(signed.call("verify", folder, public, "--json").stdout)
    assert document["passed"]
    assert document["signature_checked"]
    assert sorted(document["parts"]) == ["decoder", "encoder"]
    assert {row["target"] for row in document["parts"]["decoder"]["targets"]} >= {"onnx", "pt2"}
    statement = json.loads((folder / "provenance.json").read_bytes())
    names = [subject["name"] for subject in statement["subject"]]
    assert {"generation.json", "decoder/model.onnx", "encoder/model.onnx", "sbom.cdx.json"} <= set(names)
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [d["annotations"]["part"] for d in dependencies if d["name"] == "model"] == ["decoder", "encoder"]


def test_change_to_any_part_is_detected(folder: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    sign(folder, private)
    for name in ("generation.json", "encoder/model.onnx", "decoder/report.html"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + b"x")
        with pytest.raises(BundleError, match=f"\n  {name} was changed"):
            check(folder, public)
        (folder / name).write_bytes(content)
    check(folder, public)
    sign(folder / "decoder", private)  # a part can be signed too, but before the whole folder
    with pytest.raises(BundleError, match="decoder/bundle.sig was added"):
        check(folder, public)
    sign(folder, private)
    check(folder, public)
    check(folder / "decoder", public)
    shutil.rmtree(folder / "encoder")
    with pytest.raises(BundleError, match="encoder/graph_after.txt was removed"):
        check(folder, public)


def test_parts_are_verified_without_a_key(folder: Path, tmp_path: Path) -> None:
    done = signed.call("verify", folder)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        str(folder / "decoder"),
        str(folder / "encoder"),
    ]
    done = signed.call("verify", folder, None, "--junit", str(tmp_path / "document.xml"))
    assert "--junit: a JUnit file can describe only one bundle (found 2 parts)" in message(done, 2)
    with (folder / "encoder" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert "encoder/model.onnx: the file was changed" in message(signed.call("verify", folder), 4)
    shutil.rmtree(folder / "encoder")
    assert "encoder: the folder does not exist" in message(signed.call("verify", folder), 4)


def test_folder_named_manifest_json_is_refused(folder: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    sign(folder, private)
    (folder / "manifest.json").mkdir()
    assert "manifest.json: the path is not part of the export" in message(signed.call("verify", folder, public), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("parts", [[], {}, {"encoder": "x"}, {"decoder": "x", "../folder/encoder": "x"}])
def test_invalid_part_names_are_refused(folder: Path, parts: object) -> None:
    exports.edit_json(folder / "generation.json", lambda document: document.update(parts=parts))
    error = message(signed.call("verify", folder), 4)
    assert "generation.json: the document does not name the parts of a model" in error


def test_linked_or_foreign_part_is_refused(folder: Path) -> None:
    (folder / "encoder").rename(folder.parent / "encoder")
    (folder / "encoder").symlink_to(folder.parent / "encoder")
    assert "encoder: expected a folder that is not a link" in message(signed.call("verify", folder), 4)
    (folder / "encoder").unlink()
    (folder.parent / "encoder").rename(folder / "encoder")
    exports.edit_json(folder / "encoder" / "manifest.json", lambda document: document.update(undone=[]))
    assert signed.call("report", folder / "encoder").exit_code == 0
    assert "encoder: the part belongs to another export" in message(signed.call("verify", folder), 4)
