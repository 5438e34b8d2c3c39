"""The Triton layout: writes the files as a model repository of Triton Inference Server.

Files are moved, not copied, so each is stored, hashed and uploaded once. The manifest has their paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from optexport.bundle.manifest import ArtifactRecord
from optexport.errors import ExportError
from optexport.parity.reference import HALVES, Reference
from optexport.signature.signature import Batch, Signature, TensorSpec, as_argument

# Not "triton": Python would import a folder of that name as a package, and torch would take it for the real one.
FOLDER = "model_repository"
_LARGEST_BATCH = 2**31 - 1
# This precision has one scale for all rows of a batch, so a row's result depends on the other rows.
_SCALED_BY_BATCH = "int8"

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}


@dataclass(frozen=True)
class _Backend:
    """Triton's backend for a format: its name, platform, file name, and supported dtypes.

    ``bare`` is True if it supports tensors without axes, and models without inputs.
    """

    name: str
    platform: str
    filename: str
    types: Mapping[str, str]
    bare: bool


_BACKENDS = {
    "onnx": _Backend(
        "onnxruntime",
        "onnxruntime_onnx",
        "model.onnx",
        {
            **_TYPES,
            "uint16": "TYPE_UINT16",
            "uint32": "TYPE_UINT32",
            "uint64": "TYPE_UINT64",
            "bfloat16": "TYPE_BF16",
        },
        bare=True,
    ),
    "torchscript": _Backend("pytorch", "pytorch_libtorch", "model.pt", _TYPES, bare=False),
}


def check(signature: Signature, formats: Collection[str]) -> None:
    """Checks that Triton supports the inputs and outputs of the files.

    Raises:
        ExportError: A dtype or shape is not supported, or the model has no inputs.
    """
    for file_format in [name for name in _BACKENDS if name in formats]:
        backend = _BACKENDS[file_format]
        problems = {spec.name: _find_problem(spec, backend) for spec in (*signature.inputs, *signature.outputs)}
        if not signature.inputs and not backend.bare:
            problems = {"inputs": f"Triton's {backend.name} backend does not serve models without inputs"}
        for name, problem in problems.items():
            if problem is not None:
                raise ExportError(
                    problem,
                    location=f"export.layout: {name}",
                    hint=f'Remove "{file_format}" from export.formats, or remove export.layout.',
                )


def _find_problem(spec: TensorSpec, backend: _Backend) -> str | None:
    """Returns why a backend does not support a tensor, or None."""
    if spec.dtype not in backend.types:
        return f"Triton's {backend.name} backend does not support {spec.dtype}"
    if not spec.shape and not backend.bare:
        return f"Triton's {backend.name} backend does not support tensors without axes"
    return "Triton does not support axes of size 0" if 0 in spec.shape else None


def lay_out(
    draft: Path, output: str, artifacts: Sequence[ArtifactRecord], signature: Signature, reference: Reference
) -> list[ArtifactRecord]:
    """Moves the files that Triton serves into a model repository, each with its configuration.

    Args:
        draft: The bundle's folder.
        output: The folder's name in the config; the last part is the prefix of the models' names.

    Returns:
        Records of all files, with the new paths. Other files are not moved.
    """
    title = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(output).name).lstrip(".") or "model"
    moved = []
    for artifact in artifacts:
        backend = _BACKENDS.get(artifact.format)
        if backend is not None:
            name = f"{title}_{artifact.format}"
            path = PurePosixPath(FOLDER, name, "1", backend.filename)
            (draft / path).parent.mkdir(parents=True)
            (draft / artifact.path).rename(draft / path)
            data = draft / f"{artifact.path}.data"
            if data.exists():  # ONNX looks for external data in the folder of the model
                data.rename(draft / f"{path}.data")
            text = _configuration(name, backend, artifact, signature, reference)
            (draft / FOLDER / name / "config.pbtxt").write_text(text, encoding="utf-8")
            artifact = artifact.model_copy(update={"path": path.as_posix()})
        moved.append(artifact)
    return moved


def _configuration(
    name: str, backend: _Backend, artifact: ArtifactRecord, signature: Signature, reference: Reference
) -> str:
    """Returns the text of a model's ``config.pbtxt``."""
    if artifact.fixed_shape is not None:
        signature = signature.at(reference.cases[0].batch)
    rows = _max_batch_size(signature, reference)
    precision = None if artifact.precision is None else artifact.precision.precision
    is_verified = HALVES in reference.variations and precision != _SCALED_BY_BATCH  # the rows are independent
    are_independent = rows > 1 and is_verified and _rows_differ(reference.cases[0].batch)
    inputs, outputs = signature.inputs, signature.outputs
    if artifact.format == "torchscript":  # TorchScript names the arguments of forward, but no outputs
        inputs = tuple(TensorSpec(as_argument(spec.name), spec.dtype, spec.shape) for spec in inputs)
        outputs = tuple(TensorSpec(f"OUTPUT__{i}", spec.dtype, spec.shape) for i, spec in enumerate(outputs))
    lines = [
        f"name: {_quoted(name)}",
        f"backend: {_quoted(backend.name)}",
        f"platform: {_quoted(backend.platform)}",
        f"default_model_filename: {_quoted(backend.filename)}",
        f"max_batch_size: {rows}",
        *(["dynamic_batching { }"] if are_independent else []),
        "instance_group [ { kind: KIND_CPU } ]",  # the device of the parity check
        *(line for spec in inputs for line in _tensor("input", spec, backend, batched=rows > 0)),
        *(line for spec in outputs for line in _tensor("output", spec, backend, batched=rows > 0)),
    ]
    return "\n".join(lines) + "\n"


