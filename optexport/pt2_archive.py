"""Opening ``.pt2`` files without running code that they may carry.

``torch.export.load`` unpickles tensors, falls back to pickle proper where the guarded unpickler refuses, evaluates
sizes and guards as Python, and writes names into code that it generates: a file from a stranger could run anything. So
every pickle in the archive is first read by the guarded unpickler alone, and every text has to be what it should be.
"""

from __future__ import annotations

import ast
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
# The texts that torch keeps and never evaluates: messages, stack traces, the paths of modules.
_FREE_TEXT = ("metadata", "as_string", "torch_version")
_JSON = ("in_spec", "out_spec", "context")
_EXPRESSIONS = ("expr_str", "guards_code")
_NAME = re.compile(r"[\w.@:/ +-]*")
# What sizes and guards are made of. sympy's classes are capitalised, and nothing of Python's that does anything is.
_FUNCTION = re.compile(r"[A-Z]\w*|floor|ceiling|sqrt|log|exp|min|max|abs|size|stride|storage_offset|dim|math")
_SYNTAX = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.Subscript, ast.Tuple, ast.Load),
    *(ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.cmpop, ast.boolop, ast.operator, ast.unaryop),
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
                    config = json.loads(archive.read(info))
                    _check_texts(config, place)
                    _check_payloads(config, archive, place)
                elif name.startswith("models/"):
                    _check_texts(json.loads(archive.read(info)), place)
                elif name.endswith(".pt") and info.file_size:
                    _check_pickle(archive.read(info), place)
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


def _check_payloads(config: Any, archive: zipfile.ZipFile, place: str) -> None:
    """Refuses weights and constants that are kept as anything but the bare bytes of tensors."""
    empty = {info.filename.rpartition("/")[2] for info in archive.infolist() if not info.file_size}
    for payload in config["config"].values():
        if payload["use_pickle"] or not payload["path_name"].startswith(("weight_", "tensor_")):
            raise SourceError(f"{payload['path_name']} is a pickle that could run code", place=place, mend=_MEND)
        # The loader would take zeros instead.
        if payload["path_name"] in empty and all(size["as_int"] for size in payload["tensor_meta"]["sizes"]):
            raise SourceError(f"{payload['path_name']} is empty", place=place, mend=_MEND)


def _check_texts(value: Any, place: str, key: str = "") -> None:
    """Refuses a graph whose texts are anything but names, calls of operators, and arithmetic on sizes.

    Args:
        key: The name that the value has in the document.
    """
    if isinstance(value, dict):
        if "inputs" in value and isinstance(target := value.get("target"), str) and not _OPERATOR.fullmatch(target):
            raise SourceError(f"its graph calls {target}, which is no operator", place=place, mend=_MEND)
        for name, item in value.items():
            _check_texts(name, place)
            if name not in _FREE_TEXT:
                _check_texts(item, place, name)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, place, key)
    elif isinstance(value, str) and value and key in _JSON:
        _check_texts(json.loads(value), place)
    elif isinstance(value, str) and not (_is_expression(value) if key in _EXPRESSIONS else _NAME.fullmatch(value)):
        raise SourceError(f"{value!r} is neither a name nor a size", place=place, mend=_MEND)


def _is_expression(text: str) -> bool:
    """Whether a text is arithmetic on sizes, such as ``Mul(Integer(2), Symbol('s0', integer=True))``."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                allowed = _FUNCTION.fullmatch(name) is not None
            case ast.Constant(value=str() as text):
                allowed = text.isidentifier()
            case _:
                allowed = isinstance(node, _SYNTAX)
        if not allowed:
            return False
    return True


def _check_pickle(content: bytes, place: str) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="meta")
    except Exception as error:  # the guard's refusal, or a damaged pickle: neither may reach the unguarded loader
        raise SourceError("it holds a pickle that could run code", place=place, mend=_MEND) from error
