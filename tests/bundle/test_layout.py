"""Paths of options must not conflict with files of a run or a bundle."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.bundle.digests import read_manifest
from optexport.cli.main import cli
from tests._helpers import exports
from tests._helpers.cli import Caller, config, message


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def test_bundle_is_not_written_into_another_bundle(call: Caller, tmp_path: Path) -> None:
    """The outer bundle became invalid and could not be replaced."""
    place = Path(shutil.copytree(exports.exported().output, tmp_path / "out"))
    inside = config().replace("build/model", "out/deep/sub")
    for command in ("check", "run"):
        error = message(call(command, inside), 2)
        assert f"export.output: {place / 'deep' / 'sub'}: " in error
        assert f"is inside the bundle {place}, which may contain only its own files" in error
    read_manifest(place)


def test_link_to_itself_is_a_config_error(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    error = message(call("check", config().replace("build/model", "loop")), 2)
    assert "loop" in error
    assert "defect" not in error


STRANGE = [None, "[]", '{"files": 5}', '{"manifest_version": 1, "digest": "x", "files": [1]}']


@pytest.mark.parametrize("manifest", STRANGE)
def test_folder_with_an_invalid_manifest_is_not_a_bundle(call: Caller, tmp_path: Path, manifest: str | None) -> None:
    place = tmp_path / "build" / "model" / "manifest.json"
    place.parent.mkdir(parents=True)
    if manifest is None:
        os.mkfifo(place)
    else:
        place.write_text(manifest)
    assert "the path exists and is not a bundle" in message(call("check", config()), 2)


FOLDERS = ("model", "model-failure", "model-baseline", "model-baseline-failure")


@pytest.mark.sample(2)
@pytest.mark.parametrize("inside", [*FOLDERS, "model/deep"])
@pytest.mark.parametrize(("option", "name"), [("--junit", "x.xml"), ("--dump", "graphs")])
def test_option_path_inside_the_output_is_refused(
    call: Caller, tmp_path: Path, option: str, name: str, inside: str
) -> None:
    (tmp_path / "mine.toml").write_text(config(), encoding="utf-8")
    before = everything(tmp_path)
    error = message(call("run", config(), option, str(tmp_path / "build" / inside / name)), 2)
    assert error.startswith(f"{option} {tmp_path / 'build' / inside / name}: writing this path would change ")
    assert everything(tmp_path) == before


def test_report_inside_another_bundle_is_refused(call: Caller, tmp_path: Path) -> None:
    """The report was written and made that bundle invalid."""
    exported = exports.exported().output
    before = everything(exported)
    error = message(call("run", config(), "--junit", str(exported / "deep" / "x.xml")), 2)
    assert f"is inside the bundle {exported}" in error
    assert everything(exported) == before
    assert not (tmp_path / "build").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["build/model", "build", "link/x.xml", "mine.toml"])
def test_report_at_the_path_of_the_bundle_is_refused(call: Caller, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.toml").write_text(config(), encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "build" / "model")
    before = everything(tmp_path)
    assert "writing this path would change" in message(call("run", config(), "--junit", str(tmp_path / name)), 2)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["halves.py", "model.safetensors", "mlflow.db"])
def test_report_replaces_only_a_report(call: Caller, tmp_path: Path, name: str) -> None:
    """It overwrote model code, weights or the tracking database before they were read."""
    (tmp_path / "mine.toml").write_text(config(), encoding="utf-8")
    if name != "halves.py":
        (tmp_path / name).write_bytes(b"SQLite format 3\0" * 99)
    before = everything(tmp_path)
    error = message(call("run", config(), "--junit", str(tmp_path / name)), 2)
    assert "the file has other content than an earlier JUnit file" in error
    bundle = exports.exported().output
    for arguments in (["report", str(bundle), "-o"], ["diff", str(bundle), str(bundle), "--html"]):
        done = CliRunner().invoke(cli, [*arguments, str(tmp_path / name)])
        assert "the file has other content than an earlier HTML file" in message(done, 2)
    assert everything(tmp_path) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--junit", "\ufeff<?xml version='1.0'?>\n<!-- of another program -->\n<testsuites/>"),
        ("--output", "\n<!-- ours -->\n<HTML><body>"),
        ("--output", "\n"),
    ],
)
def test_report_of_another_program_is_replaced(tmp_path: Path, option: str, text: str) -> None:
    path, bundle = tmp_path / "report", str(exports.exported().output)
    path.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(cli, ["verify" if option == "--junit" else "report", bundle, option, str(path)])
    assert done.exit_code == 0, done.stderr
    assert "optexport" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_report_is_written_to_a_pipe(tmp_path: Path) -> None:
    """The program reported a failure and waited for another reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text, encoding="utf-8")
        assert CliRunner().invoke(cli, ["verify", str(exports.exported().output), "--junit", str(pipe)]).exit_code == 0
        assert 'errors="0"' in read.result(timeout=300)


def test_empty_report_path_is_refused_as_a_folder(call: Caller) -> None:
    """The error said that the report would change the bundle."""
    assert "--junit .: the path is a folder, not a file" in message(call("run", config(), "--junit", ""), 2)


@pytest.mark.slow
def test_report_next_to_the_bundle_is_written(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "build" / "model.xml"
    assert call("run", config(), "--junit", str(report)).exit_code == 0
    assert report.is_file()
    verified = CliRunner().invoke(cli, ["verify", str(tmp_path / "build" / "model"), "--junit", str(report)])
    assert verified.exit_code == 0


def test_benchmark_output_inside_the_bundle_is_refused() -> None:
    bundle = exports.exported().output
    before = everything(bundle)
    result = CliRunner().invoke(cli, ["bench", str(bundle), "--output", str(bundle / "times.json")])
    assert "writing this path would change" in message(result, 2)
    assert everything(bundle) == before
