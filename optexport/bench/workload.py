"""Makes the inputs that artifacts are measured on, as files that every worker can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport.bench.artifact import Artifact
from optexport.bundle.manifest import Manifest
from optexport.errors import ConfigError, did_you_mean
from optexport.exporters.onnx.format import read_onnx

if TYPE_CHECKING:
    import torch

    from optexport.signature.signature import Dim, Signature

Sizes = Mapping[str, int]

# Default sizes of the dynamic axes of an ONNX file.
_FIRST_AXIS = 1
_OTHER_AXES = 128
# Small and large inputs have about this many times fewer and more elements than the traced ones.
_TIMES = 8
# The dtypes of safetensors that NumPy has, and so ONNX Runtime can receive.
_IN_NUMPY = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "F32", "F64")


@dataclass(frozen=True)
class Workload:
    """Inputs of one shape.

    Attributes:
        sizes: Sizes of the dynamic axes.
        rows: Rows that one call computes.
        file: A safetensors file of the inputs by name.
        traced: True if these are the sizes that the model was traced at.
    """

    sizes: Sizes
    rows: int
    file: Path
    traced: bool = False

    @property
    def label(self) -> str:
        """The sizes in words, such as ``batch=8,sequence=128``."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items()) or "as given"

    def names(self) -> list[str]:
        """Names of the inputs."""
        from safetensors import safe_open

        with safe_open(self.file, framework="numpy") as tensors:
            return list(tensors.keys())


def from_signature(
    batch: Mapping[str, torch.Tensor], signature: Signature, shapes: Sequence[Sizes], folder: Path, location: str
) -> list[Workload]:
    """Returns a model's own inputs at other sizes.

    Args:
        batch: Inputs at the traced sizes.
        signature: The model's signature.
        shapes: Sizes of dynamic axes, for each workload.
        folder: Folder to write the inputs to.
        location: Key or option of the shapes, for errors.

    Raises:
        ConfigError: No input has the axis, or the size is outside of its range.
    """
    from safetensors.torch import save_file

    from optexport.signature.resizing import resize

    workloads: list[Workload] = []
    traced_sizes = signature.sizes(batch)
    for index, (shape, shape_location) in enumerate(_located(shapes, location)):
        _check_names(shape, list(traced_sizes), shape_location)
        for name, size in shape.items():
            _check_range(name, size, signature.dims[name], shape_location)
        sizes = {**traced_sizes, **shape}
        _check_unique(sizes, workloads, shape_location)
        resized = resize(batch, signature, sizes)
        file = folder / f"{index}.safetensors"
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in resized.items()}, file)
        tensor_shapes = {name: list(tensor.shape) for name, tensor in resized.items()}
        workloads.append(Workload(sizes, _count_rows(sizes, tensor_shapes), file, traced=sizes == traced_sizes))
    return workloads


def other_sizes(traced: Sizes, dims: Mapping[str, Dim]) -> list[Sizes]:
    """Returns small and large sizes within the allowed ranges, without those that equal the traced ones.

    Args:
        traced: Sizes of the dynamic axes that the model was traced at.
        dims: Their ranges.
    """
    factor = _TIMES ** (1 / max(1, len(traced)))
    small = {name: dims[name].fit(max(1, round(size / factor))) for name, size in traced.items()}
    large = {name: dims[name].fit(round(size * factor)) for name, size in traced.items()}
    return [sizes for sizes in (small, large) if sizes != traced]


