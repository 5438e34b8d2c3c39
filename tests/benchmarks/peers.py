"""Other exporters, used as their documentation describes.

    python -m tests.benchmarks.peers PEER MODEL FOLDER

writes a model with a peer in this environment; `peer_turns.py` runs it in a separate process for each peer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.benchmarks.models import RACERS, Racer

# Three times longer than any peer took here.
_SECONDS = 900


class Failed(Exception):  # noqa: N818 - no error of ours, but what a peer came to
    """A peer wrote no file; the message gives the reason."""


@dataclass(frozen=True)
class Peer:
    """Another exporter.

    Attributes:
        format: Format of its file.
        environment: Name of its environment and the packages there; empty if it uses this environment.
        write: Writes a model's file in this process; None if a command does.
        command: Returns a command of its environment, for a model's folder, its task and an output path.
    """

    format: str
    environment: str = ""
    packages: tuple[str, ...] = ()
    write: Callable[[Racer, nn.Module, Path], None] | None = None
    command: Callable[[Path, str, Path], list[str]] | None = None

    def make(self, name: str, model: str, source: Path | None, environments: Path, folder: Path) -> Path:
        """Writes its file of a model, unless the file exists.

        Args:
            name: Name of the peer.
            source: Folder of the model, or None.
            environments: Folder of environments.

        Raises:
            Failed: It failed; the message is the last line of its output.
        """
        suffix = {"onnx": ".onnx", "torchscript": ".pt"}[self.format]
        if not _files(folder, suffix):
            folder.mkdir(parents=True, exist_ok=True)
            task = RACERS[model].task
            if self.write is not None:
                command = [sys.executable, "-m", "tests.benchmarks.peers", name, model, str(folder)]
            elif source is None or task is None:
                raise Failed("it takes models of transformers only")
            else:
                assert self.command is not None
                program, *arguments = self.command(source, task, folder)
                command = [str(environments / self.environment / "bin" / program), *arguments]
            where = None if self.write is not None else folder  # some leave caches in the working directory
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=where)
            if not _files(folder, suffix):
                words = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
                raise Failed(words[-1] if words else f"exit code {done.returncode}")
        files = _files(folder, suffix)
        if len(files) != 1:
            raise Failed(f"it wrote {', '.join(path.name for path in files)}")
        return files[0]

    def install(self, environments: Path) -> None:
        """Creates its environment, unless that exists."""
        place = environments / self.environment
        if not self.environment or (place / "complete").exists():
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        # torch is installed first and alone, so that pip keeps the build that runs here.
        version = torch.__version__.partition("+")[0]
        for packages in ([f"torch=={version}"], [f"torch=={version}", *self.packages]):
            subprocess.run([place / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (place / "complete").touch()


def _files(folder: Path, suffix: str) -> list[Path]:
    """Returns the written models, except those in hidden caches; only the encoder of an encoder and its decoder."""
    written = (path.relative_to(folder) for path in folder.rglob(f"*{suffix}"))
    files = sorted(folder / path for path in written if not any(part.startswith(".") for part in path.parts))
    encoders = [path for path in files if path.stem == "encoder_model"]
    return encoders or files


def _transformers(fusions: str | None) -> Callable[[Racer, nn.Module, Path], None]:
    def write(racer: Racer, model: nn.Module, path: Path) -> None:
        from transformers.exporters import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()
        config = OnnxConfig(dynamic=True, ort_fusions=fusions)  # type: ignore[arg-type]
        exporter.save_program(exporter.export(model, racer.inputs(traced_shape(racer)), config).program, path)  # type: ignore[arg-type]

    return write


def export_with_torch(racer: Racer, model: nn.Module, path: Path) -> None:
    inputs = racer.inputs(traced_shape(racer))
    axes = {"text": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}.get(racer.kind, {0: torch.export.Dim.AUTO})
    shapes = dict.fromkeys(inputs, axes)
    torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)


def _jit_trace(racer: Racer, model: nn.Module, path: Path) -> None:
    traced = torch.jit.trace(model, example_kwarg_inputs=racer.inputs(traced_shape(racer)), strict=False)
    torch.jit.save(torch.jit.freeze(traced), path)


def traced_shape(racer: Racer) -> tuple[int, ...]:
    """Returns a shape whose sizes are all dynamic to torch.export, which fixes 0 and 1."""
    return (4, 17) if racer.kind == "text" else (2,)


def _optimum(*options: str) -> Callable[[Path, str, Path], list[str]]:
    def command(source: Path, task: str, folder: Path) -> list[str]:
        return ["optimum-cli", "export", "onnx", "--model", str(source), "--task", task, *options, str(folder)]

    return command


def _olive(source: Path, task: str, folder: Path) -> list[str]:
    options = ["--precision", "fp32", "--provider", "CPUExecutionProvider", "--exporter", "dynamo_exporter"]
    return ["olive", "optimize", "-m", str(source), "-t", task, *options, "-o", str(folder), "--disable_telemetry"]


_OPTIMUM = ("optimum-onnx", ("optimum-onnx[onnxruntime]==0.1.0",))
# olive imports requests without declaring it.
_OLIVE = ("olive", ("olive-ai==0.13.0", "requests", "transformers==5.23.0", "onnxruntime", "onnxscript"))

PEERS: Mapping[str, Peer] = {
    "transformers": Peer("onnx", write=_transformers(None)),
    "transformers-ort-fusions": Peer("onnx", write=_transformers("cpu")),
    "torch.onnx": Peer("onnx", write=export_with_torch),
    "optimum-onnx": Peer("onnx", *_OPTIMUM, command=_optimum()),
    "optimum-onnx-O2": Peer("onnx", *_OPTIMUM, command=_optimum("--optimize", "O2")),
    "optimum-onnx-O3": Peer("onnx", *_OPTIMUM, command=_optimum("--optimize", "O3")),
    "olive": Peer("onnx", *_OLIVE, command=_olive),
    "jit.trace-freeze": Peer("torchscript", write=_jit_trace),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=[name for name, peer in PEERS.items() if peer.write is not None])
    parser.add_argument("model", choices=RACERS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    peer, racer = PEERS[arguments.peer], RACERS[arguments.model]
    assert peer.write is not None
    with torch.no_grad():
        peer.write(racer, racer.load(), arguments.folder / ("model.onnx" if peer.format == "onnx" else "model.pt"))


if __name__ == "__main__":
    main()
