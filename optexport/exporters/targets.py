"""Opens exported files in their own runtimes, without transformers or the original model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from optexport.errors import ExportError, SourceError
from optexport.exporters.format import Run
from optexport.exporters.registry import get_format
from optexport.runtime.devices import Device


def open_file(
    path: Path, file_format: str, outputs: Sequence[str], device: Device = "cpu"
) -> Iterator[tuple[str, Run]]:
    """Opens an exported file in each target's way, one after the other.

    Yields:
        The target's name, and a function that runs the file.

    Raises:
        ConfigError: A package of the format is not installed.
        ExportError: The runtime rejects the file.
        DeviceError: The device is not available.
    """
    for target, open_target in list_openers(path, file_format, outputs, device):
        yield target, open_target()


def list_openers(
    path: Path, file_format: str, outputs: Sequence[str], device: Device = "cpu"
) -> list[tuple[str, Callable[[], Run]]]:
    """Lists the targets of an exported file.

    The function that opens a file raises as `open_file` does. Its errors do not name the folder, because a draft's
    folder no longer exists when a user reads them.

    Args:
        device: Device that the file was written for. Inputs and outputs of a run are always on the CPU.

    Returns:
        The name of each target, and a function that opens the file and returns a function that runs it.
    """
    chosen = get_format(file_format)
    chosen.check_installed(path.name)
    openers = chosen.list_openers(path, outputs, device)
    return [(target, partial(_open_without_folder, open_it, path, file_format)) for target, open_it in openers]


def _open_without_folder(open_it: Callable[[], Run], path: Path, file_format: str) -> Run:
    try:
        return open_it()
    except (ExportError, SourceError) as error:
        target = path.name if error.location is None else error.location.replace(str(path), path.name)
        cause = error.message.replace(f"{path.parent}{os.sep}", "")
        hint = f'Leave "{file_format}" out of export.formats.' if isinstance(error, SourceError) else error.hint
        raise ExportError(cause, location=target, hint=hint) from error