def from_bundle(
    bundle: Path, manifest: Manifest, inputs: Path | None, shapes: Sequence[Sizes], folder: Path
) -> list[Workload]:
    """Returns the stored inputs of a bundle, or the inputs in a file, at the given sizes.

    Raises:
        ConfigError: As for `from_signature`, or the inputs of the file do not fit the bundle.
        BundleError: The stored inputs are damaged.
    """
    from optexport.bundle.contents import read_traced_inputs
    from optexport.bundle.layout import REFERENCE
    from optexport.signature.index_values import IndexValues
    from optexport.signature.signature import Dim, Signature, TensorSpec

    batch = read_traced_inputs(bundle / REFERENCE, [spec.name for spec in manifest.inputs])
    specs = tuple(TensorSpec(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.inputs)
    dims = {name: Dim(name, dim.min, dim.max, dim.multiple_of) for name, dim in manifest.dims.items()}
    if inputs is not None:
        from safetensors.torch import load_file

        tensors = _read(inputs, load_file)
        for spec in specs:
            if spec.name not in tensors or tensors[spec.name].dim() != len(spec.shape):
                shape = f"[{', '.join(map(str, spec.shape))}]"
                raise ConfigError(
                    f"the file has no tensor {spec.name} of shape {shape}, which the bundle takes as an input",
                    location=f"`inputs={inputs}`",
                )
        batch = {spec.name: tensors[spec.name] for spec in specs}
    indexes = {
        name: IndexValues(tuple(values.indexes), values.low, values.high, values.adds_up)
        for name, values in manifest.values.items()
    }
    signature = Signature(specs, (), dims, indexes)
    for name, size in signature.sizes(batch).items():
        _check_range(name, size, dims[name], f"`inputs={inputs}`")
    return from_signature(batch, signature, shapes, folder, "`shapes`")


def from_file(inputs: Path, shapes: Sequence[Sizes], artifacts: Sequence[Artifact]) -> list[Workload]:
    """Returns the inputs in a safetensors file.

    Args:
        inputs: The file.
        shapes: Must be empty, because the axes of the inputs are unknown.
        artifacts: Files to measure.

    Raises:
        ConfigError: The file cannot be read, has a dtype that ONNX Runtime cannot receive, or there are shapes.
    """
    if shapes:
        raise ConfigError(
            "sizes can only be chosen for a bundle, or for an ONNX file with random inputs",
            location="`shapes`",
            hint="Remove `shapes`, and give inputs of that size.",
        )
    dtypes: dict[str, str] = {}
    tensor_shapes: dict[str, list[int]] = {}
    for name, tensor in _read(inputs, _read_slices).items():
        dtypes[name], tensor_shapes[name] = tensor.get_dtype(), tensor.get_shape()
    for artifact in (artifact for artifact in artifacts if artifact.format == "onnx"):
        for name in (name for name, dtype in dtypes.items() if dtype not in _IN_NUMPY):
            raise ConfigError(
                f"{artifact.name} cannot receive {name}: NumPy has no dtype {dtypes[name]}",
                location=f"`inputs={inputs}`",
                hint=f"Measure only TorchScript and .pt2 files with these inputs, or store {name} as F32.",
            )
    return [Workload({}, _count_rows({}, tensor_shapes), inputs)]


def _read_slices(path: Path) -> dict[str, Any]:
    """Reads dtypes and shapes from the header of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def from_onnx(artifact: Artifact, shapes: Sequence[Sizes], folder: Path) -> tuple[list[Workload], list[str]]:
    """Returns random inputs with the names, dtypes and shapes of an ONNX file.

    Returns:
        The workloads, and notes about assumptions.

    Raises:
        ConfigError: The file has no axis of that name, or an input is not a tensor of numbers.
        BenchError: The file cannot be read.
    """
    import numpy as np
    from safetensors.numpy import save_file

    specs = _onnx_inputs(artifact)
    axes = {size: axis for _, shape in specs.values() for axis, size in enumerate(shape) if isinstance(size, str)}
    defaults = {name: _FIRST_AXIS if axis == 0 else _OTHER_AXES for name, axis in axes.items()}
    workloads: list[Workload] = []
    for index, (shape, location) in enumerate(_located(shapes, "`shapes`")):
        _check_names(shape, list(axes), location)
        sizes = {**defaults, **shape}
        _check_unique(sizes, workloads, location)
        arrays = _random_arrays(specs, sizes)
        file = folder / f"{index}.safetensors"
        save_file(arrays, file)
        rows = _count_rows(sizes, {name: list(array.shape) for name, array in arrays.items()})
        workloads.append(Workload(sizes, rows, file))
    notes = []
    if assumed := sorted({name for name in axes for shape in shapes or [{}] if name not in shape}):
        sizes_text = ", ".join(f"{name}={defaults[name]}" for name in assumed)
        notes.append(f"{artifact.name}: assumed sizes {sizes_text}; set them with `shapes`")
    if integers := [name for name, (dtype, _) in specs.items() if not np.issubdtype(dtype, np.floating)]:
        notes.append(f"{artifact.name}: random values 0 and 1 for {', '.join(integers)}; set them with `inputs`")
    return workloads, notes


def _random_arrays(specs: Mapping[str, tuple[Any, list[int | str]]], sizes: Sizes) -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = {}
    for name, (dtype, axes) in specs.items():
        shape = [sizes[size] if isinstance(size, str) else size for size in axes]
        is_float = np.issubdtype(dtype, np.floating)
        values = generator.standard_normal(shape) if is_float else generator.integers(2, size=shape)
        arrays[name] = np.asarray(values).astype(dtype)
    return arrays


def _onnx_inputs(artifact: Artifact) -> dict[str, tuple[Any, list[int | str]]]:
    """Returns dtype and shape of each input; a dynamic axis is its name."""
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
                f"cannot make random values for the input {value.name}: it is not a tensor of numbers",
                location=artifact.name,
                hint="Give `inputs=FILE.safetensors`.",
            )
        axes = [
            axis.dim_value if axis.HasField("dim_value") else axis.dim_param or f"{value.name}_{index}"
            for index, axis in enumerate(tensor.shape.dim)
        ]
        specs[value.name] = (dtype, axes)
    return specs


def _read(path: Path, load: Any) -> dict[str, Any]:
    from safetensors import SafetensorError

    if not path.is_file():  # reading a pipe would block
        raise ConfigError("the file does not exist", location=f"`inputs={path}`")
    try:
        return dict(load(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the file: {error}", location=f"`inputs={path}`") from error


def _located(shapes: Sequence[Sizes], location: str) -> Iterator[tuple[Sizes, str]]:
    """Yields each shape with its location; one empty shape if there are none."""
    return ((shape, f"{location}[{index}]") for index, shape in enumerate(shapes or [{}]))


def _check_names(shape: Sizes, axes: Sequence[str], location: str) -> None:
    for name in shape:
        if name not in axes:
            raise ConfigError(f"no input has a dynamic axis {name}", location=location, hint=did_you_mean(name, axes))


def _check_range(name: str, size: int, dim: Dim, location: str) -> None:
    if size not in dim:
        raise ConfigError(f"{name} is out of range (expected {dim.describe()}, found {size})", location=location)


def _check_unique(sizes: Sizes, workloads: Sequence[Workload], location: str) -> None:
    if any(workload.sizes == sizes for workload in workloads):
        raise ConfigError("the same sizes occur twice", location=location, hint="Remove one of them.")


def _count_rows(sizes: Sizes, shapes: Mapping[str, Sequence[int]]) -> int:
    """Returns the size called batch, or the first axis if all inputs agree on it, or 1."""
    if "batch" in sizes:
        return sizes["batch"]
    first_axes = {shape[0] for shape in shapes.values() if shape}
    return first_axes.pop() if len(first_axes) == 1 else 1
