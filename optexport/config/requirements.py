"""Checks what a config needs of this machine: a model, packages, and a writable output folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optexport._utils import packages
from optexport._utils.extras import check_extra
from optexport.bundle.layout import check_output_path
from optexport.config.source import find_model_problem, find_source_folder, is_template
from optexport.config.tasks import OR_TRANSFORMER_ALONE, SENTENCES, sentence_kind
from optexport.config.validation import Mistakes
from optexport.errors import ConfigError
from optexport.exporters.registry import get_format
from optexport.runtime.devices import check_weight_bits
from optexport.runtime.providers import check_available

if TYPE_CHECKING:
    from optexport.config.schema import Config


def check_machine(config: Config, path: Path) -> None:
    """Checks that this machine has everything that a run needs.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: The folder has no model, an extra is missing, a package has an unsupported version, or the output
            path is occupied or not writable.
        DeviceError: An execution provider or a needed feature of the processor is not available.
    """
    mistakes = Mistakes(str(path))
    mistakes.collect(_check_model_folder, config, path)
    for key, extra, alternative in _extras(config, path.parent):
        mistakes.collect(check_extra, extra, f"{path}: {key}", alternative)
    mistakes.collect(check_formats_installed, config, str(path))
    mistakes.collect(check_output_path, config.output_path(path.parent))
    mistakes.collect(packages.check)
    mistakes.raise_all()
    check_onnx_file_runs(config, path)


def check_onnx_file_runs(config: Config, path: Path) -> None:
    """Checks that this machine has the execution providers and the processor that the ONNX file of a config needs.

    Args:
        path: The path of the config.

    Raises:
        DeviceError: An execution provider or a needed feature of the processor is not available.
    """
    check_available(config.export.onnx.providers, f"{path}: export.onnx.providers")
    if config.precision is not None:
        check_weight_bits(config.precision.weight_bits, f"{path}: precision.weight_bits")


def _check_model_folder(config: Config, path: Path) -> None:
    """Checks the model's folder. Only runs need this: ``init`` also accepts an empty folder."""
    folder = find_source_folder(config.model.source, path.parent)
    problem = None if folder is None else find_model_problem(folder, config.model.source)
    if problem is not None:
        raise ConfigError(problem[0], location=f"{path}: model.source", hint=problem[1])


def check_extras(config: Config, path: Path) -> None:
    """Checks that the optional packages that a config needs are installed; imports none.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: One is missing.
    """
    for key, extra, alternative in _extras(config, path.parent):
        check_extra(extra, f"{path}: {key}", alternative)
    check_formats_installed(config, str(path))


def check_formats_installed(config: Config, location: str) -> None:
    """Checks that the packages of the exported formats are installed.

    Raises:
        ConfigError: One is missing.
    """
    for name in config.export.formats:
        get_format(name).check_installed(f"{location}: export.formats")


def _extras(config: Config, folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """Returns the keys that need an extra: key, extra, and a hint for doing without it."""
    if config.model.task == SENTENCES:
        yield "model.task", "sentence-transformers", OR_TRANSFORMER_ALONE
    elif config.model.task is None and _has_sentence_modules(config, folder):
        yield "model.source", "sentence-transformers", OR_TRANSFORMER_ALONE
    if config.model.adapter is not None:
        yield "model.adapter", "adapters", None
    if config.inputs.images is not None:
        yield "inputs.images", "images", None


def _has_sentence_modules(config: Config, folder: Path) -> bool:
    """Returns True if `sentence_embedding.is_sentence_model` selects a folder without a task."""
    model_folder = find_source_folder(config.model.source, folder)
    if model_folder is None or not (model_folder / "modules.json").is_file():
        return False
    settings = model_folder / "config_sentence_transformers.json"
    try:
        return sentence_kind(settings if settings.is_file() else None) == "SentenceTransformer"
    except (OSError, ValueError, AttributeError):  # loading reports this error with more detail
        return False


def find_open_question(config: Config) -> str | None:
    """Returns a reason why a valid config may still fail to run, or None.

    The reason is that it is a template, or that its inputs depend on the model.
    """
    if is_template(config.model.source):
        return "The config is a template. To run it for each model, use: optexport batch CONFIG --from-registry FILTER"
    inputs = config.inputs
    has_inputs = any(getattr(inputs, key) is not None for key in ("texts", "images", "data", "tensors"))
    if has_inputs or not config.model.source.startswith("python:"):
        return None
    return (
        "The config has no inputs. Only transformers models get example inputs; runs of other models will fail.\n"
        '  Add [inputs.tensors.NAME] with shape = ["batch", ...], or data = "inputs.safetensors" to [inputs].'
    )
