"""``optexport report``, and the digest that connects a report with its bundle."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from optexport.bundle.digests import read_manifest
from optexport.cli.main import cli
from optexport.errors import BundleError
from optexport.report.html import page
from tests._helpers import exports


def report(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))


def without_report(folder: Path) -> Path:
    """Removes the report, as in bundles of earlier versions, and returns the folder."""
    (folder / "report.html").unlink()
    exports.edit_json(folder / "measurements.json", lambda measurements: measurements.pop("report_sha256"))
    return folder


def test_report_of_a_bundle_is_reproducible(copied: Path, tmp_path: Path) -> None:
    first = (copied / "report.html").read_bytes(), (copied / "measurements.json").read_bytes()
    assert report(copied, "-o", tmp_path / "again.html").exit_code == 0
    assert (tmp_path / "again.html").read_bytes() == first[0]
    assert report(copied).exit_code == 0
    assert ((copied / "report.html").read_bytes(), (copied / "measurements.json").read_bytes()) == first


def test_bundle_without_a_report_is_valid_and_can_get_one(copied: Path) -> None:
    manifest = without_report(copied)
    assert read_manifest(manifest)
    assert report(copied).exit_code == 0
    assert read_manifest(copied)
    assert "Passed" in (copied / "report.html").read_text(encoding="utf-8")


def test_changed_report_is_detected_and_can_be_rewritten(copied: Path) -> None:
    (copied / "report.html").write_text("Passed", encoding="utf-8")
    with pytest.raises(
        BundleError, match=r"report\.html: the report was changed after it was written\nHint: Write the report again"
    ):
        read_manifest(copied)
    (copied / "report.html").unlink()
    with pytest.raises(BundleError, match=r"report\.html: the report is missing"):
        read_manifest(copied)
    assert report(copied).exit_code == 0
    assert read_manifest(copied)
    content = (copied / "report.html").read_bytes()
    without_report(copied)
    (copied / "report.html").write_bytes(content)
    with pytest.raises(BundleError, match=r"report\.html: the measurements do not list the report"):
        read_manifest(copied)


def test_damaged_bundle_gets_no_report(copied: Path, tmp_path: Path) -> None:
    (copied / "graph_after.txt").write_text("graph():", encoding="utf-8")
    for arguments in ((copied,), (copied, "-o", tmp_path / "report.html")):
        assert report(*arguments).exit_code == 4
    assert not (tmp_path / "report.html").exists()
    assert report(tmp_path / "absent").exit_code == 2


def test_report_path_in_the_bundle_or_unwritable_is_refused(copied: Path, tmp_path: Path) -> None:
    assert report(copied, "-o", copied / "manifest.json").exit_code == 2
    done = report(copied, "-o", tmp_path / "no folder" / "report.html")
    assert done.exit_code == 2
    assert "cannot write the file" in done.stderr


def test_invalid_measurements_are_reported_as_damage(copied: Path) -> None:
    exports.edit_json(copied / "measurements.json", lambda measurements: measurements.update(seconds="many"))
    done = report(copied)
    assert done.exit_code == 4
    assert "measurements.json: the document does not match its schema: seconds" in done.stderr


@pytest.mark.slow
def test_report_needs_neither_torch_nor_mlflow(copied: Path) -> None:
    script = (
        "import sys, json; from pathlib import Path; from optexport.report import difference; "
        "from optexport.report.html import page; "
        "page.write(Path(sys.argv[1])); print(json.dumps(sorted({'torch', 'mlflow', 'transformers', "
        "'matplotlib.pyplot'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(copied)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_failed_write_leaves_the_bundle_unchanged(copied: Path) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            page.write(copied)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before
    read_manifest(copied)


@pytest.mark.sample(1)
@pytest.mark.parametrize("there", [True, False])
def test_failed_write_elsewhere_leaves_the_earlier_report(copied: Path, tmp_path: Path, there: bool) -> None:
    place = tmp_path / "pages" / "page.html"
    place.parent.mkdir()
    if there:
        place.write_text("<!DOCTYPE html>earlier")
        place.chmod(0o600)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        ended = CliRunner().invoke(cli, ["report", str(copied), "--output", str(place)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.exit_code == 1
    assert f"File too large: '{place}'" in ended.stderr
    assert [path.read_text() for path in place.parent.iterdir()] == (["<!DOCTYPE html>earlier"] if there else [])
    assert CliRunner().invoke(cli, ["report", str(copied), "--output", str(place)]).exit_code == 0
    assert not there or place.stat().st_mode & 0o777 == 0o600
    place.unlink()
    place.symlink_to(tmp_path / "pages" / "linked.html")
    assert CliRunner().invoke(cli, ["report", str(copied), "--output", str(place)]).exit_code == 0
    assert place.is_symlink()
    assert "<html" in (tmp_path / "pages" / "linked.html").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["verify", "report", "diff"])
def test_bundle_path_that_is_not_utf_8_is_refused(copied: Path, command: str, tmp_path: Path) -> None:
    """diff reported a defect, and verify reported unreadable stored outputs."""
    folder = tmp_path / os.fsdecode(b"zwei-\xfc")
    shutil.copytree(copied, folder)
    more = [str(copied), "--html", str(tmp_path / "page.html")] if command == "diff" else []
    done = CliRunner().invoke(cli, [command, str(folder), *more])
    assert done.exit_code == 2, done.stderr
    assert "the path of the folder is not UTF-8" in done.stderr


# Root can read everything unless it drops its capabilities.
_AS_ANYBODY = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


@pytest.mark.sample(0, 1)
@pytest.mark.skipif(bool(_AS_ANYBODY) and shutil.which("setpriv") is None, reason="root needs setpriv to be refused")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("model.onnx", "report"),
        ("report.html", "diff"),
        *((name, "verify") for name in ("manifest.json", "measurements.json", "graph_before.txt")),
        ("reference.safetensors", "verify"),
    ],
)
def test_unreadable_file_is_not_reported_as_damage(copied: Path, name: str, command: str) -> None:
    """The file was reported as changed with exit code 4, which is for damaged bundles."""
    (copied / name).chmod(0)
    arguments = [copied, copied] if command == "diff" else [copied]
    done = subprocess.run(
        [*_AS_ANYBODY, sys.executable, "-m", "optexport", command, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        f"Error: {copied / name}: this user has no permission to read the file\nHint: Give this user permission "
    )


@pytest.mark.sample(0, 1)
@pytest.mark.skipif(bool(_AS_ANYBODY) and shutil.which("setpriv") is None, reason="root needs setpriv to be refused")
@pytest.mark.parametrize("command", ["verify", "report"])
def test_unreadable_folder_is_not_a_defect(copied: Path, command: str) -> None:
    copied.chmod(0o444)
    done = subprocess.run(
        [*_AS_ANYBODY, sys.executable, "-m", "optexport", command, copied], capture_output=True, text=True
    )
    copied.chmod(0o755)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"Error: {copied / 'manifest.json'}: Permission denied\nHint: Run the command as a user with this permission.\n"
    )
