"""Small models of several families, and their files with and without a format pass."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from torch import nn

from optexport.exporters import pt2, targets, torchscript
from optexport.exporters.flat_graph import FlatGraph
from optexport.exporters.onnx import exporter as onnx_exporter
from optexport.exporters.registry import get_format
from optexport.signature.signature import Dim
from tests._helpers.exports import Block
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files

AXES = {0: Dim("batch", 0, 16), 1: Dim("sequence", 2, 40)}
X = torch.linspace(-2, 2, 60).reshape(3, 5, 4)

_PLACE = tempfile.TemporaryDirectory(prefix="optexport-passes-")


class Mlp(nn.Module):
    """Linear layers with several activations, applied to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Masked(nn.Module):
    """An attention block with a bias of -inf. Its padding rows attend to no key."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.block.query(x)[:, None]
        attended = nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None, None, :] > 0)[:, 0]
        y = self.block.norm(x + self.block.out(attended))
        return y + self.block.down(self.block.act(self.block.up(y)))


@functools.cache
def prepared(name: str) -> files.Prepared:
    """Returns a small model of a family. Tests share it and must not change it."""
    if name == "mlp":
        return files.prepare(randomise(Mlp()), {"x": X[0]}, {"x": {0: Dim("batch", 1, 32)}})
    if name == "masked":
        example = {"x": X, "mask": torch.ones(3, 5)}
        return files.prepare(randomise(Masked()), example, {"x": AXES, "mask": AXES})
    return files.prepared(name)


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Returns inputs of sizes that were never traced."""
    if name == "mlp":
        return [{"x": torch.randn(rows, 4)} for rows in (1, 2, 17)]
    if name == "masked":
        mask = torch.ones(4, 7)
        mask[1], mask[2, 3:], mask[3, :5] = 0, 0, 0
        return [{"x": torch.randn(1, 9, 4), "mask": torch.ones(1, 9)}, {"x": torch.randn(4, 7, 4), "mask": mask}]
    return [batch for _, batch in files.batches(name)]


@functools.cache
def _converted(subject: files.Prepared, opset: int | None) -> onnx_ir.Model:
    """Converts a graph to ONNX without format passes, once for each object."""
    return onnx_exporter.convert(subject.flat, subject.signature, subject.example, opset)


def save(subject: files.Prepared, file_format: str, folder: Path, names: Sequence[str] = ()) -> Path:
    """Writes a file with format passes. The file name is constant, because TorchScript stores it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"model{get_format(file_format).suffix}"
    match file_format:
        case "onnx":
            onnx_exporter.write(
                _converted(subject, onnx_exporter.choose_opset(subject.flat, names, None)), path, passes=names
            )
        case "torchscript":
            assert torchscript.save(subject.program, subject.signature, subject.example, path, passes=names) is None
        case "pt2":
            pt2.save(subject.program, path, passes=names)
        case _:
            graph = FlatGraph(subject.flat, subject.signature, subject.example, "", ())
            get_format(file_format).write(graph, path, names)
    return path


@functools.cache
def plain_file(model: str, file_format: str) -> Path:
    return save(prepared(model), file_format, Path(_PLACE.name) / model)


def assert_files_agree(
    path: Path, plain_path: Path, file_format: str, subject: files.Prepared, inputs: Sequence[Any]
) -> None:
    """Asserts that two files agree to a few units in the last place of the largest number."""
    names = subject.signature.output_names
    pairs = zip(*(targets.open_file(p, file_format, names) for p in (path, plain_path)), strict=True)
    for (_, run), (_, plain) in pairs:
        for batch in inputs:
            got, want = run(batch), plain(batch)
            for name, value in want.items():
                assert got[name].dtype == value.dtype
                assert got[name].shape == value.shape
                tolerance = 64 * torch.finfo(torch.float32).eps * float(value.abs().max() if value.numel() else 0)
                torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, equal_nan=True)


def write_both(subject: files.Prepared, file_format: str, name: str, place: Path) -> tuple[Path, Path]:
    """Returns the file without a format pass, and with it."""
    plain = save(subject, file_format, place / "plain")
    return plain, save(subject, file_format, place / "lowered", (name,))


def program(body: Any, **children: Any) -> files.Prepared:
    return files.prepare(randomise(Program(body, **children)), {"x": X}, {"x": AXES})
