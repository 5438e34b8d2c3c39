"""Commands that fail because of a full disk, a quota, or a limit on memory or files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors import SafetensorError

from optexport.cli._group import Group


def ended_by(error: Exception) -> Result:
    """Runs a command that raises an error, and checks that the message does not call it a defect."""
    group = Group("program")

    @group.command()
    def fill() -> None:
        raise error

    result = CliRunner().invoke(group, ["fill"])
    assert result.exit_code == 1
    assert "This is a bug" not in result.stderr
    return result


def test_full_disk_is_not_a_defect() -> None:
    """safetensors is written in Rust and does not raise OSError."""
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    result = ended_by(SafetensorError(text))
    assert f"{text}\nHint: Free disk space for standard output, the output folder, " in result.stderr
    assert f"{tempfile.gettempdir()}, and run again.\n" in result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EFBIG, "Raise the limit on file sizes (ulimit -f)"), (errno.EDQUOT, f"Free disk space in {os.getcwd()}")],
)
def test_limit_on_file_size_and_quota_are_not_defects(number: int, hint: str) -> None:
    result = ended_by(OSError(number, os.strerror(number), "model.onnx"))
    assert f"{os.strerror(number)}: 'model.onnx'\nHint: {hint}" in result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "limit on open files (ulimit -n)"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory limit (ulimit -v)"),
        (RuntimeError("DefaultCPUAllocator: Error code 12 (Cannot allocate memory)"), "memory limit (ulimit -v)"),
        (MemoryError(), "memory limit (ulimit -v)"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "memory limit (ulimit -v)"),
    ],
    ids=["open files", "memory", "memory of torch", "memory of Python", "memory for a library"],
)
def test_limits_on_memory_and_open_files_are_not_defects(error: Exception, hint: str) -> None:
    result = ended_by(error)
    assert result.exit_code == 1
    assert f"\nHint: Raise the {hint}" in result.stderr


def test_short_message_without_memory_for_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def redact(text: str) -> str:
        raise MemoryError(text)

    monkeypatch.setattr("optexport.cli._failures.redact_error", redact)
    stderr = ended_by(RuntimeError("no")).stderr
    assert stderr.startswith("Error: out of memory\nHint: Raise the memory limit (ulimit -v)")


def test_no_memory_to_check_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise MemoryError

    monkeypatch.setattr("optexport._utils.packages.check", check)
    assert "\nHint: Raise the memory limit (ulimit -v)" in ended_by(RuntimeError("no")).stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "code", "closed"),
    [
        ("--help", 1, "stdout"),
        ("--version", 1, "stdout"),
        ("schema", 1, "stdout"),
        ("check nothing.toml", 2, "stderr"),
        ("verify --what", 2, "stderr"),
    ],
)
def test_output_to_a_full_disk_keeps_the_exit_code(arguments: str, code: int, closed: str) -> None:
    """The program must not print a traceback if it cannot print help or an error message."""
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: full}
        program = [sys.executable, "-m", "optexport", *arguments.split()]
        done = subprocess.run(program, **streams, text=True, check=False)
    assert done.returncode == code
    if closed == "stdout":
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
