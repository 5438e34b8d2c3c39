"""Opening ``.pt2`` and TorchScript files without running code that they may carry.

``torch.export.load`` unpickles tensors, falls back to pickle proper where the guarded unpickler refuses, evaluates
sizes and guards as Python, and writes names into code that it generates: a file from a stranger could run anything. So
every pickle in the archive is first read by the guarded unpickler alone, and every text has to be what it should be.
TorchScript is a program; it can do nothing but compute, as long as it calls no operator that reads or writes files.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import logging
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from optexport.errors import SourceError, first_line
from optexport.redaction import redact
from optexport.sources import script_code, script_storages

_OPERATOR = re.compile(r"torch\.ops\.[\w.]+|_operator\.\w+|math\.\w+|torch\.sym_\w+")
_MEMBER = re.compile(
    r"archive_format|archive_version|byteorder|\.data/[\w-]+|\.format_version|\.storage_alignment|version"
    r"|models/\w+\.json|data/(weights|constants)/\w+(_config\.json)?|data/sample_inputs/\w+\.pt|extra/.*"
)
_TORCHSCRIPT_MEMBER = re.compile(
    r"code/[\w/.-]+\.py(\.debug_pkl)?|(data|constants|traced_inputs)(/\d+|\.pkl)|version|byteorder|\.data/[\w-]+"
    r"|\.format_version|\.storage_alignment|extra/.*"
)
# Of what is compressed, which in files of torch is code alone.
_MOST_UNPACKED = 64 << 20
# The records at the end of an archive: 56, 20 and 22 bytes.
_ENDS_SIZE = 98
# The texts that torch keeps and never evaluates: messages, stack traces, the paths of modules.
_FREE_TEXT = ("metadata", "as_string", "torch_version")
_JSON = ("in_spec", "out_spec", "context")
_EXPRESSIONS = ("expr_str", "guards_code")
_NAME = re.compile(r"[\w.@:/ +-]*")
# What sizes and guards are made of: the classes of sympy and of torch that stand for arithmetic, and the inputs.
_FUNCTION = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Max|Min|Abs|And|Or|Not|floor|ceiling|sqrt|max|min|Equality"
    r"|Unequality|Eq|Ne|LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|Le|Lt|Ge|Gt|FloorDiv"
    r"|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    r"|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
    r"|IsNonOverlappingAndDenseIndicator|Piecewise|ExprCondPair"
)
_VALUE = re.compile(r"L|math|true|false|oo|int_oo")
_METHOD = re.compile(r"size|stride|storage_offset|dim|floor|ceil|trunc|sqrt|pow")
_SYNTAX = (
    *(ast.Expression, ast.keyword, ast.Subscript, ast.Tuple, ast.List, ast.Load),
    *(ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.cmpop, ast.boolop, ast.operator, ast.unaryop),
)
_LARGEST_EXPONENT = 64
_WORD = re.compile(r"[A-Za-z_]\w*|-?\d+(\.\d+)?(e[+-]?\d+)?")
_MEND = "Only load files that you or people you trust have made; export the model again from its source."


def load_pt2(path: Path) -> ExportedProgram:
    """Loads an ``ExportedProgram`` from a file that may come from anywhere.

    Raises:
        SourceError: It is no such file, is damaged, or holds a pickle that could run code.
    """
    _check(path)
    warned, log = _Warned(), logging.getLogger("torch.export")
    log.addFilter(warned)
    try:
        return torch.export.load(path)
    except Exception as error:  # a damaged archive fails in as many ways as it has parts
        cause = first_line(warned.error or error)
        raise SourceError(f"it is no exported program: {cause}", place=str(path), mend=_MEND) from error
    finally:
        log.removeFilter(warned)


class _Warned(logging.Filter):
    """Keeps the error that torch warns of with its traceback, before it raises one that says nothing."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        self.error = record.exc_info[1] if record.exc_info else None
        return self.error is None


