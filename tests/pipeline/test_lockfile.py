"""A lock says what a result depends on, and a locked run refuses whatever has changed since."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file

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


LAZY = (
    MODULE.replace("SCALE = 1.0\n", "import locked_lazy\n")
    .replace(
        "    return layer",
        """    class Times(torch.nn.Module):
        def forward(self, input):
            from locked_lazy import factor
            return input * factor.FACTOR
    return torch.nn.Sequential(layer, Times())""",
    )
    .replace("mul_(SCALE)", "mul_(1.0)")
)


def test_a_module_that_is_imported_when_the_model_is_called_is_locked_with_what_it_imports(locked: Path) -> None:
    """The lock was made before it was imported, and another model passed."""
    code, package = locked.with_name("locked_model.py"), locked.with_name("locked_lazy")
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "number.py").write_text("NUMBER = 2.0\n")
    (package / "factor.py").write_text("from .number import NUMBER\nFACTOR = NUMBER\n")
    (locked.parent / "old.py").write_text("print 'no file of this Python'\n")
    code.write_text(f"{LAZY}\ndef unused():\n    import old\n")
    sys.modules.pop("locked_model", None)
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    files = json.loads(lockfile.lock_path(locked).read_text())["files"]
    assert {"locked_lazy/__init__.py", "locked_lazy/factor.py", "locked_lazy/number.py", "old.py"} <= files.keys()
    assert run(locked).exit_code == 0
    (package / "number.py").write_text("NUMBER = 200.0\n")
    assert "locked_lazy/number.py: " in message(run(locked), 2)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_data_are_locked_whatever_their_file_is_called(locked: Path, suffix: str) -> None:
    """Files that are called as weights are were left out, though nothing else stands for them."""
    data = locked.with_name(f"data{suffix}")

    def write(value: float) -> None:
        rows = np.full((2, 4), value, dtype=np.float32)
        save_file({"input": rows}, data) if suffix == ".safetensors" else np.savez(data, input=rows)

    write(1.0)
    locked.write_text(CONFIG.replace("rows.jsonl", data.name))
    assert CliRunner().invoke(cli, ["lock", str(locked)]).exit_code == 0
    write(2.0)
    assert f"{data.name}: " in message(run(locked), 2)


def test_of_a_models_folder_the_weights_are_left_out_and_nothing_else(tmp_path: Path) -> None:
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


def test_files_of_a_folder_are_those_of_its_links_too_each_once(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("place", ["..2025_01_01_00_00_00.1", "../shared"])
def test_a_module_that_is_a_link_beside_the_config_is_locked_under_that_name(locked: Path, place: str) -> None:
    """It was looked for where the link leads, which is not beside the config, and was left out."""
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


def test_what_a_rule_of_ones_own_imports_is_locked_too(locked: Path) -> None:
    """A run imports its rules before it looks, which lock did not: what was locked was refused for ever."""
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


@pytest.mark.parametrize("place", ["elsewhere", "site-packages"])
@pytest.mark.parametrize("kind", ["package", "module"])
def test_code_that_lies_elsewhere_is_locked_too(
    locked: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An image that was made anew has another version of the package that the model is of, and the same weights."""
    folder = tmp_path_factory.mktemp("packages") / place
    file = folder / "locked_elsewhere" / "layers.py" if kind == "package" else folder / "locked_elsewhere.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch\nclass Scaled(torch.nn.Linear):\n    def forward(self, input):\n"
        "        return super().forward(input) * 2.0\n"
        "def load():\n    torch.manual_seed(0)\n    return Scaled(4, 3)\n"
    )
    (file.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    name = "locked_elsewhere.layers" if kind == "package" else "locked_elsewhere"
    locked.write_text(CONFIG.replace("locked_model", name))

    def call(*command: str) -> Result:
        for known in [known for known in sys.modules if known.startswith("locked_elsewhere")]:
            sys.modules.pop(known)
        return CliRunner().invoke(cli, [*command, str(locked)])

    assert "packages of the model: 1." in call("lock").stdout
    done = call("run", "--locked")
    assert done.exit_code == 0, done.stderr
    file.write_text(file.read_text().replace("2.0", "3.0  "))  # of another length: Python takes what it compiled else
    assert "the code of locked_elsewhere: " in message(call("run", "--locked"), 2)


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
    lock = Lock(versions={}, revision="abc123", weights_sha256="0", files={}, imports={}, packages={})
    assert lockfile.pinned(config, lock, tmp_path).model.revision == "abc123"
    (tmp_path / "org" / "name").mkdir(parents=True)  # now a folder, which has no revisions
    assert lockfile.pinned(config, lock, tmp_path).model.revision is None


def test_a_lock_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    lock = Lock(versions={"torch": "1"}, revision=None, weights_sha256="0" * 64, files={}, imports={}, packages={})
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
