"""Home folder for libraries if the system does not know the user, as in a container."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from optexport.cli import main as program


def test_missing_home_is_replaced_by_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files was used, and other users could put manipulated cache entries there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError("no such user"))))
    monkeypatch.setattr(program, "cli", lambda: None)
    monkeypatch.setenv("HOME", "/")
    own = tmp_path / f"optexport-{os.getuid()}"
    homes = []
    for make in (lambda: None, lambda: own.chmod(0o777), lambda: (own.rmdir(), own.symlink_to("/"))):
        make()
        program.main()
        homes.append(Path(os.environ["HOME"]))
        assert homes[-1].lstat().st_mode & 0o777 == 0o700
    assert homes[0] == own
    assert own not in homes[1:]
