"""Writes ``.pt2`` files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx
from torch.export import ExportedProgram

from optexport.errors import ExportError, first_line
from optexport.exporters import torch_passes
from optexport.exporters.disk_space import check_disk_space
from optexport.tracing import dynamo_exporter


def save(program: ExportedProgram, path: Path, *, passes: Sequence[str] = ()) -> None:
    """Writes a ``.pt2`` file.

    ``torch.export.load(path).module()(**inputs)`` returns a tuple of tensors. The file contains no sample inputs,
    because running does not need them. It contains no source locations, because they differ between runs.

    Args:
        passes: Names of `optexport.exporters.torch_formats`; names of other formats are ignored.

    Raises:
        ExportError: The format does not support the graph or a weight.
        OSError: The disk is full.
    """
    program = copy.copy(torch_passes.apply_passes(program, passes, "pt2"))
    program._example_inputs = None
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("from_node", None)
                node.meta.pop("stack_trace", None)
    check_disk_space(path, program)
    try:
        with dynamo_exporter.quiet():
            torch.export.save(program, path)
    except OSError:
        raise
    except Exception as error:  # torch.export raises many types of exceptions
        raise ExportError(
            f"torch.export.save could not write the graph: {_last_line(error)}",
            location="export.formats: pt2",
            hint='Leave "pt2" out of export.formats.',
        ) from error


def _last_line(error: BaseException) -> str:
    """Returns the last line of a traceback in the message, or else the message's first line."""
    _, _, trace = str(error).partition("Traceback")
    return trace.strip().splitlines()[-1] if trace.strip() else first_line(error)
