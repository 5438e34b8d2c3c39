"""The files that an ONNX file keeps its weights in. Needs no torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from optexport.bundle.places import UNLISTED
from optexport.errors import BundleError, first_line


def locations(model: Any) -> set[str]:
    """The paths, as the model writes them, of the files that hold weights of an ``onnx.ModelProto``."""
    entries = (entry for tensor in _tensors(model.graph) for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def check_listed(path: Path) -> None:
    """Checks that no weights of an ONNX file lie where a bundle has files that no digest covers.

    Raises:
        BundleError: Some do, or the file cannot be read.
    """
    if not any(_holds(path, name.encode()) for name in UNLISTED):
        return  # which spares reading the structure of large files
    try:
        import onnx

        found = locations(onnx.load_model(path, load_external_data=False))
    except Exception as error:  # protobuf's errors share no base class with those of files
        raise BundleError(f"where its weights are cannot be read: {first_line(error)}", place=str(path)) from error
    for location in sorted(found):
        if PurePosixPath(location).name in UNLISTED:
            raise BundleError(f"it keeps weights in {location!r}, which no digest covers", place=str(path))


def _holds(path: Path, text: bytes) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0


def _tensors(graph: Any) -> Iterator[Any]:
    """The tensors that a graph holds, and those of the graphs in it."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from [attribute.t, *attribute.tensors]
        for inner in (attribute.g, *attribute.graphs):
            if inner.node:
                yield from _tensors(inner)
