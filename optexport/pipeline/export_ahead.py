"""Writes the ONNX file in a forked process while the run does other steps, because an export uses only one core."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import fx

from optexport._utils import forked, model_memory, signals
from optexport.bundle.manifest import ArtifactRecord
from optexport.cache import exports
from optexport.config.schema import Format
from optexport.exporters.flat_graph import FlatGraph
from optexport.job import Variant
from optexport.pipeline.steps import TracedJob
from optexport.transformations.apply import Transformed

# The format whose export takes longest.
_FORMAT: Format = "onnx"
_RECORD = "record.json"
_CACHED = "cached"


class ExportAhead:
    """A file that another process writes.

    Args:
        graph_module: The graph of the file.
        process: The process, which also writes the file's record.
        folder: The folder of both.
    """

    def __init__(self, graph_module: fx.GraphModule, process: BaseProcess, folder: Path) -> None:
        self._graph_module, self._process, self._folder = graph_module, process, folder

    def take(
        self, graph_module: fx.GraphModule, file_format: Format, folder: Path
    ) -> tuple[ArtifactRecord, bool] | None:
        """Waits for the file, and moves it to a folder.

        Returns:
            The same as `exports.export`. None for another file, or if the process failed; the caller then exports the
            file itself, which shows the error.
        """
        if graph_module is not self._graph_module or file_format != _FORMAT:
            return None
        if not forked.wait(self._process):
            return None
        record_path = self._folder / _RECORD
        origin, record = record_path.read_text(encoding="utf-8").split("\n")
        record_path.unlink()
        for path in self._folder.iterdir():
            shutil.move(path, folder / path.name)
        return ArtifactRecord.model_validate_json(record), origin == _CACHED


@contextlib.contextmanager
def exporting_ahead(traced: TracedJob, graphs: Sequence[tuple[Variant, Transformed]]) -> Iterator[ExportAhead | None]:
    """Starts the export that takes longest, and ends its process with the block.

    Yields None if this would not help: the run has no other work, another format may need the same conversion, the
    model is large, so that a second process would need too much memory, or it is on a GPU, which a fork cannot use.
    """
    job = traced.job
    other_formats = {*job.config.export.formats} - {_FORMAT}
    chosen = [(v, transformed) for v, transformed in graphs if _FORMAT in v.formats and v.precision is None]
    is_suitable = job.config.model.device == "cpu" and not model_memory.is_large(job.loaded.model)
    has_other_work = bool(other_formats) and other_formats <= {"torchscript", "pt2"}
    if not chosen or not has_other_work or not is_suitable or not forked.is_useful():
        yield None
        return
    transformed = chosen[0][1]
    graph = job.make_flat_graph(traced.signature, transformed.graph_module, transformed.applied)
    passes = job.config.export.passes.get(_FORMAT, [])
    with signals.temporary_folder() as folder, forked.running(_write, graph, passes, folder) as process:
        yield None if process is None else ExportAhead(transformed.graph_module, process, folder)


def _write(graph: FlatGraph, passes: Sequence[str], folder: Path) -> None:
    """Writes the file and its record."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the run repeats an export that fails, with its messages
        os.dup2(null, stream)
    torch.set_num_threads(1)  # a fork has none of the parent's threads
    record, is_cache_hit = exports.export(graph, _FORMAT, folder, passes)
    text = f"{_CACHED if is_cache_hit else ''}\n{record.model_dump_json()}"
    (folder / _RECORD).write_text(text, encoding="utf-8")
