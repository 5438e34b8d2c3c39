"""How much memory there is: what the system tells, and no more than a container may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport._utils import platform


def test_what_a_container_may_have_is_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("memory.max", "memory.current", "memory.stat")]
    monkeypatch.setattr(platform, "_CONTAINERS", (tuple(map(str, files)),))
    free = platform.free_memory()
    assert free is None or free > 64 << 20
    for path, text in zip(files, (f"{64 << 20}\n", f"{40 << 20}\n", f"anon 7\ninactive_file {8 << 20}\n"), strict=True):
        path.write_text(text, encoding="ascii")
    assert platform.free_memory() == 32 << 20
    files[0].write_text("max\n", encoding="ascii")
    unlimited = platform.free_memory()
    assert unlimited is None or unlimited > 64 << 20
