"""Free memory and cores of this machine, and an export on a system other than Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from optexport import export, verify
from optexport._utils import model_memory, platform
from tests._helpers import exports


def test_free_memory_is_limited_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("model_memory.max", "model_memory.current", "model_memory.stat")]
    monkeypatch.setattr(platform, "_MEMORY_LIMITS", (tuple(map(str, files)),))
    assert platform.free_memory() > 64 << 20
    for path, text in zip(files, (f"{64 << 20}\n", f"{40 << 20}\n", f"anon 7\ninactive_file {8 << 20}\n"), strict=True):
        path.write_text(text, encoding="ascii")
    assert platform.free_memory() == 32 << 20
    files[0].write_text("max\n", encoding="ascii")
    assert platform.free_memory() > 64 << 20


@pytest.mark.parametrize(
    ("texts", "cores"),
    [
        (["max 100000\n"], 64),
        (["250000 100000\n"], 2),
        (["50000 100000\n"], 1),  # at least one
        (["-1\n", "100000\n"], 64),
        (["300000\n", "100000\n"], 3),
    ],
)
def test_cores_are_limited_by_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], cores: int
) -> None:
    files = [tmp_path / str(index) for index in range(len(texts))]
    monkeypatch.setattr(platform, "_TIME_LIMITS", (tuple(map(str, files)),))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert platform.usable_cores() == 64  # without a limit
    for path, text in zip(files, texts, strict=True):
        path.write_text(text, encoding="ascii")
    assert platform.usable_cores() == cores


@pytest.mark.slow
def test_export_works_without_linux_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        if path.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(path)
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(model_memory, "_find_c_function", lambda name, *types: None)
    monkeypatch.setattr(model_memory, "LARGE_MODEL", 1)  # memory of large models is released
    output = tmp_path / "out"
    export(exports.block(), exports.batch(), output, formats=["onnx"], dynamic=exports.DYNAMIC, effort="quick")
    verify(output)
