"""Opens ``.pt2`` and TorchScript files without running code in them.

``torch.export.load`` can run code from a file: it unpickles tensors, falls back to plain pickle if the guarded
unpickler refuses, evaluates sizes and guards as Python, and writes names into generated code. So the guarded unpickler
reads every pickle first, and `program_texts` checks every text. A TorchScript program only computes, as long as it
calls no operator that reads or writes files.
"""

from __future__ import annotations

import io
import json
import logging
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from optexport.errors import SourceError, first_line
from optexport.runtime.untrusted import program_texts, script_code, script_storages
from optexport.runtime.untrusted.program_texts import HINT

_MEMBER = re.compile(
    r"archive_format|archive_version|byteorder|\.data/[\w-]+|\.format_version|\.storage_alignment|version"
    r"|models/\w+\.json|data/(weights|constants)/\w+(_config\.json)?|data/sample_inputs/\w+\.pt|extra/.*"
)
_TORCHSCRIPT_MEMBER = re.compile(
    r"code/[\w/.-]+\.py(\.debug_pkl)?|(data|constants|traced_inputs)(/\d+|\.pkl)|version|byteorder|\.data/[\w-]+"
    r"|\.format_version|\.storage_alignment|extra/.*"
)
_SAVE = (
    "Save the model itself with torch.jit.save or torch.export.save, or load it in a function: python:MODULE:FUNCTION."
)
# The three records at the end of a zip64 archive have 56, 20 and 22 bytes.
_ENDS_SIZE = 98


def load_pt2(path: Path) -> ExportedProgram:
    """Loads an ``ExportedProgram`` from an untrusted file.

    Raises:
        SourceError: The file is not an exported program, is damaged, or holds a pickle that could run code.
    """
    check_pt2(path)
    warned, log = _LoggedError(), logging.getLogger("torch.export")
    log.addFilter(warned)
    try:
        with warnings.catch_warnings():
            # torch 2.11 warns of its own way to read weights.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            program = torch.export.load(path)
        _check_call(program)
        return program
    except Exception as error:  # any part of an archive may be damaged
        cause = first_line(warned.error or error)
        raise SourceError(
            f"the file is not a valid exported program: {cause}", location=str(path), hint=HINT
        ) from error
    finally:
        log.removeFilter(warned)


def pt2_module(path: Path, *, check_guards: bool = True) -> fx.GraphModule:
    """Loads the module of an untrusted ``.pt2`` file.

    Args:
        path: The file.
        check_guards: True if the module refuses inputs of sizes that it was not exported for.

    Raises:
        SourceError: `load_pt2` refuses the file, or torch cannot generate code from it.
    """
    program = load_pt2(path)
    try:
        return program.module(check_guards=check_guards)
    except Exception as error:  # torch generates code from the content of the file
        raise SourceError(
            f"torch cannot create a module from the file: {first_line(error)}", location=str(path), hint=HINT
        ) from error


def _check_call(program: ExportedProgram) -> None:
    """Refuses a call signature that does not fit the graph.

    The file stores the two separately.

    Raises:
        ValueError: The numbers of inputs or outputs differ.
    """
    inputs, outputs = program.call_spec.in_spec, program.call_spec.out_spec
    counts = (inputs.num_leaves, outputs.num_leaves)
    signature = program.graph_signature
    if [child.type for child in inputs.children()] != [tuple, dict] or counts != (
        sum(spec.kind is InputKind.USER_INPUT for spec in signature.input_specs),
        sum(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs),
    ):
        raise ValueError("the call signature does not match the inputs and outputs of the graph")


