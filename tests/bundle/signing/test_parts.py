"""Generative models are signed and verified as a whole, with all their parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optexport.bundle.signing.signature import check, sign
from optexport.errors import BundleError
from optexport.generation.export import check_output
from tests._helpers import exports, signed
from tests._helpers.cli import message


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return signed.generation(tmp_path / "whole")


def test_one_signature_covers_all_parts(whole: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    assert signed.call("sign", whole, private).exit_code == 0
    assert {path.name for path in whole.iterdir()} == {
        *("encoder", "decoder", "generation.json"),
        *("bundle.sig", "provenance.json", "sbom.cdx.json"),
    }
    check_output(whole)
    told = json.loads(signed.call("verify", whole, public, "--json").stdout)
    assert (told["passed"], told["signature_checked"], sorted(told["parts"])) == (True, True, ["decoder", "encoder"])
    assert {row["target"] for row in told["parts"]["decoder"]["targets"]} >= {"onnx", "pt2"}
    statement = json.loads((whole / "provenance.json").read_bytes())
    names = [subject["name"] for subject in statement["subject"]]
    assert {"generation.json", "decoder/model.onnx", "encoder/model.onnx", "sbom.cdx.json"} <= set(names)
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [d["annotations"]["part"] for d in dependencies if d["name"] == "model"] == ["decoder", "encoder"]


def test_change_to_any_part_is_detected(whole: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    sign(whole, private)
    for name in ("generation.json", "encoder/model.onnx", "decoder/report.html"):
        content = (whole / name).read_bytes()
        (whole / name).write_bytes(content[:-1] + b"x")
        with pytest.raises(BundleError, match=f"\n  {name} was changed"):
            check(whole, public)
        (whole / name).write_bytes(content)
    check(whole, public)
    sign(whole / "decoder", private)  # a part can be signed too, but before the whole
    with pytest.raises(BundleError, match="decoder/bundle.sig was added"):
        check(whole, public)
    sign(whole, private)
    check(whole, public)
    check(whole / "decoder", public)
    shutil.rmtree(whole / "encoder")
    with pytest.raises(BundleError, match="encoder/graph_after.txt was removed"):
        check(whole, public)


def test_parts_are_verified_without_a_key(whole: Path, tmp_path: Path) -> None:
    done = signed.call("verify", whole)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        str(whole / "decoder"),
        str(whole / "encoder"),
    ]
    done = signed.call("verify", whole, None, "--junit", str(tmp_path / "told.xml"))
    assert "--junit: a JUnit file can describe only one bundle (found " in message(done, 2)
    with (whole / "encoder" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert "encoder/model.onnx: it was changed" in message(signed.call("verify", whole), 4)
    shutil.rmtree(whole / "encoder")
    assert "encoder: there is no such folder" in message(signed.call("verify", whole), 4)


def test_folder_named_manifest_json_is_refused(whole: Path, tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path)
    sign(whole, private)
    (whole / "manifest.json").mkdir()
    assert "manifest.json: the export does not know it" in message(signed.call("verify", whole, public), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("parts", [[], {}, {"encoder": "x"}, {"decoder": "x", "../whole/encoder": "x"}])
def test_invalid_part_names_are_refused(whole: Path, parts: object) -> None:
    exports.edit_json(whole / "generation.json", lambda document: document.update(parts=parts))
    assert "generation.json: it does not name the parts of a model" in message(signed.call("verify", whole), 4)


def test_linked_or_foreign_part_is_refused(whole: Path) -> None:
    (whole / "encoder").rename(whole.parent / "encoder")
    (whole / "encoder").symlink_to(whole.parent / "encoder")
    assert "encoder: it is a link" in message(signed.call("verify", whole), 4)
    (whole / "encoder").unlink()
    (whole.parent / "encoder").rename(whole / "encoder")
    exports.edit_json(whole / "encoder" / "manifest.json", lambda document: document.update(undone=[]))
    assert signed.call("report", whole / "encoder").exit_code == 0
    assert "encoder: it belongs to another export" in message(signed.call("verify", whole), 4)
