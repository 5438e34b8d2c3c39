"""A lock says what a result depends on, and a locked run refuses whatever has changed since."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from optexport.bundle import lockfile
from optexport.bundle.lockfile import Lock
from optexport.config.file import parse_config
from optexport.errors import ConfigError
from tests.calling import CliRunner, cli, message

MODULE = """
import torch
SCALE = 1.0
def load():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.mul_(SCALE)
    return layer
"""
CONFIG = """
[model]
source = "python:locked_model:load"
[inputs]
data = "rows.jsonl"
[export]
formats = ["pt2"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A config that was locked."""
    (tmp_path / "locked_model.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": [[1.0, 2.0, 3.0, 4.0]]}) + "\n")
    config = tmp_path / "mine.toml"
    config.write_text(CONFIG)
    done = CliRunner().invoke(cli, ["lock", str(config)])
    assert done.exit_code == 0, done.stderr
    assert f"optexport run --locked {config}" in done.stdout
    return config


def run(config: Path) -> Result:
    sys.modules.pop("locked_model", None)
    return CliRunner().invoke(cli, ["run", "--locked", str(config)])


def test_a_locked_run_of_what_was_locked_is_a_run(locked: Path) -> None:
    done = run(locked)
    assert done.exit_code == 0, done.stderr
    document = json.loads(lockfile.lock_path(locked).read_text())
    assert set(document["files"]) == {"locked_model.py", "rows.jsonl"}
    assert {"torch", "transformers", "onnxruntime", "python", "optexport"} <= set(document["versions"])


def _in_lock(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(config: Path) -> None:
        path = lockfile.lock_path(config)
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return apply


DRIFTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (lambda config: config.with_name("rows.jsonl").write_text("[]"), "rows.jsonl: "),
    "code": (lambda config: config.with_name("locked_model.py").write_text(f"{MODULE}#"), "locked_model.py: "),
    "a package": (
        _in_lock(lambda document: document["versions"].update(torch="1.0")),  # type: ignore[attr-defined]
        "torch: 1.0 when it was locked, 2",
    ),
    "weights": (
        _in_lock(lambda document: document.update(weights_sha256="0" * 64)),
        "the model's weights: 000000000000 when it was locked, ",
    ),
    "no lock": (lambda config: lockfile.lock_path(config).unlink(), "there is no such file"),
    "a broken lock": (lambda config: lockfile.lock_path(config).write_text("{"), "it cannot be read"),
    "another kind of lock": (_in_lock(lambda document: document.update(lock_version=2)), "it cannot be read"),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_is_refused_by_name(locked: Path, drift: str) -> None:
    change, told = DRIFTS[drift]
    change(locked)
    error = message(run(locked), 2)
    assert error.startswith("mine.toml.lock: ")
    assert told in error
    assert f"optexport lock {locked}" in error
    assert not (locked.parent / "build" / "model").exists()


def test_a_module_that_the_models_code_imports_is_locked_too(locked: Path) -> None:
    """Of all code only the file that the config names was looked at, and another model passed."""
    code, scale = locked.with_name("locked_model.py"), locked.with_name("locked_scale.py")
    scale.write_text("SCALE = 1.0\n")
    code.write_text(MODULE.replace("SCALE = 1.0", "from locked_scale import SCALE"))
    sys.modules.pop("locked_model", None)
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    sys.modules.pop("locked_scale", None)
    assert run(locked).exit_code == 0
    scale.write_text("SCALE = 1.0  # of another kind\n")
    assert "locked_scale.py: " in message(run(locked), 2)
    scale.write_text("SCALE = 1.0\n")
    _in_lock(lambda document: document["files"].pop("locked_scale.py"))(locked)  # type: ignore[attr-defined]
    assert "locked_scale.py: absent when it was locked, " in message(run(locked), 2)


def test_a_locked_run_is_one_from_the_configs_own_folder(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules of torch name a file that is nowhere, which was looked for there."""
    monkeypatch.chdir(locked.parent)
    done = run(Path(locked.name))
    assert done.exit_code == 0, done.stderr


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(locked: Path) -> None:
    lockfile.lock_path(locked).unlink()
    os.mkfifo(lockfile.lock_path(locked))
    assert "it is no file" in message(run(locked), 2)


def test_everything_that_differs_is_named_at_once(locked: Path) -> None:
    for drift in ("data", "code", "a package"):
        DRIFTS[drift][0](locked)
    error = message(run(locked), 2)
    assert all(name in error for name in ("rows.jsonl", "locked_model.py", "torch"))


def test_a_model_of_the_hub_is_loaded_at_the_revision_that_was_locked(tmp_path: Path) -> None:
    config = parse_config('[model]\nsource = "org/name"', tmp_path / "mine.toml")
    lock = Lock(versions={}, revision="abc123", weights_sha256="0", files={})
    assert lockfile.pinned(config, lock, tmp_path).model.revision == "abc123"
    (tmp_path / "org" / "name").mkdir(parents=True)  # now a folder, which has no revisions
    assert lockfile.pinned(config, lock, tmp_path).model.revision is None


def test_a_lock_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    lock = Lock(versions={"torch": "1"}, revision=None, weights_sha256="0" * 64, files={})
    lockfile.write(lock, config)
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            lockfile.write(lock.model_copy(update={"versions": {"torch": "2"}}), config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert lockfile.read(config) == lock
    assert [path.name for path in tmp_path.iterdir()] == [lockfile.lock_path(config).name]
