"""The kinds of model sources, and checks that a source exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from optexport.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from optexport.config.inputs import InputsConfig
    from optexport.config.schema import Config

TORCHSCRIPT_SUFFIXES = (".pt", ".ts", ".jit")
DATA_SUFFIXES = (".safetensors", ".npz", ".jsonl")
# Suffixes of files that hold weights without the code of the model.
_WEIGHTS_SUFFIXES = (".pth", ".bin", ".safetensors", ".ckpt")
_FILE_SUFFIXES = (*_WEIGHTS_SUFFIXES, ".onnx", ".pt2", *TORCHSCRIPT_SUFFIXES)

# Placeholders in the template of a batch, replaced for each model of a registry.
NAME, VERSION = "{name}", "{version}"

# Names of functions that say nothing about the model.
_USUAL_FACTORIES = ("build", "load", "make", "create")

_PATH_HINT = "Correct the path, which is relative to the folder of the config."
_FACTORY = '"python:my_model:build"'


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


def is_model_source(text: str) -> bool:
    """Returns True if a text names a model and no file that could be a config."""
    kind = source_kind(text, Path())
    if kind is SourceKind.HUB:
        is_file = text.endswith(".toml") or _is_file_name(text, Path()) or os.path.exists(text)
        return _is_hub_id(text) and not is_file
    return kind is not SourceKind.FOLDER or os.path.isdir(text)


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
        raise ConfigError(
            f'the source "{source}" has no name of a package', location=location, hint='Write "package:NAME/PATH".'
        )
    package_path = find_package_folder(package)
    if package_path is None:
        raise ConfigError(
            f"the package {package} is not installed",
            location=location,
            hint=f"Run pip install {package}, or correct the name.",
        )
    if not (_is_dir(package_path, inner) or _is_file(package_path, inner)):
        raise ConfigError(
            f"the package {package} has no file or folder {inner}",
            location=location,
            hint=f"Choose a file or folder in {package_path}.",
        )


def _check_python_source(source: str, folder: Path, location: str) -> None:
    spec = source.partition(":")[2]
    module, _, name = spec.partition(":")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f'"{source}" is not of the form "python:module:factory"',
            location=location,
            hint=f"Write the module and the function that builds the model, such as {_FACTORY}.",
        )
    if module.endswith(".py"):
        hint = f'Write "python:{_module_name(module)}:{name}".'
        raise ConfigError(f"{module} is a file, not a module", location=location, hint=hint)
    check_module(spec, folder, location)


def _module_name(path: str) -> str:
    """Returns the name of the module in a Python file, relative to the config."""
    return ".".join(part for part in Path(path).with_suffix("").parts if part.isidentifier())


def _check_mlflow_source(source: str, folder: Path, location: str) -> None:  # noqa: ARG001 - as the other checks
    if not source.partition(":")[2].startswith(("models:/", "runs:/")):
        raise ConfigError(
            f'"{source}" is not the address of a model in MLflow',
            location=location,
            hint='Write "mlflow:models:/NAME@ALIAS" or "mlflow:runs:/RUN_ID/PATH".',
        )


def _check_file_source(source: str, folder: Path, location: str) -> None:
    if not _is_file(folder, source):
        path, parent = Path(source), os.path.dirname(source)
        files = (folder / Path(parent).expanduser()).glob("*") if _is_dir(folder, parent) else ()
        names = sorted(str(path.with_name(file.name)) for file in files if file.suffix in _FILE_SUFFIXES)
        hint = did_you_mean(source, names) if names else _PATH_HINT
        raise ConfigError(f"the file {source} does not exist", location=location, hint=hint)


def _check_folder_source(source: str, folder: Path, location: str) -> None:
    if _is_file(folder, source):
        refuse_file(source, folder, location)
    if not _is_dir(folder, source) and _is_file_name(source, folder):
        _check_file_source(source, folder, location)
    if not _is_dir(folder, source):
        raise ConfigError(f"the folder {source} does not exist", location=location, hint=_PATH_HINT)


def _check_hub_source(source: str, folder: Path, location: str) -> None:
    """Checks that a source without prefix, file or folder is a valid hub id."""
    if _is_file(folder, source):
        refuse_file(source, folder, location)
    if _is_file_name(source, folder):
        _check_file_source(source, folder, location)
    if _is_hub_id(source):
        return
    code = re.fullmatch(r"([\w/]+?)(?:\.py)?:(\w+)", source)
    if code and _is_file(folder, f"{code[1]}.py"):
        hint = f'Write "python:{code[1].replace("/", ".")}:{code[2]}".'
    else:
        hint = 'Write a path, "org/name", "package:NAME/PATH", "python:module:factory" or "mlflow:models:/...".'
    raise ConfigError(f'"{source}" is neither an existing folder nor a valid hub id', location=location, hint=hint)


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", source) is not None


def _is_file_name(source: str, folder: Path) -> bool:
    """Returns True for the name of a model file, existing or not, in an existing folder."""
    return source.endswith(_FILE_SUFFIXES) and _is_dir(folder, os.path.dirname(source))


def is_other_model_file(path: Path) -> bool:
    """Returns True for an existing file of weights or an ONNX file, which are no sources."""
    return path.suffix in (*_WEIGHTS_SUFFIXES, ".onnx") and path.is_file()


def refuse_file(source: str, folder: Path, location: str) -> NoReturn:
    """Raises the error for a file that is neither a ``.pt2`` nor a TorchScript file."""
    path = folder / Path(source).expanduser()
    message, hint = f"{source} is not a file that a model can be loaded from", f"Set source to {_KINDS_OF_SOURCES}."
    if path.suffix in _WEIGHTS_SUFFIXES:
        message, hint = _explain_weights(path, source)
    elif path.suffix == ".onnx":
        message = f"{source} is an ONNX file, not a PyTorch model"
        hint = (
            "optexport starts from PyTorch: set source to the model that the file was made from. "
            f"To measure the file: optexport bench {shlex.quote(source)}. "
            "To compare the files of two bundles: optexport diff A/model.onnx B/model.onnx"
        )
    elif path.suffix == ".py":
        hint = f'Choose a function in it that builds the model, and write "python:{_module_name(source)}:FUNCTION".'
    raise ConfigError(message, location=location, hint=hint)


_KINDS_OF_SOURCES = f"a folder, a .pt2 file, or a TorchScript file ({', '.join(TORCHSCRIPT_SUFFIXES)})"


def _explain_weights(path: Path, name: str) -> tuple[str, str]:
    """Returns a message and a hint for a weights file as a model."""
    hint = (
        f"Write a function that builds the model and loads the weights, and set source = {_FACTORY}. "
        f"To get a draft of both: optexport init {shlex.quote(name)}"
    )
    if (path.parent / "config.json").is_file():
        hint = "Set source to the folder of this file, which has the config.json of the model."
    return f"{name} is a weights file, not a model", hint


_CHECKS = {
    SourceKind.PACKAGE: _check_package_source,
    SourceKind.PYTHON: _check_python_source,
    SourceKind.MLFLOW: _check_mlflow_source,
    SourceKind.PT2: _check_file_source,
    SourceKind.TORCHSCRIPT: _check_file_source,
    SourceKind.FOLDER: _check_folder_source,
    SourceKind.HUB: _check_hub_source,
}


def check_source_keys(config: Config, path: Path) -> None:
    """Checks that the kind of source supports the model's other keys, and that files exist.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: A file or folder does not exist, or the kind of source does not support a key.
    """
    folder, model = path.parent, config.model
    kind = source_kind(model.source, folder)
    if model.arguments and kind is not SourceKind.PYTHON:
        raise ConfigError(
            "only a python: source takes arguments",
            location=f"{path}: model.arguments",
            hint=f"Remove arguments, or set source = {_FACTORY}.",
        )
    attention = model.attn_implementation
    if attention is not None and "/" in attention and not model.trust_remote_code:
        raise ConfigError(
            f'"{attention}" is code from the hub, which may not run',
            location=f"{path}: model.attn_implementation",
            hint="Read that code, then set model.trust_remote_code = true.",
        )
    if model.adapter is not None and kind in (SourceKind.PYTHON, SourceKind.PT2, SourceKind.TORCHSCRIPT):
        raise ConfigError(
            f"an adapter can only be merged into a transformers model, not into {model.source}",
            location=f"{path}: model.adapter",
            hint="Remove adapter, or set model.source to a folder or a hub id.",
        )
    if model.adapter is not None and not _is_dir(folder, model.adapter):
        raise ConfigError(
            f"the folder {model.adapter} does not exist", location=f"{path}: model.adapter", hint=_PATH_HINT
        )
    try:
        Path(config.export.output).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the home folder in {config.export.output} is unknown: {error}",
            location=f"{path}: export.output",
            hint="Write a path without ~.",
        ) from error
    _check_input_files(config.inputs, path)


def _check_input_files(inputs: InputsConfig, path: Path) -> None:
    if inputs.data is not None and not _is_file(path.parent, inputs.data):
        raise ConfigError(f"the file {inputs.data} does not exist", location=f"{path}: inputs.data", hint=_PATH_HINT)
    if inputs.data is not None and Path(inputs.data).suffix not in DATA_SUFFIXES:
        raise ConfigError(
            f"{inputs.data} is not a supported kind of data file",
            location=f"{path}: inputs.data",
            hint="Write the name of a .safetensors, .npz or .jsonl file.",
        )
    for image in inputs.images or []:
        if not _is_file(path.parent, image):
            raise ConfigError(f"the file {image} does not exist", location=f"{path}: inputs.images", hint=_PATH_HINT)


def model_name(source: str, folder: Path) -> str:
    """Returns the name of a model, for its output and its experiment.

    Args:
        folder: The folder that a relative source starts at.
    """
    kind = source_kind(source, folder)
    path = (folder / source).resolve().name if _is_dir(folder, source) else source.rstrip("/").rpartition("/")[2]
    name = source[len("package:") :].partition("/")[0] if kind is SourceKind.PACKAGE else path.rpartition(":")[2]
    if kind is SourceKind.PYTHON:
        module = source.removeprefix("python:").partition(":")[0].rpartition(".")[2]
        name = module if name in _USUAL_FACTORIES else f"{module}-{name}"
    if kind is SourceKind.MLFLOW:  # the last part of the URI is a version
        name = source.partition(":/")[2].strip("/").replace("/", "-") or name
    for suffix in (".pt2", *TORCHSCRIPT_SUFFIXES):
        name = name.removesuffix(suffix) or name  # do not name the output folder after the file
    return name if name.strip(".") else "model"


def find_package_folder(package: str) -> Path | None:
    """Returns the folder of a package, without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def find_source_folder(source: str, folder: Path) -> Path | None:
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
    package_path = find_package_folder(package)
    return None if package_path is None else package_path / inner


