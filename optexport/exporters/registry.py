"""Registry of the formats: built in, and of installed packages. Needs no torch.

A format of another package is an entry point of the group ``optexport.formats`` with the value ``module:Class``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath

from optexport._utils import custom_code
from optexport.errors import ConfigError, did_you_mean
from optexport.exporters.format import Format, FormatPass
from optexport.runtime import devices
from optexport.runtime.devices import Device

BUILT_IN: Mapping[str, str] = {
    "onnx": "optexport.exporters.onnx.format:OnnxFormat",
    "torchscript": "optexport.exporters.torch_formats:TorchScriptFormat",
    "pt2": "optexport.exporters.torch_formats:Pt2Format",
    "openvino": "optexport.exporters.openvino:OpenVinoFormat",
}
# What is exported if nobody names formats.
DEFAULT_FORMATS = ("torchscript", "onnx", "pt2")
ENTRY_POINTS = "optexport.formats"

# Suffixes of other files in a bundle.
RESERVED_SUFFIXES = (
    *(".bin", ".bpe", ".data", ".html", ".jinja", ".json", ".model", ".pbtxt", ".safetensors", ".sig", ".spm"),
    *(".toml", ".txt", ".vocab"),
)


# Formats that tests register for a while.
_temporary: dict[str, Format] = {}


@functools.cache
def installed() -> Mapping[str, str]:
    """Returns ``module:Class`` of the formats of installed packages, by name. Built-in formats take precedence."""
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry.value for entry in entry_points if entry.name not in BUILT_IN}


def list_formats() -> tuple[str, ...]:
    """Returns the names of all formats, the built-in ones first."""
    return (*dict.fromkeys((*BUILT_IN, *installed(), *_temporary)),)


def get_format(name: str) -> Format:
    """Returns a format.

    Raises:
        ConfigError: There is no format of this name, or its class is invalid.
    """
    return _temporary.get(name) or _load_format(name)


@contextlib.contextmanager
def registered(format_class: type[Format]) -> Iterator[None]:
    """Registers a format in a ``with`` block, in this process only.

    Raises:
        ConfigError: The class is invalid.
    """
    name = getattr(format_class, "name", "")
    if problem := find_problem(format_class, name):
        raise ConfigError(problem, location=str(format_class), hint="Correct the class of the format.")
    before = _temporary.get(name)
    _temporary[name] = format_class()
    try:
        yield
    finally:
        del _temporary[name]
        if before is not None:
            _temporary[name] = before


@functools.cache
def _load_format(name: str) -> Format:
    import_path = {**installed(), **BUILT_IN}.get(name)
    if import_path is None:
        hint = f"{did_you_mean(name, list_formats())} Or install the package that defines it."
        raise ConfigError(f'unknown format "{name}"', location=name, hint=hint)
    if name not in BUILT_IN and custom_code.is_forbidden():
        raise ConfigError(
            f"the format {name} is custom code, and {custom_code.VARIABLE} forbids custom code", location=import_path
        )
    module_name, _, class_name = import_path.partition(":")
    try:
        format_class = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # code of other packages may raise anything
        raise ConfigError(
            f"the format {name} cannot be imported: {type(error).__name__}: {error}",
            location=import_path,
            hint="Repair or uninstall the package of the format.",
        ) from error
    if problem := find_problem(format_class, name):
        raise ConfigError(problem, location=import_path, hint="Correct the class of the format.")
    format_object: Format = format_class()
    return format_object


def find_problem(format_class: object, name: str) -> str | None:
    """Returns the reason why a class cannot be the format of a name, or None."""
    if not (isinstance(format_class, type) and issubclass(format_class, Format)):
        return f"{format_class!r} is not a subclass of optexport.exporters.Format"
    if inspect.isabstract(format_class):
        return f"{format_class.__name__} must define {' and '.join(sorted(format_class.__abstractmethods__))}"
    texts = {key: getattr(format_class, key, None) for key in ("name", "file_name", "runtime")}
    if missing := [key for key, text in texts.items() if not (isinstance(text, str) and text)]:
        return f"{format_class.__name__} must set {' and '.join(missing)}"
    if format_class.name != name or not re.fullmatch("[a-z][a-z0-9]*", name):
        return (
            f"{format_class.__name__}.name must be the name of the entry point, in lower-case letters and digits "
            f"(found {format_class.name!r} and {name!r})"
        )
    if name in BUILT_IN and BUILT_IN[name] not in [f"{cls.__module__}:{cls.__name__}" for cls in format_class.__mro__]:
        return f"{format_class.__name__}.name is the name of a built-in format (found {name!r})"
    path = PurePath(format_class.file_name)
    taken = RESERVED_SUFFIXES if name in BUILT_IN else (*RESERVED_SUFFIXES, *(get_format(n).suffix for n in BUILT_IN))
    if path.name != format_class.file_name or not path.suffix or path.suffix in taken:
        return f"{format_class.__name__}.file_name must have its own suffix (found {format_class.file_name!r})"
    return None


def is_format(name: str) -> bool:
    """Returns True if a format of this name is built in or installed."""
    return name in list_formats()


def _usable() -> list[Format]:
    """Returns the formats that can be imported. Others raise only where they are named."""
    formats = []
    for name in list_formats():
        with contextlib.suppress(ConfigError):
            formats.append(get_format(name))
    return formats


def find_format_of_file(name: str) -> str | None:
    """Returns the format with a file's suffix, or None."""
    return next((entry.name for entry in _usable() if entry.suffix == PurePath(name).suffix), None)


def list_model_files() -> list[str]:
    """Returns the names of model files of all formats."""
    return [name for entry in _usable() for name in entry.list_files(entry.file_name)]


def list_suffixes() -> tuple[str, ...]:
    """Returns the suffixes of model files of all formats."""
    return tuple(dict.fromkeys(entry.suffix for entry in _usable()))


def list_passes(file_format: str, device: Device = "cpu") -> tuple[str, ...]:
    """Returns the names of the passes of a format on a device, in the order of application."""
    return get_format(file_format).list_passes(device)


def default_passes(
    file_format: str, flags: Collection[str], opset: int | None = None, precision: str | None = None
) -> list[str]:
    """Returns the passes that a file for the CPU gets by default; see `Format.default_passes`."""
    return get_format(file_format).default_passes(flags, opset, precision)


def all_passes() -> Iterator[tuple[FormatPass, tuple[str, ...]]]:
    """Yields each format pass, and the names of its formats."""
    formats = _usable()
    passes = {entry.name: entry for file_format in formats for entry in file_format.passes}
    for name, entry in passes.items():
        yield entry, tuple(file_format.name for file_format in formats if name in file_format.list_passes())


def default_flags(formats: Collection[str]) -> set[str]:
    """Returns the flags of processors that decide the default passes of formats."""
    passes = [entry for name in formats for entry in get_format(name).passes]
    return {flag for entry in passes for flag in (entry.default_flag, entry.slower_flag) if flag is not None}


def check_device(device: Device, formats: Collection[str], location: str) -> None:
    """Checks that a model, and files of these formats, can run on a device here.

    Raises:
        DeviceError: They cannot.
    """
    devices.check_torch(device, location)
    for name in formats:
        get_format(name).check_device(device, location)


def versions(formats: Collection[str]) -> dict[str, str]:
    """Returns the versions of the own packages of formats."""
    return {package: version for name in formats for package, version in get_format(name).versions().items()}
