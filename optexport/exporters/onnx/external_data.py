"""External weight files of an ONNX file. Needs no torch, and onnx only if there are any."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optexport.errors import BundleError, first_line, unreadable

_KEY = "location"


def locations(model: Any) -> set[str]:
    """Returns the paths of external weight files, as an ``onnx.ModelProto`` states them."""
    return {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == _KEY}


def check_locations(path: Path) -> None:
    """Checks that an ONNX file stores its weights in itself or in ``<path>.data``.

    A change of another file may escape the digests, and a comparison of two bundles may miss it.

    Raises:
        BundleError: The weights are elsewhere, or the file cannot be parsed.
    """
    try:
        if not _contains(path, _KEY.encode()):
            return  # avoids parsing a large file
    except OSError as error:
        raise unreadable(error, path) from error
    try:
        import onnx

        paths = locations(onnx.load_model(path, load_external_data=False))
    except Exception as error:  # errors of protobuf and of files share no base class
        raise BundleError(
            f"the locations of the weights cannot be read: {first_line(error)}", location=str(path)
        ) from error
    if outside := sorted(paths - {f"{path.name}.data"}):
        expected = f"{path.name}.data"
        raise BundleError(
            f"weights are in another file (expected {expected!r}, found {outside[0]!r})", location=str(path)
        )


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0


def _tensors(message: Any) -> Iterator[Any]:
    """Yields all tensors in an ONNX message, including subgraphs, functions and attributes."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                if field.message_type.name == "TensorProto":
                    yield inner
                yield from _tensors(inner)