def _max_batch_size(signature: Signature, reference: Reference) -> int:
    """Returns the largest batch size for Triton; 0 if the first axes are not one batch axis.

    A batch without a maximum is limited to the largest checked size.
    """
    specs = (*signature.inputs, *signature.outputs)
    firsts = {spec.shape[0] if spec.shape else None for spec in specs}
    other_axes = {name for spec in specs for size in spec.shape[1:] for name in re.findall(r"\w+", str(size))}
    batch = signature.dims.get(str(firsts.pop())) if len(firsts) == 1 else None
    if batch is None or batch.name in other_axes:
        return 0
    if batch.max is not None:
        return min(batch.max, _LARGEST_BATCH)
    name = signature.inputs[0].name
    return max(case.batch[name].shape[0] for case in reference.cases)


def _rows_differ(batch: Batch) -> bool:
    """Returns True if all rows of a batch differ, also in each floating point input alone.

    Only then does comparing halves of a batch show that rows are independent: the mean of equal rows is also the mean
    of each half.
    """
    rows = [tensor.reshape(len(tensor), -1).double() for tensor in batch.values()]
    real = [values for values, tensor in zip(rows, batch.values(), strict=True) if tensor.is_floating_point()]
    return all(len(values.unique(dim=0)) == len(values) for values in (torch.cat(rows, dim=1), *real))


def _tensor(kind: str, spec: TensorSpec, backend: _Backend, *, batched: bool) -> Iterator[str]:
    """Yields the lines of an input or output. ``dims`` omits the batch, and may not be empty."""
    sizes = [size if isinstance(size, int) else -1 for size in spec.shape[1 if batched else 0 :]]
    yield f"{kind} {{"
    yield f"  name: {_quoted(spec.name)}"
    yield f"  data_type: {backend.types[spec.dtype]}"
    yield f"  dims: [ {', '.join(map(str, sizes or [1]))} ]"
    if batched and not sizes:
        yield "  reshape { shape: [ ] }"
    yield "}"


def _quoted(text: str) -> str:
    """Returns a string literal of protobuf's text format, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)