def _check(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            if "archive_format" not in members:
                raise SourceError("it is no .pt2 archive of a supported version", place=str(path), mend=_MEND)
            for name, info in members.items():
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
    _check_directory(archive, path)
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    folders = {info.filename.partition("/")[0] for info in archive.infolist()}
    if len(folders) != 1 or len({name.casefold() for name in members}) != len(archive.infolist()):
        raise SourceError("two of its members go by one name", place=str(path), mend=_MEND)
    unpacked = sum(info.file_size for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED)
    if unpacked > _MOST_UNPACKED:
        raise SourceError(
            f"it unpacks to {unpacked} bytes, which torch would not compress", place=str(path), mend=_MEND
        )
    return members


def _check_directory(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuses an archive with anything before its first or after its last byte.

    Python's reader looks for the directory from the end, torch's where the end says that it lies: a file made of two
    archives would be one to the one and another to the other.
    """
    assert archive.fp is not None
    size = path.stat().st_size
    archive.fp.seek(max(0, size - _ENDS_SIZE))
    ends = archive.fp.read()
    end = ends[-22:]
    length, offset = struct.unpack("<LL", end[12:20]) if len(end) == 22 else (0, 0)
    directory_end = size - 22
    if ends[-42:-38] == b"PK\x06\x07":  # the larger kind of archive has two more records, and its numbers there
        wide_length, wide_offset = struct.unpack("<QQ", ends[-98:][40:56])
        directory_end = size - _ENDS_SIZE
        if length not in (wide_length, 0xFFFFFFFF) or offset not in (wide_offset, 0xFFFFFFFF):
            directory_end = -1
        length, offset = wide_length, wide_offset
    if end[:4] != b"PK\x05\x06" or offset + length != directory_end or offset != archive.start_dir:
        raise SourceError("it holds more than one archive", place=str(path), mend=_MEND)


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
        if "inputs" in value and isinstance(target := value.get("target"), str):
            if not _OPERATOR.fullmatch(target):
                raise SourceError(f"its graph calls {target}, which is no operator", place=place, mend=_MEND)
            if any(map(script_code.forbidden_name, target.split("."), itertools.repeat("."))):
                raise SourceError(f"its graph calls {target}, which does more than compute", place=place, mend=_MEND)
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
        shown = redact(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise SourceError(f"{shown!r} is neither a name nor a size", place=place, mend=_MEND)


def _is_expression(text: str) -> bool:
    """Whether a text is arithmetic on sizes, such as ``Mul(Integer(2), Symbol('s0', integer=True))``."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the last two of brackets in brackets
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function):
                allowed = isinstance(function, ast.Name | ast.Attribute)
            case ast.Name(id=name):
                allowed = (_FUNCTION if id(node) in called else _VALUE).fullmatch(name) is not None
            case ast.Attribute(attr=name):
                allowed = _METHOD.fullmatch(name) is not None and id(node) in called
            case ast.Constant(value=str() as word):
                allowed = _WORD.fullmatch(word) is not None
            case ast.Constant(value=value):
                allowed = value is None or isinstance(value, int | float)
            case _:
                allowed = isinstance(node, _SYNTAX)
        if not allowed:
            return False
    return all(map(_is_small, _exponents(tree)))


def _exponents(tree: ast.AST) -> Iterator[ast.AST]:
    """What something is raised to, or shifted by."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Pow() | ast.LShift(), right=exponent):
                yield exponent
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[*_, exponent]):
                if "pow" in name.lower() or name == "LShift":
                    yield exponent


def _is_small(exponent: ast.AST) -> bool:
    """Whether an exponent is a small number: that of others would take forever to compute."""
    names = [node.id for node in ast.walk(exponent) if isinstance(node, ast.Name)]
    numbers = [node.value for node in ast.walk(exponent) if isinstance(node, ast.Constant)]
    plain = isinstance(exponent, ast.Constant | ast.UnaryOp | ast.Call)
    return plain and set(names) <= {"Integer", "Rational", "Float"} and all(_is_small_number(n) for n in numbers)


def _is_small_number(value: object) -> bool:
    try:
        return value is None or (isinstance(value, int | float | str) and abs(float(value)) <= _LARGEST_EXPONENT)
    except ValueError:
        return False


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    """Loads a TorchScript file that may come from anywhere.

    Raises:
        SourceError: It calls what could reach outside of the program, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            for name, info in members.items():
                if not _TORCHSCRIPT_MEMBER.fullmatch(name):
                    raise SourceError("it is no part of a TorchScript file that torch writes", place=name, mend=_MEND)
                if name in ("data.pkl", "constants.pkl"):
                    folder = f"{name.removesuffix('.pkl')}/"
                    records = {key.removeprefix(folder): held.file_size for key, held in members.items()}
                    script_storages.check(archive.read(info), records)
                if name.endswith(".py"):
                    code = archive.read(info).decode()
                    if (found := script_code.forbidden_text(code)) is not None:
                        raise _does_more(found, f"{path.name}: {name}")
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        cause = f"it is no TorchScript archive, or a damaged one: {error}"
        raise SourceError(cause, place=path.name, mend=_MEND) from error
    binding: Any = torch._C  # whose types do not tell of what torch.jit.load passes
    unit = binding.CompilationUnit()
    try:
        module = binding.import_ir_module(unit, str(path), None, {}, False)
    except RuntimeError as error:
        raise SourceError(f"torch cannot load it: {first_line(error)}", place=path.name) from error
    if (found := script_code.forbidden_operator(unit)) is not None:
        raise _does_more(found, path.name)
    wrapped = torch.jit._recursive.wrap_cpp_module(module)
    assert isinstance(wrapped, torch.jit.ScriptModule)
    return wrapped


def _does_more(found: str, place: str) -> SourceError:
    return SourceError(f"its code uses {found}, which does more than compute", place=place, mend=_MEND)


def _check_pickle(content: bytes, place: str) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="meta")
    except Exception as error:  # the guard's refusal, or a damaged pickle: neither may reach the unguarded loader
        raise SourceError("it holds a pickle that could run code", place=place, mend=_MEND) from error