def is_weights_file(source: str, folder: Path) -> bool:
    """Returns True if a source is a file of weights, without a config.json next to it."""
    path = folder / Path(source).expanduser()
    return path.suffix in _WEIGHTS_SUFFIXES and path.is_file() and not (path.parent / "config.json").is_file()


def find_model_problem(path: Path, name: str) -> tuple[str, str] | None:
    """Returns why a path is not a model, and a hint; None if it is one.

    Args:
        path: A transformers folder, or a program such as a ``.pt2`` file, which is not checked.
        name: The name of the path in the message.
    """
    is_program = path.suffix in (".pt2", *TORCHSCRIPT_SUFFIXES)
    if is_program or any((path / file).is_file() for file in ("config.json", "modules.json")):
        return None
    if path.suffix in _WEIGHTS_SUFFIXES and path.is_file():
        return _explain_weights(path, name)
    if (path / "manifest.json").is_file() and (path / "model.pt2").is_file():
        return f"{name} is an exported bundle, not a model", f"Set source to {path / 'model.pt2'}."
    return (
        f"{name} has no config.json, so it is not the folder of a transformers model",
        f"Set source to a folder that save_pretrained wrote, a .pt2 or TorchScript file, or a function: {_FACTORY}.",
    )


def check_module(spec: str, folder: Path, location: str) -> None:
    """Checks that the module of ``module:name`` exists, without importing it.

    Raises:
        ConfigError: It does not exist.
    """
    module = spec.partition(":")[0].partition(".")[0]
    if not module:
        raise ConfigError(
            f'"{spec}" names no module',
            location=location,
            hint='Write "python:package.module:name", without a path.',
        )
    try:
        is_local = _is_file(folder, f"{module}.py") or _is_dir(folder, module)
        exists = is_local or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not module.isidentifier() or not exists:
        raise ConfigError(
            f"the module {module} does not exist",
            location=location,
            hint=f"Install the package of the module, or put {module}.py in the folder of the config.",
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
