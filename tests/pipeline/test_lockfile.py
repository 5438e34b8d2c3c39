"""A lock lists the inputs of a result, and a locked run refuses to run if one has changed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file

import optexport
from optexport.config.load import parse_config
from optexport.errors import ConfigError
from optexport.pipeline import lockfile
from optexport.pipeline.lockfile import Lock
from tests._helpers.cli import CliRunner, cli, message

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
output = "build/model"
formats = ["pt2"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """Returns a config with a lock."""
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


def test_python_locks_a_config(locked: Path) -> None:
    before = lockfile.lock_path(locked).read_text()
    lockfile.lock_path(locked).unlink()
    assert optexport.lock(locked) == lockfile.lock_path(locked)
    assert lockfile.lock_path(locked).read_text() == before


@pytest.mark.nightly
def test_script_that_locks_is_not_locked(locked: Path) -> None:
    """A run from another script in the config's folder was refused."""
    for name, call in (("locks", "lock(%r)"), ("runs", "run(%r, locked=True)")):
        script = locked.with_name(f"{name}.py")
        script.write_text(f"import optexport\noptexport.{call % str(locked)}\n")
        subprocess.run([sys.executable, str(script)], check=True, cwd=locked.parent)
    assert set(lockfile.read(locked).files) == {"locked_model.py", "rows.jsonl"}


def test_locked_run_passes_if_nothing_changed(locked: Path) -> None:
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
        "torch: locked 1.0, now 2",
    ),
    "weights": (
        _in_lock(lambda document: document.update(weights_sha256="0" * 64)),
        "the model's weights: locked 000000000000, now ",
    ),
    "no lock": (lambda config: lockfile.lock_path(config).unlink(), "the config has no lock"),
    "a broken lock": (lambda config: lockfile.lock_path(config).write_text("{"), "the lock cannot be read"),
    "another kind of lock": (_in_lock(lambda document: document.update(lock_version=1)), "the lock cannot be read"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_is_refused_by_name(locked: Path, drift: str) -> None:
    change, difference = DRIFTS[drift]
    change(locked)
    error = message(run(locked), 2)
    assert error.startswith("mine.toml.lock: ")
    assert difference in error
    assert f"optexport lock {locked}" in error
    assert not (locked.parent / "build" / "model").exists()


@pytest.mark.slow
def test_module_imported_by_the_model_is_locked(locked: Path) -> None:
    """Another helper makes another model."""
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
    assert "locked_scale.py: locked absent, now " in message(run(locked), 2)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_data_file_named_like_weights_is_locked(locked: Path, suffix: str) -> None:
    """The lock omits only weights in the model's folder. No other digest covers a data file."""
    data = locked.with_name(f"data{suffix}")

    def write(value: float) -> None:
        rows = np.full((2, 4), value, dtype=np.float32)
        save_file({"input": rows}, data) if suffix == ".safetensors" else np.savez(data, input=rows)

    write(1.0)
    locked.write_text(CONFIG.replace("rows.jsonl", data.name))
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    write(2.0)
    assert f"{data.name}: " in message(run(locked), 2)


def test_only_weights_of_the_models_folder_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "bert" / "sub").mkdir(parents=True)
    (tmp_path / "rules_of_mine").mkdir()
    for name in ("config.json", "model.safetensors", "sub/pytorch_model.bin", "sub/config.json", "rows.safetensors"):
        (tmp_path / "bert" / name).write_text(name)
    for name in ("__init__.py", "table.bin"):
        (tmp_path / "rules_of_mine" / name).write_text(name)
    text = """
[model]
source = "./bert"
[inputs]
data = "bert/rows.safetensors"
[[transformations]]
use = "python:rules_of_mine:Rule"
"""
    names = {"bert/config.json", "bert/sub/config.json", "bert/rows.safetensors"}
    names |= {"rules_of_mine/__init__.py", "rules_of_mine/table.bin"}
    config = parse_config(text, tmp_path / "mine.toml")
    assert lockfile._digests(config, tmp_path, ()).keys() == names
    code = parse_config(text.replace("[inputs]", "trust_remote_code = true\n[inputs]"), tmp_path / "mine.toml")
    weights = {"bert/model.safetensors", "bert/sub/pytorch_model.bin"}
    assert lockfile._digests(code, tmp_path, ()).keys() == names | weights


