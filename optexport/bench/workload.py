"""What artifacts are measured on: inputs of the asked sizes, in files that every worker can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport.bench.artifact import Artifact, read_onnx
from optexport.bundle.manifest import Manifest
from optexport.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from optexport.signature.signature import Signature

Sizes = Mapping[str, int]

# Of an ONNX file's axes, where nobody said what sizes they have.
_FIRST_AXIS = 1
_OTHER_AXES = 128
# The dtypes of safetensors that NumPy has, in which an ONNX file is given its inputs.
_IN_NUMPY = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "F32", "F64")


@dataclass(frozen=True)
class Workload:
    """Inputs of one shape.

    Attributes:
        sizes: Of the dynamic dimensions.
        rows: How many rows one call computes.
        file: A safetensors file of the inputs, by name.
        traced: Whether the sizes are those that the model was traced at, as far as is known.
    """

    sizes: Sizes
    rows: int
    file: Path
    traced: bool = False

    @property
    def label(self) -> str:
        """The sizes in words: ``batch=8,sequence=128``."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items()) or "as given"

    def names(self) -> list[str]:
        """Those of the inputs."""
        from safetensors import safe_open

        with safe_open(self.file, framework="numpy") as tensors:
            return list(tensors.keys())


def from_signature(
    batch: Mapping[str, torch.Tensor], signature: Signature, shapes: Sequence[Sizes], folder: Path, location: str
) -> list[Workload]:
    """A model's own inputs at other sizes; a size that is not asked for stays that of the batch.

    Args:
        batch: Inputs at the traced sizes.
        folder: Where to write them.
        location: Where the sizes were asked for.

    Raises:
        ConfigError: No input has such a dimension, or it does not take that size.
    """
    from safetensors.torch import save_file

    from optexport.signature.resizing import resize

    found: list[Workload] = []
    given = signature.sizes(batch)
    for index, asked in enumerate(shapes or [{}]):
        _check_names(asked, list(given), f"{location}[{index}]")
        for name, size in asked.items():
            dim = signature.dims[name]
            if size < dim.min or (dim.max is not None and size > dim.max):
                raise ConfigError(
                    f"{name} may be {dim.min} to {dim.max or 'any'}, not {size}", location=f"{location}[{index}]"
                )
        sizes = {**given, **asked}
        _check_new(sizes, found, f"{location}[{index}]")
        resized = resize(batch, signature, sizes)
        file = folder / f"{index}.safetensors"
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in resized.items()}, file)
        shown = {name: list(tensor.shape) for name, tensor in resized.items()}
        found.append(Workload(sizes, _rows(sizes, shown), file, traced=sizes == given))
    return found


