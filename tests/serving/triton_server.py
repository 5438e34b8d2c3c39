"""Runs a real Triton Inference Server from NVIDIA's Python package nvidia-pytriton."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests._helpers.servers import free_port

PACKAGE = "nvidia-pytriton==0.7.0"  # contains Triton 2.51
BACKEND = Path(__file__).with_name("backend.py")


def install(folder: Path) -> Path:
    """Installs the server without the dependencies of the package's Python code; returns its folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), PACKAGE], check=True)
    return folder / "pytriton" / "tritonserver"


def _backends(installed: Path, folder: Path) -> Path:
    """Returns a folder of backends: the server's own for Python, and ours, which it runs, under the names of NVIDIA's.

    The variable ``TRITON_BACKENDS`` may name a folder of NVIDIA's backends instead.
    """
    if named := os.environ.get("TRITON_BACKENDS"):
        return Path(named)
    python = shutil.copytree(installed / "backends" / "python", folder / "python", symlinks=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = shutil.copy(installed / "python_backend_stubs" / version / "triton_python_backend_stub", python)
    Path(stub).chmod(0o755)
    for name in ("onnxruntime", "pytorch"):
        (folder / name).mkdir()
        shutil.copy(BACKEND, folder / name / "model.py")
    return folder


class Triton:
    """A running server."""

    def __init__(self, port: int, log: Path) -> None:
        self.uri, self.log = f"http://127.0.0.1:{port}", log

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.uri}/v2/{path}", timeout=10) as answer:
            return json.loads(answer.read() or b"null")


@contextlib.contextmanager
def serving(repositories: list[Path], folder: Path) -> Iterator[Triton]:
    """Starts a server of model repositories, and yields it when all models are ready."""
    installed = install(folder / "installed")
    server = Triton(free_port(), folder / "triton.log")
    libraries = [str(folder / "installed" / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    program = installed / "bin" / "tritonserver"
    program.chmod(0o755)
    with server.log.open("ab") as log:
        process = subprocess.Popen(
            [
                str(program),
                *(f"--model-repository={repository}" for repository in repositories),
                f"--backend-directory={_backends(installed, folder / 'backends')}",
                "--http-address=127.0.0.1",
                f"--http-port={server.uri.rpartition(':')[2]}",
                *("--allow-grpc=false", "--allow-metrics=false"),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": os.pathsep.join(libraries),
                # The server uses the first Python on the path, with the packages of its environment.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            },
        )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                server.get("health/ready")
                break
            assert process.poll() is None, server.log.read_text()
            time.sleep(0.1)
        else:
            raise AssertionError(f"the server did not become ready:\n{server.log.read_text()}")
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
