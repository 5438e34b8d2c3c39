"""File names that are too long are usage errors, not defects."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.cli.main import cli

_CONFIG = '[model]\nsource = "toy:tiny"\n[input.x]\nshape = [1, 2]\n'


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "LONG"),
        ("verify", ".", "--junit", "LONG"),
        ("report", "LONG"),
        ("report", ".", "-o", "LONG"),
        ("diff", ".", "LONG"),
        ("diff", ".", ".", "--html", "LONG"),
        ("init", "LONG"),
        ("init", ".", "-o", "LONG"),
        ("predict", "LONG", "x"),
        ("reproduce", "LONG"),
        ("sign", "LONG", "--key", "LONG"),
        ("run", "a.toml", "--junit", "LONG"),
        ("run", "a.toml", "--dump", "LONG/x"),
        ("run", "a.toml", "--output", "LONG"),
        ("run", "LONG"),
        ("lock", "LONG"),
        ("upload", "LONG"),
    ],
    ids=" ".join,
)
def test_name_too_long_for_a_file_exits_with_2(
    arguments: tuple[str, ...], length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(_CONFIG)
    ended = CliRunner().invoke(cli, [argument.replace("LONG", "a" * length) for argument in arguments])
    assert ended.exit_code == 2, ended.output
    assert "This is a bug" not in ended.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml"]
