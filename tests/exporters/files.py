"""Writes the tiny models in every format once, and compares the files with the models."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from optexport.exporters import graph_export, pt2, torchscript
from optexport.exporters.onnx import exporter as onnx_exporter
from optexport.pipeline.rules import load_preset
from optexport.runtime import runners
from optexport.signature.signature import Dim, Dynamic, Signature, flatten_outputs
from optexport.tracing.dynamo_exporter import one_pass
from optexport.tracing.trace import trace
from optexport.transformations.apply import transform
from tests._helpers import models

NAMES = ("albert", "bert", "llama", "resnet", "t5", "vit")

_PLACE = tempfile.TemporaryDirectory(prefix="optexport-formats-")

_TEXT = {0: Dim("batch", 1, 16), 1: Dim("sequence", 2, 40)}
_DECODER = {0: Dim("batch", 1, 16), 1: Dim("decoder_sequence", 2, 40)}
_DYNAMIC: Mapping[str, Dynamic] = {
    **{key: {"input_ids": _TEXT, "attention_mask": _TEXT} for key in ("albert", "bert", "llama")},
    "t5": {"input_ids": _TEXT, "attention_mask": _TEXT, "decoder_input_ids": _DECODER},
    "vit": {"pixel_values": {0: Dim("batch", 1, 16)}},
    "resnet": {"pixel_values": {0: Dim("batch", 1, 16), 2: Dim("height", 32, 128), 3: Dim("width", 32, 128)}},
}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model, its flat graph and its exported program, before any file is written."""

    model: nn.Module
    flat: fx.GraphModule
    signature: Signature
    example: dict[str, torch.Tensor]
    program: ExportedProgram


def prepare(
    model: nn.Module, example: dict[str, torch.Tensor], dynamic: Dynamic | None, *, rules: bool = False
) -> Prepared:
    traced = trace(model, example, dynamic)
    graph_module = transform(traced.graph_module, load_preset()).graph_module if rules else traced.graph_module
    flat = graph_export.flatten(graph_module, traced.signature)
    program = graph_export.to_program(flat, traced.signature, example)
    return Prepared(model, flat, traced.signature, example, program)


@functools.cache
def prepared(name: str) -> Prepared:
    """Returns a tiny model, transformed by the preset. Tests share it and must not change it."""
    return prepare(models.model(name), models.inputs(name, 2, 9), _DYNAMIC[name], rules=True)


def save_onnx(
    subject: Prepared,
    path: Path,
    *,
    example: dict[str, torch.Tensor] | None = None,
    opset: int | None = None,
    passes: Sequence[str] = (),
    **options: Any,
) -> None:
    model = onnx_exporter.convert(
        subject.flat,
        subject.signature,
        example or subject.example,
        onnx_exporter.choose_opset(subject.flat, passes, opset),
    )
    onnx_exporter.write(model, path, passes=passes, **options)


@functools.cache
def onnx_file(name: str) -> Path:
    subject = prepared(name)
    path = Path(_PLACE.name) / f"{name}.onnx"
    save_onnx(subject, path, metadata={"optexport.transformations": ["one", "two"]})
    return path


@functools.cache
def torchscript_file(name: str) -> Path:
    subject = prepared(name)
    path = Path(_PLACE.name) / f"{name}.torchscript.pt"
    assert torchscript.save(subject.program, subject.signature, subject.example, path) is None
    return path


@functools.cache
def pt2_file(name: str) -> Path:
    path = Path(_PLACE.name) / f"{name}.pt2"
    pt2.save(prepared(name).program, path)
    return path


def eager(subject: Prepared, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the outputs of the model itself, by output name."""
    with torch.no_grad(), one_pass(subject.model):
        outputs = flatten_outputs(subject.model(**{name: tensor.clone() for name, tensor in batch.items()}))
    return {name: value.detach() for name, value in zip(subject.signature.output_names, outputs.values(), strict=True)}


def assert_outputs(subject: Prepared, path: Path, *inputs: dict[str, torch.Tensor]) -> None:
    """Asserts that a file gives the outputs of the model, with and without optimization."""
    for optimized in (False, True):
        run = runners.open_onnx(path, subject.signature.output_names, optimized=optimized)
        for batch in inputs:
            want, got = eager(subject, batch), run(batch)
            for name, value in want.items():
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, equal_nan=True)


def assert_onnx(
    model: nn.Module,
    example: dict[str, torch.Tensor],
    dynamic: Dynamic | None,
    place: Path,
    *inputs: dict[str, torch.Tensor],
) -> None:
    """Writes an ONNX file into a folder and asserts that it gives the outputs of the model."""
    subject = prepare(model, example, dynamic)
    save_onnx(subject, place / "model.onnx")
    assert_outputs(subject, place / "model.onnx", *inputs)


def batches(name: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields batches of sizes that were never traced, with every kind of padding."""
    for size, sequence in ((1, 2), (1, 17), (5, 3), (3, 40)):
        if name == "resnet":
            height, width = max(32, 2 * sequence), 32 + size
            yield f"{size} x {height} x {width}", {"pixel_values": torch.randn(size, 3, height, width)}
            continue
        batch = models.inputs(name, size, sequence)
        yield f"{size} x {sequence}", batch
        if "attention_mask" not in batch or sequence != 40:
            continue
        for kind in ("none", "right", "left", "whole row"):
            mask = torch.ones_like(batch["attention_mask"])
            if kind == "right":
                mask[0, 5:] = 0
            if kind == "left":
                mask[1, : sequence - 3] = 0
            if kind == "whole row":
                mask[1] = 0
            yield f"{size} x {sequence}, padding: {kind}", {**batch, "attention_mask": mask}


def assert_agrees(name: str, run: runners.Run, tolerance: float) -> None:
    """Asserts that a file gives the outputs of the model for all batches."""
    subject = prepared(name)
    for title, batch in batches(name):
        want, got = eager(subject, batch), run(batch)
        assert list(got) == list(want)
        for output, value in want.items():
            assert got[output].dtype == value.dtype, title
            distance = float((got[output] - value).abs().max())
            assert distance <= tolerance * float(value.abs().max()), (title, output, distance)


def run_without_transformers(
    path: Path, inputs: Mapping[str, torch.Tensor], load: str, place: Path
) -> list[torch.Tensor]:
    """Loads a file with one line of Python and runs it, in a process without transformers."""
    np.savez(place / "in.npz", **{name: tensor.numpy() for name, tensor in inputs.items()})
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["transformers"] = sys.modules["optexport"] = None
import numpy as np, torch
path, place = sys.argv[1:]
module = {load}
inputs = {{name: torch.from_numpy(value) for name, value in np.load(place + "/in.npz").items()}}
with torch.no_grad():
    outputs = module(**inputs)
assert type(outputs) is tuple, type(outputs)
np.savez(place + "/out.npz", *[tensor.numpy() for tensor in outputs])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(place)], capture_output=True, text=True, check=False, cwd=place
    )
    assert done.returncode == 0, done.stderr
    with np.load(place / "out.npz") as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]