def test_files_behind_links_are_listed_once(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap as links to links, with a time in the name of the folder that holds the files."""
    there = tmp_path / "bert" / "..2025_01_01_00_00_00.1"
    (there / "sub").mkdir(parents=True)
    for name in ("config.json", "sub/config.json"):
        (there / name).write_text(name)
    (tmp_path / "bert" / "..data").symlink_to(there.name)
    for name in ("config.json", "sub"):
        (tmp_path / "bert" / name).symlink_to(f"..data/{name}")
    (there / "sub" / "again").symlink_to(".")
    config = parse_config('[model]\nsource = "./bert"', tmp_path / "mine.toml")
    assert [name for name, _ in lockfile.named_files(config, tmp_path)] == ["bert/config.json", "bert/sub/config.json"]


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("place", ["..2025_01_01_00_00_00.1", "../shared"])
def test_module_that_is_a_link_is_locked_under_its_name(locked: Path, place: str) -> None:
    """The target of the link is in another folder than the config, so it would be missed under its own path."""
    code, scale = locked.with_name("locked_model.py"), locked.parent / place / "locked_scale.py"
    scale.parent.mkdir()
    scale.write_text("SCALE = 1.0\n")
    if place.startswith("../"):
        locked.with_name("locked_scale.py").symlink_to(scale)
    else:
        locked.with_name("..data").symlink_to(scale.parent.name)
        locked.with_name("locked_scale.py").symlink_to("..data/locked_scale.py")
    code.write_text(MODULE.replace("SCALE = 1.0", "from locked_scale import SCALE"))
    for name in ("locked_model", "locked_scale"):
        sys.modules.pop(name, None)
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    assert json.loads(lockfile.lock_path(locked).read_text())["files"].keys() >= {"locked_model.py", "locked_scale.py"}
    sys.modules.pop("locked_scale", None)
    done = run(locked)
    assert done.exit_code == 0, done.stderr
    scale.write_text("SCALE = 1.0  # of another kind\n")
    assert "locked_scale.py: " in message(run(locked), 2)
    sys.modules.pop("locked_scale", None)


@pytest.mark.slow
def test_module_imported_by_a_custom_rule_is_locked(locked: Path) -> None:
    """The lock and the locked run both import the rules before they look for modules."""
    helper = locked.with_name("locked_helper.py")
    helper.write_text("N = 1\n")
    locked.with_name("locked_rule.py").write_text(
        "import locked_helper\nfrom optexport.transformations import RemoveNoOps\nclass Mine(RemoveNoOps):\n    pass\n"
    )
    locked.write_text(f'{CONFIG}\n[[transformations]]\nuse = "python:locked_rule:Mine"\n')

    def without_modules() -> None:
        for name in ("locked_model", "locked_rule", "locked_helper"):
            sys.modules.pop(name, None)

    without_modules()
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    without_modules()
    done = run(locked)
    assert done.exit_code == 0, done.stderr
    helper.write_text("N = 2\n")
    assert "locked_helper.py: " in message(run(locked), 2)
    without_modules()


@pytest.mark.slow
def test_locked_run_from_the_configs_own_folder(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules of torch name a file that does not exist in the working directory."""
    monkeypatch.chdir(locked.parent)
    done = run(Path(locked.name))
    assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_pipe_in_place_of_the_lock_is_refused(locked: Path) -> None:
    lockfile.lock_path(locked).unlink()
    os.mkfifo(lockfile.lock_path(locked))
    assert "the lock cannot be read: the path is not a file" in message(run(locked), 2)


def test_all_differences_are_named_at_once(locked: Path) -> None:
    for drift in ("data", "code", "a package"):
        DRIFTS[drift][0](locked)
    error = message(run(locked), 2)
    assert all(name in error for name in ("rows.jsonl", "locked_model.py", "torch"))


def test_hub_model_is_loaded_at_the_locked_revision(tmp_path: Path) -> None:
    config = parse_config('[model]\nsource = "org/name"', tmp_path / "mine.toml")
    lock = Lock(versions={}, revision="abc123", weights_sha256="0", files={})
    assert lockfile.pin_revision(config, lock, tmp_path).model.revision == "abc123"
    (tmp_path / "org" / "name").mkdir(parents=True)  # now a folder, which has no revisions
    assert lockfile.pin_revision(config, lock, tmp_path).model.revision is None


def test_failed_write_keeps_the_older_lock(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    lock = Lock(versions={"torch": "1"}, revision=None, weights_sha256="0" * 64, files={})
    lockfile.write(lock, config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(ConfigError, match="the lock cannot be written"):
            lockfile.write(lock.model_copy(update={"versions": {"torch": "2"}}), config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lockfile.read(config) == lock
    assert [path.name for path in tmp_path.iterdir()] == [lockfile.lock_path(config).name]
