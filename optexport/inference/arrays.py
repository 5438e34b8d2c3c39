"""Inputs of a bundle as numpy arrays, checked against the manifest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from optexport.bundle.manifest import Manifest, TensorRecord
from optexport.errors import ConfigError

Arrays = dict[str, npt.NDArray[Any]]


def numpy_dtype(spec: TensorRecord) -> np.dtype[Any]:
    """Returns the numpy dtype of an input; float32 for bfloat16, which numpy lacks and float32 represents exactly."""
    return np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)


def describe_inputs(manifest: Manifest) -> str:
    """Returns a hint that lists the inputs."""
    return f"Pass {'; '.join(spec.describe() for spec in manifest.inputs)}."


def is_constant(constant: Any, value: Any) -> bool:
    """Returns True if a value equals a constant of the file; floats may be rounded to float32."""
    value = _as_numpy(value)
    try:
        array, expected = np.asarray(value), np.asarray(constant)
    except (ValueError, TypeError):  # rows of different lengths, or a tensor that numpy cannot represent
        return False
    if array.tolist() == constant:
        return True
    if expected.dtype.kind != "f" or array.dtype.kind not in "fiu" or expected.shape != array.shape:
        return False
    return np.array_equal(array.astype(np.float32), expected) or np.array_equal(array, expected.astype(np.float32))


def constant_error(name: str, constant: Any) -> ConfigError:
    """Returns the error for an input that differs from the file's constant."""
    return ConfigError(
        f"the file was exported for the value {constant}",
        location=name,
        hint="Pass that value or none, or export the model for another value.",
    )


def _as_numpy(value: Any) -> Any:
    """Converts a torch tensor to a numpy array if possible; returns other values unchanged."""
    if not hasattr(value, "detach"):  # avoids an import of torch
        return value
    try:
        value = value.detach().cpu()
        # numpy has no bfloat16, and float32 represents it exactly.
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    except (TypeError, RuntimeError):  # for example a sparse tensor
        return value


def check_rank(spec: TensorRecord, array: npt.NDArray[Any]) -> None:
    """Checks the number of an input's axes.

    Raises:
        ConfigError: It differs from the manifest's.
    """
    if array.ndim != len(spec.shape):
        shape = ", ".join(map(str, spec.shape))
        raise ConfigError(
            f"expected shape [{shape}], found {list(array.shape)}",
            location=spec.name,
            hint=f"Add the first axis: {spec.name}[np.newaxis]" if array.ndim == len(spec.shape) - 1 else None,
        )


def as_input(spec: TensorRecord, value: Any) -> npt.NDArray[Any]:
    """Converts an input to the array that a runtime takes.

    Args:
        value: A numpy array, or a torch tensor.

    Raises:
        ConfigError: The value has another type, dtype or rank, or a token below 0.
    """
    value = _as_numpy(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise ConfigError(f"expected a numpy array or a tensor, found {type(value).__name__}", location=spec.name)
    array, dtype = np.asarray(value), numpy_dtype(spec)
    are_integers = array.dtype.kind in "iub" and dtype.kind in "iu"
    if not (array.dtype.kind == dtype.kind or are_integers) or not np.can_cast(array.dtype, dtype, "safe"):
        raise ConfigError(
            f"expected dtype {spec.dtype}, found {array.dtype}",
            location=spec.name,
            hint=f'Convert it, for example with numpy: {spec.name}.astype("{dtype}").',
        )
    check_rank(spec, array)
    # PyTorch rejects a token below 0, but ONNX counts it from the end of the vocabulary.
    if spec.name.endswith("input_ids") and array.size and array.min() < 0:
        raise ConfigError("token ids must not be negative", location=spec.name)
    return np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)