def from_bundle(
    bundle: Path, manifest: Manifest, given: Path | None, shapes: Sequence[Sizes], folder: Path
) -> list[Workload]:
    """The stored inputs of a bundle, or others of the same names, at the asked sizes.

    Raises:
        ConfigError: As for `from_signature`, or the other inputs do not fit the bundle.
        BundleError: The stored ones are damaged.
    """
    from optexport.bundle.contents import read_traced_inputs
    from optexport.bundle.layout import REFERENCE
    from optexport.signature.signature import Dim, Signature, TensorSpec

    batch = read_traced_inputs(bundle / REFERENCE, [spec.name for spec in manifest.inputs])
    specs = tuple(TensorSpec(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.inputs)
    dims = {name: Dim(name, dim.min, dim.max) for name, dim in manifest.dims.items()}
    if given is not None:
        from safetensors.torch import load_file

        others = _read(given, load_file)
        for spec in specs:
            if spec.name not in others or others[spec.name].dim() != len(spec.shape):
                shape = f"[{', '.join(map(str, spec.shape))}]"
                raise ConfigError(f"the bundle takes {spec.name} {shape}, which it lacks", location=f"--inputs {given}")
        batch = {spec.name: others[spec.name] for spec in specs}
    signature = Signature(specs, (), dims)
    for name, size in signature.sizes(batch).items():
        dim = dims[name]
        if size < dim.min or (dim.max is not None and size > dim.max):
            raise ConfigError(
                f"{name} may be {dim.min} to {dim.max or 'any'}, not {size}", location=f"--inputs {given}"
            )
    return from_signature(batch, signature, shapes, folder, "--shape")


def from_file(given: Path, shapes: Sequence[Sizes], artifacts: Sequence[Artifact]) -> list[Workload]:
    """Inputs as they stand in a safetensors file.

    Args:
        artifacts: What they are for.

    Raises:
        ConfigError: It cannot be read, holds what an ONNX file cannot be given, or sizes are asked for.
    """
    if shapes:
        raise ConfigError(
            "which axes these sizes are of is known of bundles, and of ONNX files without --inputs",
            location="--shape",
            hint="Leave it out, and give inputs of that size.",
        )
    kinds: dict[str, str] = {}
    shown: dict[str, list[int]] = {}
    for name, tensor in _read(given, _slices).items():
        kinds[name], shown[name] = tensor.get_dtype(), tensor.get_shape()
    for artifact in (artifact for artifact in artifacts if artifact.format == "onnx"):
        for name in (name for name, kind in kinds.items() if kind not in _IN_NUMPY):
            raise ConfigError(
                f"{name} is of {kinds[name]}, which {artifact.name} cannot be given: NumPy has no such numbers",
                location=f"--inputs {given}",
                hint="Measure files of PyTorch with it, or give it in float32.",
            )
    return [Workload({}, _rows({}, shown), given)]


def _slices(path: Path) -> dict[str, Any]:
    """What the head of a safetensors file says of each tensor."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def from_onnx(artifact: Artifact, shapes: Sequence[Sizes], folder: Path) -> tuple[list[Workload], list[str]]:
    """Random inputs for an ONNX file, of the names, dtypes and shapes that it says it takes.

    Returns:
        The workloads, and what had to be taken for granted.

    Raises:
        ConfigError: A size is of none of its axes, or an input is of a kind that cannot be made up.
        BenchError: It cannot be read.
    """
    import numpy as np
    from safetensors.numpy import save_file

    specs = _onnx_inputs(artifact)
    names = {size: axis for _, shape in specs.values() for axis, size in enumerate(shape) if isinstance(size, str)}
    defaults = {name: _FIRST_AXIS if axis == 0 else _OTHER_AXES for name, axis in names.items()}
    found: list[Workload] = []
    for index, asked in enumerate(shapes or [{}]):
        _check_names(asked, list(names), f"--shape[{index}]")
        sizes = {**defaults, **asked}
        _check_new(sizes, found, f"--shape[{index}]")
        generator = np.random.default_rng(0)
        arrays = {}
        for name, (dtype, shape) in specs.items():
            made = [sizes[size] if isinstance(size, str) else size for size in shape]
            is_float = np.issubdtype(dtype, np.floating)
            values = generator.standard_normal(made) if is_float else generator.integers(2, size=made)
            arrays[name] = np.asarray(values).astype(dtype)
        file = folder / f"{index}.safetensors"
        save_file(arrays, file)
        found.append(Workload(sizes, _rows(sizes, {name: list(array.shape) for name, array in arrays.items()}), file))
    assumed = sorted({name for name in names for asked in shapes or [{}] if name not in asked})
    notes = [f"{artifact.name}: nobody said what {', '.join(f'{n} is: {defaults[n]}' for n in assumed)}"] * bool(
        assumed
    )
    whole = [name for name, (dtype, _) in specs.items() if not np.issubdtype(dtype, np.floating)]
    if whole:
        notes.append(f"{artifact.name}: {', '.join(whole)} are 0 and 1 at random, since nothing is known of them")
    return found, notes


def _onnx_inputs(artifact: Artifact) -> dict[str, tuple[Any, list[int | str]]]:
    """Dtype and shape of each input; an axis of any size is its name."""
    import onnx

    graph = read_onnx(artifact.path).graph
    weights = {tensor.name for tensor in graph.initializer}
    specs: dict[str, tuple[Any, list[int | str]]] = {}
    for value in graph.input:
        if value.name in weights:
            continue
        tensor = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else None
        if dtype is None or dtype.kind not in "fiub":
            raise ConfigError(
                f"its input {value.name} is no tensor of numbers that could be made up",
                location=artifact.name,
                hint="Give --inputs FILE.safetensors.",
            )
        axes = [
            axis.dim_value if axis.HasField("dim_value") else axis.dim_param or f"{value.name}_{index}"
            for index, axis in enumerate(tensor.shape.dim)
        ]
        specs[value.name] = (dtype, axes)
    return specs


def _read(path: Path, load: Any) -> dict[str, Any]:
    from safetensors import SafetensorError

    if not path.is_file():  # a pipe would be waited for
        raise ConfigError("it is no file", location=f"--inputs {path}")
    try:
        return dict(load(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"it cannot be read: {error}", location=f"--inputs {path}") from error


def _check_names(asked: Sizes, known: Sequence[str], location: str) -> None:
    for name in asked:
        if name not in known:
            raise ConfigError(f"no input has a dimension {name}", location=location, hint=did_you_mean(name, known))


def _check_new(sizes: Sizes, found: Sequence[Workload], location: str) -> None:
    if any(workload.sizes == sizes for workload in found):
        raise ConfigError("these sizes are asked for twice", location=location, hint="Leave one out.")


def _rows(sizes: Sizes, shapes: Mapping[str, Sequence[int]]) -> int:
    """How many rows a batch has: the size called batch, or else that of all inputs' first axes."""
    if "batch" in sizes:
        return sizes["batch"]
    firsts = {shape[0] for shape in shapes.values() if shape}
    return firsts.pop() if len(firsts) == 1 else 1
