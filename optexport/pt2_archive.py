"""Opening ``.pt2`` files without running code that they may carry.

``torch.export.load`` unpickles tensors, and falls back to pickle proper where the guarded unpickler refuses: a file
from a stranger could run anything. So every pickle in the archive is first read by the guarded unpickler alone.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from optexport.errors import SourceError

_OPERATOR = re.compile(r"torch\.ops\.[\w.]+|_operator\.\w+|math\.\w+|torch\.sym_\w+")
_MEMBER = re.compile(
    r"archive_format|archive_version|byteorder|\.data/[\w-]+|\.format_version|\.storage_alignment|version"
    r"|models/\w+\.json|data/(weights|constants)/\w+(_config\.json)?|data/sample_inputs/\w+\.pt|extra/.*"
)
_MEND = "Only load files that you or people you trust have made; export the model again from its source."


def load(path: Path) -> ExportedProgram:
    """Loads an ``ExportedProgram`` from a file that may come from anywhere.

    Raises:
        SourceError: It is no such file, is damaged, or holds a pickle that could run code.
    """
    _check(path)
    try:
        return torch.export.load(path)
    except Exception as error:  # a damaged archive fails in as many ways as it has parts
        raise SourceError(f"it is no exported program: {error}", place=str(path)) from error


def _check(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for name, info in _members(archive, path).items():
                place = f"{path.name}: {name}"
                if not _MEMBER.fullmatch(name):
                    raise SourceError("it is no part of a .pt2 archive that torch.export.save writes", place=place)
                if name.endswith("_config.json"):
                    _check_payloads(json.loads(archive.read(info)), place)
                elif name.startswith("models/"):
                    _check_operators(json.loads(archive.read(info)), place)
                elif name.endswith(".pt") and info.file_size:
                    _check_pickle(archive.read(info), place)
    except (
        OSError,
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        LookupError,
        TypeError,
        RuntimeError,
    ) as error:
        raise SourceError(f"it is no .pt2 archive, or a damaged one: {error}", place=str(path)) from error


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The members by name, without the folder that they all lie in.

    torch's own reader ignores case and takes the first of two members of one name, where Python's takes the last: an
    archive in which the two would read different bytes is refused.
    """
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    folders = {info.filename.partition("/")[0] for info in archive.infolist()}
    if len(folders) != 1 or len({name.casefold() for name in members}) != len(archive.infolist()):
        raise SourceError("two of its members go by one name", place=str(path), mend=_MEND)
    if "archive_format" not in members:
        raise SourceError("it is no .pt2 archive of a supported version", place=str(path), mend=_MEND)
    return members


def _check_payloads(config: Any, place: str) -> None:
    """Refuses weights and constants that are kept as anything but the bare bytes of tensors."""
    for payload in config["config"].values():
        if payload["use_pickle"] or not payload["path_name"].startswith(("weight_", "tensor_")):
            raise SourceError(f"{payload['path_name']} is a pickle that could run code", place=place, mend=_MEND)


def _check_operators(value: Any, place: str) -> None:
    """Refuses a graph that calls anything but operators: the loader would take any function of torch."""
    if isinstance(value, dict):
        if "inputs" in value and isinstance(target := value.get("target"), str) and not _OPERATOR.fullmatch(target):
            raise SourceError(f"its graph calls {target}, which is no operator", place=place, mend=_MEND)
        for item in value.values():
            _check_operators(item, place)
    elif isinstance(value, list):
        for item in value:
            _check_operators(item, place)


def _check_pickle(content: bytes, place: str) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="meta")
    except Exception as error:  # the guard's refusal, or a damaged pickle: neither may reach the unguarded loader
        raise SourceError("it holds a pickle that could run code", place=place, mend=_MEND) from error
