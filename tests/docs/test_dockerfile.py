"""Tests of the Dockerfile without a container engine.

The tests run its steps in layers over the root of this machine. Then they run the program as in a cluster: another user
id, a read-only root and one writable folder. Python (/usr/bin/python3) and the Debian packages come from this
machine, not from the base image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
_PATH = "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="mounts need root, and setpriv"),
]


@dataclass
class Stage:
    """A stage of the Dockerfile, and the folder with the files that its steps wrote."""

    upper: Path
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)


def _in_root(upper: Path, script: str, work: Path, *, writable: bool, env: dict[str, str]) -> str:
    """Runs a script in a mount namespace whose root is a layer over this machine's root.

    Args:
        work: A folder for the mount points. Its subfolder ``work``, if present, becomes ``/work``.
    """
    mounted = work / "root"
    mounted.mkdir(exist_ok=True)
    (work / "overlay").mkdir(exist_ok=True)
    lines = [
        f"mount -t overlay overlay -o lowerdir=/,upperdir={upper},workdir={work / 'overlay'} {mounted}",
        *([] if writable else [f"mount -o remount,ro {mounted}"]),
        *(f"mount --rbind /{name} {mounted}/{name}" for name in ("dev", "proc", "sys")),
        f"mount -t tmpfs -o mode=1777 tmpfs {mounted}/tmp",
        *([f"mount --bind {work / 'work'} {mounted}/work"] if (work / "work").is_dir() else []),
        f"exec chroot {mounted} /bin/sh -c '{script}'",
    ]
    assert "'" not in script
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", "\n".join(lines)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / source.name if target.is_dir() else target)


def _build(work: Path) -> Stage:
    """Runs every step of the Dockerfile in order. Returns the last stage."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    parser = DockerfileParser(
        path=str(work)
    )  # the parser writes this file, so it must not be the one of the repository
    parser.content = dockerfile
    shared = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    progress: dict[str, Stage] = {}
    stage = Stage(work)
    for step in parser.structure:
        kind, value = step["instruction"], step["value"]
        if kind == "FROM":
            name = value.partition(" AS ")[2] or "last"
            progress[name] = stage = Stage(work / name, {"PATH": _PATH, **shared})
            (stage.upper / "usr/local/bin").mkdir(parents=True)
            (stage.upper / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            if Path("/work").exists():  # a device 0/0 hides /work of this machine
                os.mknod(stage.upper / "work", mode=stat.S_IFCHR, device=os.makedev(0, 0))
        elif kind == "ENV":
            for key, text in re.findall(r"(\w+)=(\S+)", value):
                stage.env[key] = text.replace("$PATH", stage.env["PATH"])
        elif kind == "WORKDIR":
            stage.workdir = value
            (stage.upper / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            *sources, target = value.split()
            base = ROOT
            if sources[0].startswith("--from="):
                base = progress[sources.pop(0).removeprefix("--from=")].upper
            for source in sources:
                _copy(base / source.lstrip("/"), stage.upper / os.path.join(stage.workdir, target).lstrip("/"))
        elif kind == "RUN":
            script = f"cd {stage.workdir} && {value}".replace("'", '"')
            # The default index of this machine has torch without CUDA, so no index is named.
            env = {**stage.env, **stage.arguments, "TORCH_INDEX": ""}
            _in_root(stage.upper, script, work, writable=True, env=env)
        elif kind == "ARG":
            name, _, default = value.partition("=")
            stage.arguments[name] = default
        elif kind == "USER":
            stage.user = value
        elif kind == "ENTRYPOINT":
            stage.entrypoint = json.loads(value)
        else:
            assert kind in ("COMMENT", "CMD"), f"this test does not know {kind}"
    return stage


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Path]]:
    work = tmp_path_factory.mktemp("image")
    work.chmod(0o755)
    yield _build(work), work
    shutil.rmtree(work)  # gigabytes


CONFIG = """
[model]
source = "python:tiny:load"
[inputs.tensors.input]
shape = ["batch", 4]
[export]
output = "bundle"
"""


@pytest.mark.parametrize("home", ["as the image sets it", "unset"])
@pytest.mark.parametrize("user", ["10001:0", "54321:54321"])
def test_image_exports_as_any_user_with_a_read_only_root(image: tuple[Stage, Path], user: str, home: str) -> None:
    stage, work = image
    folder = work / "work"
    folder.mkdir()
    try:
        uid, gid = user.split(":")
        (folder / "config.toml").write_text(CONFIG)
        (folder / "tiny.py").write_text("import torch\ndef load(): return torch.nn.Linear(4, 4)\n")
        for path in (folder, *folder.iterdir()):
            os.chown(path, int(uid), int(gid))
        unprivileged = f"setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set -all"
        env = {key: value for key, value in stage.env.items() if key != "HOME" or home != "unset"}

        def run(command: str) -> str:
            script = f"cd {stage.workdir} && {unprivileged} {' '.join(stage.entrypoint)} {command}"
            return _in_root(stage.upper, script, work, writable=False, env=env)

        assert "PASSED" in run("run config.toml")
        assert "unchanged" in run("verify bundle")
        assert (folder / "mlflow.db").is_file()
        assert {path.stat().st_uid for path in folder.rglob("*")} == {int(uid)}
    finally:
        shutil.rmtree(folder)


def test_default_user_of_the_image_is_not_root(image: tuple[Stage, Path]) -> None:
    stage, _ = image
    assert int(stage.user.partition(":")[0]) > 0
