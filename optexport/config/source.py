"""The kinds of model sources, and checks that a source exists."""

from __future__ import annotations

import importlib.util
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.schema import Config

TORCHSCRIPT_SUFFIXES = (".pt", ".ts", ".jit")
DATA_SUFFIXES = (".safetensors", ".npz", ".jsonl")


# Placeholders in the template of a batch, replaced for each model of a registry.
NAME, VERSION = "{name}", "{version}"


class SourceKind(StrEnum):
    """Kind of a model's source."""

    PACKAGE = "package"
    PYTHON = "python"
    MLFLOW = "mlflow"
    PT2 = "pt2"
    TORCHSCRIPT = "torchscript"
    FOLDER = "folder"
    HUB = "hub"


def source_kind(source: str, folder: Path) -> SourceKind:
    """Returns the kind of a model's source; paths are relative to the config's folder."""
    prefix = source.partition(":")[0]
    if prefix in ("package", "python", "mlflow") and ":" in source:
        return SourceKind(prefix)
    if source.endswith(".pt2"):
        return SourceKind.PT2
    if source.endswith(TORCHSCRIPT_SUFFIXES):
        return SourceKind.TORCHSCRIPT
    if source.startswith((".", "/", "~")) or _is_dir(folder, source):
        return SourceKind.FOLDER
    return SourceKind.HUB


def is_template(source: str) -> bool:
    """Returns True if a source has placeholders for the models of a registry."""
    return source.startswith("mlflow:") and (NAME in source or VERSION in source)


def check_source(config: Config, path: Path) -> None:
    """Checks that the file, folder, package or module of the model's source exists.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: It does not exist, or the source is malformed.
    """
    source = config.model.source
    check = _CHECKS[source_kind(source, path.parent)]
    check(source, path.parent, f"{path}: model.source")


def _check_package_source(source: str, folder: Path, location: str) -> None:  # noqa: ARG001 - as the other checks
    package, _, inner = source.partition(":")[2].partition("/")
    if not package:
        raise ConfigError("it names no package", location=location, hint='Write "package:NAME/PATH".')
    package_path = package_folder(package)
    if package_path is None:
        raise ConfigError(f"the package {package} is not installed", location=location, hint="pip install it.")
    if not (_is_dir(package_path, inner) or _is_file(package_path, inner)):
        hint = f"Look in {package_path}."
        raise ConfigError(f"the package {package} has no {inner}", location=location, hint=hint)


def _check_python_source(source: str, folder: Path, location: str) -> None:
    spec = source.partition(":")[2]
    module, _, name = spec.partition(":")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f'"{source}" is not of the form "python:module:factory"', location=location)
    if module.endswith(".py"):
        hint = f'Write "python:{module.removesuffix(".py").replace("/", ".")}:{name}".'
        raise ConfigError(f"{module} is a file, and a module is asked for", location=location, hint=hint)
    check_module(spec, folder, location)


def _check_mlflow_source(source: str, folder: Path, location: str) -> None:  # noqa: ARG001 - as the other checks
    if not source.partition(":")[2].startswith(("models:/", "runs:/")):
        raise ConfigError(f'"{source}" names no model', location=location, hint='Write "mlflow:models:/NAME@ALIAS".')


def _check_file_source(source: str, folder: Path, location: str) -> None:
    if not _is_file(folder, source):
        raise ConfigError(f"there is no file {source}", location=location)


def _check_folder_source(source: str, folder: Path, location: str) -> None:
    if not _is_dir(folder, source):
        raise ConfigError(f"there is no folder {source}", location=location)


def _check_hub_source(source: str, folder: Path, location: str) -> None:
    """Checks that a source without prefix, file or folder is a valid hub id."""
    if _is_file(folder, source):
        if source.endswith(".py"):
            hint = f'Of a function in it write "python:{source.removesuffix(".py")}:FUNCTION".'
        else:
            hint = f"Give a folder, a .pt2 file, or one of TorchScript ({', '.join(TORCHSCRIPT_SUFFIXES)})."
        raise ConfigError(f"{source} is a file of no kind that models are taken from", location=location, hint=hint)
    if re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", source):
        return
    code = re.fullmatch(r"([\w/]+?)(?:\.py)?:(\w+)", source)
    if code and _is_file(folder, f"{code[1]}.py"):
        hint = f'Write "python:{code[1].replace("/", ".")}:{code[2]}".'
    else:
        hint = 'Write a path, "org/name", "package:NAME/PATH", "python:module:factory" or "mlflow:models:/...".'
    raise ConfigError(f'"{source}" is no folder here, and no hub id either', location=location, hint=hint)


