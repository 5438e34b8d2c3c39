"""Small exports that several test files share, and functions that change their files."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from optexport import export
from optexport.bundle import digest_json
from optexport.exporters import targets, torchscript
from optexport.report.result import Result
from optexport.signature.signature import Dim
from tests import sharing
from tests._helpers.models import randomise

# All files in the bundle of a block.
FILES = (
    "graph_after.txt",
    "graph_before.txt",
    "manifest.json",
    "measurements.json",
    "model.onnx",
    "model.pt2",
    "model.torchscript.pt",
    "reference.safetensors",
    "report.html",
)

# Files that may differ between two equal runs.
UNEQUAL = {"measurements.json", "report.html"}

DYNAMIC = {"x": {0: Dim("batch", 1, 32), 1: Dim("sequence", 2, 64)}, "mask": {0: "batch", 1: "sequence"}}

# Inputs of a block, as a config declares them.
INPUTS = """
[inputs.tensors.x]
shape = ["batch", "sequence", 8]
[inputs.tensors.mask]
shape = ["batch", "sequence"]
dtype = "int64"
low = 1
high = 2
[inputs.dynamic]
batch = [1, 16]
sequence = [2, 32]
"""


def without_scripting() -> Any:
    """Lets scripting fail within the block, so that TorchScript files are traced and have a fixed shape."""
    return mock.patch.object(torchscript, "make_scriptable", side_effect=RuntimeError("unknown operator"))


class Block(nn.Module):
    """A small attention block whose queries, keys and values can be merged."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(1, 2)

        scores = split(self.query(x)) @ split(self.key(x)).transpose(-1, -2) / 2.0
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e4)
        mixed = (scores.softmax(-1) @ split(self.value(x))).transpose(1, 2).reshape(x.shape)
        y = self.norm(x + self.out(mixed))
        return {"hidden": y + self.down(self.act(self.up(y))), "longest": mask.sum(1).argmax()}


def block() -> nn.Module:
    """Returns a new block, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(Block())


def batch(size: int = 2, sequence: int = 5) -> dict[str, torch.Tensor]:
    """Returns inputs of a block, with padding."""
    generator = torch.Generator().manual_seed(size)
    mask = torch.ones(size, sequence, dtype=torch.int64)
    mask[0, sequence - 1 :] = 0
    return {"x": torch.randn(size, sequence, 8, generator=generator), "mask": mask}


@functools.cache
def exported() -> Result:
    """Returns the bundle of a block in all formats. Tests share it and must not change it."""
    result: Result = sharing.make_once("block", lambda output: export(block(), batch(), output, dynamic=DYNAMIC))
    return result


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a sealed document and seals it again, as an attacker would."""
    document = json.loads(path.read_bytes())
    change(document)
    digest_json.write(path, {key: value for key, value in document.items() if key != "digest"})
    if path.name == "manifest.json":  # its digest is in the measurements
        digest = json.loads(path.read_bytes())["digest"]
        edit_json(path.with_name("measurements.json"), lambda measurements: measurements.update(manifest=digest))


def reseal(bundle: Path, *names: str) -> None:
    """Updates the manifest of a bundle to match files that were changed."""

    def change(document: dict[str, Any]) -> None:
        for record in document["files"]:
            if record["path"] in names:
                content = (bundle / record["path"]).read_bytes()
                record |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit_json(bundle / "manifest.json", change)


def rezip(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Rewrites a zip archive. ``change`` maps a part's name and content to new content, or to None to drop it."""
    written = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(zipfile.ZipInfo(info.filename), content)
    path.write_bytes(written.getvalue())


# Inputs of the smallest models in these tests.
X = torch.linspace(-2, 2, 12).reshape(3, 4)
BATCH = {"x": {0: "batch"}}


class Counting(nn.Module):
    """Returns another result in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def quick(model: nn.Module, inputs: Any, output: Path, **options: Any) -> Result:
    """Exports to the format that is fastest to write."""
    return export(model.eval(), inputs, output, **{"formats": ["pt2"], "transformations": [], **options})


def run(result: Result, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the outputs of the first file of a result, after checking that all files agree."""
    names = [output.name for output in result.manifest.outputs]
    results = [run(inputs) for name, path in result.files.items() for _, run in targets.open_file(path, name, names)]
    for first, second in itertools.pairwise(results):
        for name in names:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
    return results[0]
