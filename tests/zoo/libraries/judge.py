"""Judges a model of a library: exports it, and compares the files with eager PyTorch at other sizes and values."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

import optexport
from optexport.config.schema import Effort
from tests.zoo.libraries import catalogue
from tests.zoo.libraries.model import Model
from tests.zoo.stages import CRASH, DONE, FIXED, NOT_BUILT, REFUSED, WRONG, Announce, Outcome

# Largest difference from eager PyTorch, as a part of the output's largest value. Wrong results are off by a hundred
# times as much; the rounding of deep networks with random weights comes close to it.
TOLERANCE = 2e-3
FORMATS = ("onnx", "torchscript")
PEERS = ("onnx_dynamo", "onnx_legacy", "jit_trace")
Batch = Mapping[str, Any]
Run = Callable[[Batch], Sequence[np.ndarray]]


@dataclass
class Eager:
    """A model, its batches, and its outputs on each of them."""

    entry: Model
    module: nn.Module
    batches: Sequence[Batch]
    outputs: Sequence[Sequence[np.ndarray]]

    def difference(self, run: Run) -> str:
        """Returns how the results of a file differ first, or an empty string."""
        for sizes, batch, outputs in zip(self.entry.sizes, self.batches, self.outputs, strict=True):
            at = ", ".join(f"{name} {size}" for name, size in sizes.items())
            try:
                results = run(_copy(batch))
            except Exception as error:  # a runtime may raise anything
                return f"at {at}: {type(error).__name__}: {_last_line(error)}"
            if len(results) != len(outputs):
                return f"at {at}: {len(results)} outputs instead of {len(outputs)}"
            for index, (result, output) in enumerate(zip(results, outputs, strict=True)):
                if result.shape != output.shape:
                    return f"at {at}: output {index} has the shape {result.shape} instead of {output.shape}"
                distance = _distance(result, output)
                if not distance <= TOLERANCE:
                    return f"at {at}: output {index} is off by {distance:.2g} of its largest value"
        return ""


def judge(name: str, announce: Announce = lambda outcome, stage: None, effort: Effort = "standard") -> Outcome:
    """Exports a model with optexport and runs its ONNX and TorchScript files."""
    outcome = Outcome(name, announce=announce)
    eager = _prepare(outcome)
    if eager is None:
        return outcome
    with tempfile.TemporaryDirectory(prefix="optexport-zoo-") as folder:

        def export() -> optexport.Result:
            return optexport.export(
                eager.module,
                eager.batches[0],
                Path(folder, "bundle"),
                formats=FORMATS,
                dynamic=eager.entry.dynamic(),
                effort=effort,
            )

        result = outcome.run("exported", export)
        if result is None:
            if outcome.stages["exported"] == WRONG:  # its own check noticed, so no file was written
                outcome.stages["exported"] = REFUSED
            return outcome
        outcome.rules = {name: len(nodes) for name, nodes in result.transformed_nodes.items() if nodes}
        for artifact in result.manifest.artifacts:
            opener = _open_onnx if artifact.format == "onnx" else _open_script
            _compare(outcome, artifact.format, eager, functools.partial(opener, result.output / artifact.path))
            if outcome.stages[artifact.format] == WRONG and artifact.fixed_shape is not None:
                outcome.stages[artifact.format] = FIXED
                outcome.reasons[artifact.format] = str(artifact.fixed_shape)
    return outcome


def judge_peers(name: str, announce: Announce = lambda outcome, stage: None) -> Outcome:
    """Exports a model with both exporters of ``torch.onnx`` and with ``torch.jit.trace``, and runs their files.

    Each of them gets every axis that is declared dynamic, and a model whose outputs are a tuple of tensors.
    """
    outcome = Outcome(name, announce=announce)
    eager = _prepare(outcome)
    if eager is None:
        return outcome
    names = list(eager.entry.inputs)
    flat = _Flat(eager.module, names, eager.entry.constants).eval()
    example = tuple(_copy(eager.batches[0])[name] for name in names)
    dynamic = eager.entry.dynamic()
    with tempfile.TemporaryDirectory(prefix="optexport-zoo-") as folder:
        path = Path(folder, "model.onnx")

        def dynamo() -> Run:
            shapes = tuple(dict.fromkeys(dynamic[name], torch.export.Dim.AUTO) or None for name in names)
            torch.onnx.export(flat, example, path, input_names=names, dynamic_shapes=(shapes,), verbose=False)
            return _open_onnx(path)

        def legacy() -> Run:
            axes = {name: list(dims) for name, dims in dynamic.items()}
            torch.onnx.export(flat, example, path, dynamo=False, input_names=names, dynamic_axes=axes)
            return _open_onnx(path)

        def trace() -> Run:
            traced = torch.jit.trace(flat, example, strict=False, check_trace=False)
            return lambda batch: _arrays(traced(*(batch[name] for name in names)))

        for peer, write in zip(PEERS, (dynamo, legacy, trace), strict=True):
            path.unlink(missing_ok=True)
            _compare(outcome, peer, eager, write)
            if outcome.stages[peer] == CRASH:  # torch's exporters raise anything
                outcome.stages[peer] = REFUSED
    return outcome


class _Flat(nn.Module):
    """Calls a model with tensors in order and returns the tensors of its result."""

    def __init__(self, module: nn.Module, names: Sequence[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.names = list(names)
        self.constants = dict(constants)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors(self.module(**dict(zip(self.names, inputs, strict=True)), **self.constants)))


def _prepare(outcome: Outcome) -> Eager | None:
    entry = catalogue.models()[outcome.model_type]
    module = outcome.run("built", entry.build)
    if module is not None:
        outcome.cls = type(module).__name__
        batches = entry.batches()
        outcome.inputs = {name: list(t.shape) for name, t in batches[0].items() if isinstance(t, torch.Tensor)}
        outputs = outcome.run("eager", lambda: _run_eagerly(module, batches))
        if outputs is not None:
            return Eager(entry, module, batches, outputs)
    outcome.stages = {stage: DONE if result == DONE else NOT_BUILT for stage, result in outcome.stages.items()}
    return None


def _run_eagerly(module: nn.Module, batches: Sequence[Batch]) -> list[list[np.ndarray]]:
    with torch.no_grad():
        outputs = [_arrays(module(**_copy(batch))) for batch in batches]
        again = _arrays(module(**_copy(batches[0])))
    if not again or not all(np.isfinite(array).all() for arrays in outputs for array in arrays):
        raise ValueError("the outputs are not finite")
    if not all(map(np.array_equal, outputs[0], again)):
        raise ValueError("the outputs are random")
    return outputs


def _compare(outcome: Outcome, stage: str, eager: Eager, write: Callable[[], Run]) -> None:
    """Writes a file and runs it at all sizes."""
    difference = outcome.run(stage, lambda: eager.difference(write()))
    if difference:
        outcome.stages[stage] = WRONG
        outcome.reasons[stage] = difference[:600]


def _copy(batch: Batch) -> Batch:
    """Copies the tensors of a batch, because a model may write into its inputs."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _open_onnx(path: Path) -> Run:
    """Opens an ONNX file. It may lack inputs that are not used."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]

    def run(batch: Batch) -> list[np.ndarray]:
        return session.run(None, {key: batch[key].numpy() for key in inputs})

    return run


def _open_script(path: Path) -> Run:
    program = torch.jit.load(path)

    def run(batch: Batch) -> list[np.ndarray]:
        with torch.inference_mode():
            return _arrays(program(**{name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}))

    return run


def _arrays(value: Any) -> list[np.ndarray]:
    return [tensor.detach().numpy() for tensor in tensors(value)]


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a result in order, also of the classes of a library."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors(part)]


def _distance(result: np.ndarray, output: np.ndarray) -> float:
    """Returns the largest difference as a part of the largest value; of whole numbers, the part that differs."""
    if not output.size:
        return 0.0
    if output.dtype.kind in "biu":
        return float((result != output).mean())
    result, output = result.astype(np.complex128), output.astype(np.complex128)
    return float(np.abs(result - output).max() / max(1e-6, np.abs(output).max()))


def _last_line(error: BaseException) -> str:
    return " ".join(str(error).strip().splitlines()[-1:])[:300]