_CHECKS = {
    SourceKind.PACKAGE: _check_package_source,
    SourceKind.PYTHON: _check_python_source,
    SourceKind.MLFLOW: _check_mlflow_source,
    SourceKind.PT2: _check_file_source,
    SourceKind.TORCHSCRIPT: _check_file_source,
    SourceKind.FOLDER: _check_folder_source,
    SourceKind.HUB: _check_hub_source,
}


def check_beside_source(config: Config, path: Path) -> None:
    """Checks that the kind of source supports the model's other keys, and that files exist.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: A file or folder does not exist, or the kind of source does not support a key.
    """
    folder = path.parent
    kind = source_kind(config.model.source, folder)
    if config.model.arguments and kind is not SourceKind.PYTHON:
        raise ConfigError("only a python: source takes arguments", location=f"{path}: model.arguments")
    attention = config.model.attn_implementation
    if attention is not None and "/" in attention and not config.model.trust_remote_code:
        raise ConfigError(
            f'"{attention}" is code of the hub\'s',
            location=f"{path}: model.attn_implementation",
            hint="Read that code, then model.trust_remote_code = true runs it.",
        )
    if config.model.adapter is not None and kind in (SourceKind.PYTHON, SourceKind.PT2, SourceKind.TORCHSCRIPT):
        raise ConfigError("only a model of transformers takes one", location=f"{path}: model.adapter")
    if config.model.adapter is not None and not _is_dir(folder, config.model.adapter):
        raise ConfigError(f"there is no folder {config.model.adapter}", location=f"{path}: model.adapter")
    try:
        Path(config.export.output).expanduser()
    except RuntimeError as error:
        raise ConfigError(str(error), location=f"{path}: export.output") from error
    if config.inputs.data is not None and not _is_file(folder, config.inputs.data):
        raise ConfigError(f"there is no file {config.inputs.data}", location=f"{path}: inputs.data")
    if config.inputs.data is not None and Path(config.inputs.data).suffix not in DATA_SUFFIXES:
        raise ConfigError(
            f"files of the kind {Path(config.inputs.data).suffix or config.inputs.data} are not known",
            location=f"{path}: inputs.data",
            hint="Give .safetensors, .npz, or .jsonl.",
        )
    for image in config.inputs.images or []:
        if not _is_file(folder, image):
            raise ConfigError(f"there is no file {image}", location=f"{path}: inputs.images")


def package_folder(package: str) -> Path | None:
    """Returns the folder of a package, without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def source_folder(source: str, folder: Path) -> Path | None:
    """Returns the local folder of a source, existing or not; None for other kinds of sources.

    Args:
        folder: The folder of the config.
    """
    kind = source_kind(source, folder)
    if kind is SourceKind.FOLDER:
        return folder / os.path.expanduser(source)
    if kind is not SourceKind.PACKAGE:
        return None
    package, _, inner = source.removeprefix("package:").partition("/")
    found = package_folder(package)
    return None if found is None else found / inner


def missing_model(path: Path) -> tuple[str, str] | None:
    """Returns why a path is not a transformers model and a hint, or None if it is one.

    A program such as a ``.pt2`` file also gives None.
    """
    is_program = path.suffix in (".pt2", *TORCHSCRIPT_SUFFIXES)
    if is_program or any((path / name).is_file() for name in ("config.json", "modules.json")):
        return None
    if (path / "manifest.json").is_file() and (path / "model.pt2").is_file():
        return "is a bundle, and no model to start from", f"Name {path / 'model.pt2'}."
    return (
        "holds no config.json, so it is no folder of a transformers model",
        'Give the folder that save_pretrained wrote, a .pt2 or TorchScript file, or "python:module:factory".',
    )


def check_module(spec: str, folder: Path, location: str) -> None:
    """Checks that the module of ``module:name`` exists, without importing it.

    Raises:
        ConfigError: It does not exist.
    """
    module = spec.partition(":")[0].partition(".")[0]
    if not module:
        raise ConfigError(
            f'"{spec}" names no module', location=location, hint='Write "python:package.module:name", without a path.'
        )
    try:
        found = _is_file(folder, f"{module}.py") or _is_dir(folder, module) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if not module.isidentifier() or not found:
        raise ConfigError(
            f"there is no module {module}", location=location, hint=f"Install it, or put {module}.py beside the config."
        )


def _is_file(folder: Path, name: str) -> bool:
    try:
        return (folder / Path(name).expanduser()).is_file()
    except (OSError, RuntimeError, ValueError):  # the text is not a valid file name
        return False


def _is_dir(folder: Path, name: str) -> bool:
    try:
        return (folder / Path(name).expanduser()).is_dir()
    except (OSError, RuntimeError, ValueError):
        return False
