"""The files that an ONNX file keeps its weights in. Needs no torch, and onnx only where there are such."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optexport.errors import BundleError, first_line, unreadable

_KEY = "location"


def locations(model: Any) -> set[str]:
    """The paths, as the model writes them, of the files that hold weights of an ``onnx.ModelProto``."""
    return {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == _KEY}


def check_locations(path: Path) -> None:
    """Checks that the weights of an ONNX file lie in itself, or in ``<path>.data``, where bundles keep them.

    In another file no digest might tell of a change, and whoever compares two bundles might not look there.

    Raises:
        BundleError: They do not, or it cannot be read where they lie.
    """
    try:
        if not _holds(path, _KEY.encode()):
            return  # which spares reading the structure of large files
    except OSError as error:
        raise unreadable(error, path) from error
    try:
        import onnx

        found = locations(onnx.load_model(path, load_external_data=False))
    except Exception as error:  # protobuf's errors share no base class with those of files
        raise BundleError(f"where its weights are cannot be read: {first_line(error)}", location=str(path)) from error
    if elsewhere := sorted(found - {f"{path.name}.data"}):
        raise BundleError(f"it keeps weights in {elsewhere[0]!r}, and no bundle does", location=str(path))


def _holds(path: Path, text: bytes) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0


def _tensors(message: Any) -> Iterator[Any]:
    """The tensors anywhere in a message of ONNX: in graphs within graphs, functions, attributes, sparse tensors."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                if field.message_type.name == "TensorProto":
                    yield inner
                yield from _tensors(inner)
