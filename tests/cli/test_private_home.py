"""Where libraries keep what they keep for a user whom the system does not know, as in a container."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from optexport.cli import main as program


def test_who_has_no_home_gets_one_that_nobody_else_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the folder for temporary files, in which another user could have laid results to be taken for proven."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError("no such user"))))
    monkeypatch.setattr(program, "cli", lambda: None)
    monkeypatch.setenv("HOME", "/")
    own = tmp_path / f"optexport-{os.getuid()}"
    found = []
    for make in (lambda: None, lambda: own.chmod(0o777), lambda: (own.rmdir(), own.symlink_to("/"))):
        make()
        program.main()
        found.append(Path(os.environ["HOME"]))
        assert found[-1].lstat().st_mode & 0o777 == 0o700
    assert found[0] == own
    assert own not in found[1:]