class _LoggedError(logging.Filter):
    """Records the error that torch logs before it raises a less specific one."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        self.error = record.exc_info[1] if record.exc_info else None
        return self.error is None


def check_pt2(path: Path) -> None:
    """Checks that ``torch.export.load`` runs no code of a ``.pt2`` file.

    Raises:
        SourceError: The file is not an exported program, is damaged, or could run code.
    """
    try:
        archive = _Archive.open(path)
        if "archive_format" not in archive.sizes:
            raise SourceError("the file is not a .pt2 archive of a supported version", location=str(path), hint=HINT)
        for name, size in archive.sizes.items():
            location = f"{path.name}: {name}"
            if not _MEMBER.fullmatch(name):
                raise SourceError("the archive has a member that torch.export.save does not write", location=location)
            if name.endswith("_config.json"):
                config = json.loads(archive.read(name))
                program_texts.check(config, location)
                _check_payloads(config, archive, location)
            elif name.startswith("models/"):
                program_texts.check(json.loads(archive.read(name)), location)
            elif name.endswith(".pt") and size:
                _check_pickle(archive.read(name), location)
    except (
        OSError,
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RuntimeError,
    ) as error:
        raise SourceError(
            f"the file is not a .pt2 archive, or is damaged: {first_line(error)}", location=str(path)
        ) from error


@dataclass(frozen=True)
class _Archive:
    """Zip archive that torch's own reader opens.

    Other readers may see other members in a forged archive.

    Attributes:
        sizes: Bytes of each member, by its name without the top folder.
    """

    sizes: Mapping[str, int]
    _reader: Any

    def read(self, name: str) -> bytes:
        content: bytes = self._reader.get_record(name)
        return content

    @classmethod
    def open(cls, path: Path) -> _Archive:
        """Opens an archive if Python's reader and torch's reader find the same members.

        torch's reader ignores case and takes the first of two members with one name; Python's takes the last.

        Raises:
            SourceError: The two readers find different members.
            OSError, RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError: The archive is damaged.
        """
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive, path)
            infos = archive.infolist()
        members = {info.filename.partition("/")[2]: info.file_size for info in infos}
        folders = {info.filename.partition("/")[0] for info in infos}
        if len(folders) != 1 or len({name.casefold() for name in members}) != len(infos):
            raise SourceError("two members of the archive have the same name", location=str(path), hint=HINT)
        binding: Any = torch._C  # its type stubs lack PyTorchFileReader
        reader = binding.PyTorchFileReader(str(path))
        # torch 2.11 has no get_record_size; there, each member is read once more.
        size_of = getattr(reader, "get_record_size", lambda name: len(reader.get_record(name)))
        sizes = {name: int(size_of(name)) for name in reader.get_all_records()}
        if sizes != members:
            raise SourceError("the file contains more than one archive", location=str(path), hint=HINT)
        return cls(sizes, reader)


def _check_directory(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuses a file with data before or after the archive, or with two end records.

    Python's reader searches for the directory from the end; torch's goes to the offset in the end record. In a file
    made of two archives, the two readers would open different ones.
    """
    assert archive.fp is not None
    size = path.stat().st_size
    archive.fp.seek(max(0, size - _ENDS_SIZE))
    ends = archive.fp.read()
    end = ends[-22:]
    length, offset = struct.unpack("<LL", end[12:20]) if len(end) == 22 else (0, 0)
    directory_end = size - 22
    if ends[-42:-38] == b"PK\x06\x07":  # zip64 has two more records, which contain the offsets
        wide_length, wide_offset = struct.unpack("<QQ", ends[-98:][40:56])
        (wide_end,) = struct.unpack("<Q", ends[-34:-26])
        directory_end = size - _ENDS_SIZE
        if (
            length not in (wide_length, 0xFFFFFFFF)
            or offset not in (wide_offset, 0xFFFFFFFF)
            or wide_end != directory_end
        ):
            directory_end = -1
        length, offset = wide_length, wide_offset
    if end[:4] != b"PK\x05\x06" or offset + length != directory_end or offset != archive.start_dir:
        raise SourceError("the file contains more than one archive", location=str(path), hint=HINT)


def _check_payloads(config: Any, archive: _Archive, location: str) -> None:
    """Refuses weights and constants in any format except the raw bytes of tensors."""
    empty = {name.rpartition("/")[2] for name, size in archive.sizes.items() if not size}
    for payload in config["config"].values():
        if payload["use_pickle"] or not payload["path_name"].startswith(("weight_", "tensor_")):
            raise SourceError(f"{payload['path_name']} is a pickle that could run code", location=location, hint=HINT)
        # The loader would silently read zeros.
        if payload["path_name"] in empty and all(size["as_int"] for size in payload["tensor_meta"]["sizes"]):
            raise SourceError(f"{payload['path_name']} is empty", location=location, hint=HINT)


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    """Loads an untrusted TorchScript file.

    Raises:
        SourceError: The program calls an operator that does more than compute, or the file is damaged.
    """
    try:
        archive = _Archive.open(path)
        if not any(name.endswith("constants.pkl") for name in archive.sizes):
            raise SourceError(
                "the file is not a TorchScript program (torch.save may have written it)", location=path.name, hint=_SAVE
            )
        for name in archive.sizes:
            if not _TORCHSCRIPT_MEMBER.fullmatch(name):
                raise SourceError(
                    "the archive has a member that torch.jit.save does not write", location=name, hint=HINT
                )
            if name.endswith(("data.pkl", "constants.pkl", ".debug_pkl")):  # torch reads .debug_pkl if a call fails
                folder = f"{name.removesuffix('.pkl')}/"
                records = {key.removeprefix(folder): size for key, size in archive.sizes.items()}
                script_storages.check(archive.read(name), records)
            if name.endswith(".py"):
                code = archive.read(name).decode()
                script_code.check_depth(code)
                if (forbidden := script_code.find_forbidden_text(code)) is not None:
                    raise _forbidden_error(forbidden, f"{path.name}: {name}")
    except (OSError, ValueError, LookupError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        cause = f"the file is not a TorchScript archive, or is damaged: {first_line(error)}"
        raise SourceError(cause, location=path.name, hint=HINT) from error
    binding: Any = torch._C  # its type stubs lack the arguments that torch.jit.load passes
    unit = binding.CompilationUnit()
    try:
        module = binding.import_ir_module(unit, str(path), None, {}, False)
    except (RuntimeError, LookupError, MemoryError) as error:  # for instance if a name is damaged
        raise SourceError(f"torch cannot load the file: {first_line(error)}", location=path.name) from error
    if (forbidden := script_code.find_forbidden_operator(unit)) is not None:
        raise _forbidden_error(forbidden, path.name)
    wrapped = torch.jit._recursive.wrap_cpp_module(module)
    assert isinstance(wrapped, torch.jit.ScriptModule)
    return wrapped


def _forbidden_error(forbidden: str, location: str) -> SourceError:
    return SourceError(f"the code uses {forbidden}, which does more than compute", location=location, hint=HINT)


def _check_pickle(content: bytes, location: str) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="meta")
    except Exception as error:  # refused or damaged: torch.export.load would fall back to plain pickle
        raise SourceError("the member is a pickle that could run code", location=location, hint=HINT) from error
