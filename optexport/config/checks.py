"""Checks of keys that contradict each other, before any expensive work."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optexport._utils import packages
from optexport._utils.extras import check_extra
from optexport.bundle.layout import check_output_path
from optexport.config import format_passes
from optexport.config.source import check_module, is_template, missing_model, source_folder
from optexport.config.tasks import SENTENCES, TRANSFORMER_ALONE, sentence_kind
from optexport.config.validation import Mistakes
from optexport.errors import ConfigError, did_you_mean
from optexport.transformations import registry

if TYPE_CHECKING:
    from optexport.config.schema import Config, InputsConfig, TransformationConfig

# The axes of a tokenizer's tensors, as `optexport.signature.signature` names them.
_OF_TEXT = {"batch", "sequence", "decoder_sequence"}


def check_rule(rule: TransformationConfig, folder: Path, location: str) -> None:
    """Checks the name and the options of a rule.

    Args:
        folder: The folder of the config, which may contain a plugin.
        location: The path of the config, and the rule's index.

    Raises:
        ConfigError: The rule or one of its options does not exist.
    """
    registry.check(rule.use, rule.options, location)
    if rule.use.startswith(registry.PLUGIN):
        check_module(rule.use.removeprefix(registry.PLUGIN), folder, f"{location}.use")


def check_inputs(inputs: InputsConfig, *, of_program: bool, location: str) -> None:
    """Checks the names in ``[inputs]``, if the config alone defines the model's inputs.

    Args:
        of_program: Whether the model is a ``.pt2`` or TorchScript file, which has no tokenizer and no image processor.
        location: The path of the config.

    Raises:
        ConfigError: No input has the named dimension or axis, or the model cannot read this kind of input.
    """
    for key, what in (("texts", "tokenizer"), ("images", "image processor")):
        if of_program and getattr(inputs, key) is not None:
            raise ConfigError(
                f"a .pt2 or TorchScript file has no {what}",
                location=f"{location}: inputs.{key}",
                hint="Give its inputs as data instead.",
            )
    if inputs.tensors is not None:
        for name in inputs.axes:
            if name not in inputs.tensors:
                raise ConfigError(
                    "there is no such input",
                    location=f"{location}: inputs.axes.{name}",
                    hint=did_you_mean(name, list(inputs.tensors)),
                )
        axes = {
            size if isinstance(size, str) else re.sub(r"\W", "_", f"{name}_{axis}")
            for name, spec in inputs.tensors.items()
            for axis, size in enumerate(spec.shape)
        }
        named = {size for spec in inputs.tensors.values() for size in spec.shape if isinstance(size, str)}
        hint = "Name it in the shape of an input."
    elif inputs.texts is not None:
        named = _OF_TEXT | {name for names in inputs.axes.values() for name in names}
        # A tokenizer may return inputs that this package does not know; their axes are numbered.
        axes = named | {name for name in inputs.dynamic or () if name.rpartition("_")[2].isdecimal()}
        hint = "Name the axes of an input with [inputs.axes]."
    else:
        return  # only the data or the model defines the inputs
    for name in inputs.dynamic or ():
        if name not in axes:
            raise ConfigError(
                "no input has such a dimension",
                location=f"{location}: inputs.dynamic.{name}",
                hint=f"{did_you_mean(name, sorted(named))} {hint}",
            )


def check_formats(config: Config, location: str) -> None:
    """Checks that keys for single formats name exported ones, and that the layout has a file.

    Raises:
        ConfigError: A key names a format that is not exported, no exported file fits the layout, or a rule for all
            files is restricted.
    """
    exported = config.export.formats
    said = {f"transformations[{index}].formats": rule.formats or [] for index, rule in enumerate(config.rules())}
    for key, formats in {**said, "export.passes": list(config.export.passes)}.items():
        for missing in [name for name in formats if name not in exported]:
            raise ConfigError(
                f"no {missing} file is exported", location=f"{location}: {key}", hint=f"export.formats is {exported}."
            )
    if config.export.layout is not None and set(exported) == {"pt2"}:
        raise ConfigError(
            "no file is exported that Triton serves",
            location=f"{location}: export.layout",
            hint='Add "onnx" or "torchscript" to export.formats, or leave it out.',
        )
    for index, rule in enumerate(config.rules()):
        if rule.formats is not None and registry.canonical_name(rule.use) == "keep-outputs":
            raise ConfigError(
                "all files have the same outputs",
                location=f"{location}: transformations[{index}].formats",
                hint="Leave it out.",
            )


def check_tolerance(config: Config, without: Collection[str], location: str) -> None:
    """Checks that there is a tolerance if a rule changes the numbers.

    Plugins are not checked: only their class says if they preserve the computation.

    Args:
        without: Names of rules that the run omits.
        location: The path of the config.

    Raises:
        ConfigError: The config sets no tolerance, so the parity check would fail at the end of the run.
    """
    if config.parity.atol is not None or config.parity.rtol is not None:
        return
    left_out = {registry.canonical_name(name) for name in without}
    for index, rule in enumerate(config.rules()):
        name = registry.canonical_name(rule.use)
        if name is not None and name not in left_out and not registry.RULES[name].preserves_computation:
            raise ConfigError(
                f"{name} changes the numbers, and nothing says by how much it may",
                location=f"{location}: transformations[{index}]",
                hint="Set parity.atol or parity.rtol, or leave the rule out.",
            )


def check_device(config: Config, location: str) -> None:
    """Checks that a config for another device than the CPU uses no feature of the CPU alone.

    Raises:
        ConfigError: It uses one.
    """
    if config.model.device == "cpu":
        return
    asked = {
        "generation": config.generation is not None,
        "precision": config.precision is not None,
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
    }
    for file_format, names in config.export.passes.items():
        known = format_passes.of_format(file_format, config.model.device)
        asked |= {f"export.passes.{file_format}: {name}": name not in known for name in names}
    for key in [key for key, value in asked.items() if value]:
        raise ConfigError(
            f'it is done for the CPU alone, and model.device is "{config.model.device}"',
            location=f"{location}: {key}",
            hint="Leave it out, or leave out model.device.",
        )


def check_here(config: Config, path: Path) -> None:
    """Checks that this machine has everything that a run needs.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: The folder has no model, an extra is missing, a package has an unsupported version, or the output
            path is occupied or not writable.
    """
    mistakes = Mistakes(str(path))
    mistakes.of(_check_model_folder, config, path)
    for key, extra, otherwise in _extras(config, path.parent):
        mistakes.of(check_extra, extra, f"{path}: {key}", otherwise)
    mistakes.of(check_output_path, config.output_path(path.parent))
    mistakes.of(packages.check)
    mistakes.tell()


def _check_model_folder(config: Config, path: Path) -> None:
    """Checks the model's folder. Only runs need this: ``init`` also accepts an empty folder."""
    lies = source_folder(config.model.source, path.parent)
    if lies is not None and (missing := missing_model(lies)) is not None:
        raise ConfigError(f"{config.model.source} {missing[0]}", location=f"{path}: model.source", hint=missing[1])


def check_extras(config: Config, path: Path) -> None:
    """Checks that the optional packages that a config needs are installed; imports none.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: One is missing.
    """
    for key, extra, otherwise in _extras(config, path.parent):
        check_extra(extra, f"{path}: {key}", otherwise)


def _extras(config: Config, folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """Returns the keys that need an extra: key, extra, and a hint for doing without it."""
    if config.model.task == SENTENCES:
        yield "model.task", "sentence-transformers", TRANSFORMER_ALONE
    elif config.model.task is None and _has_sentence_modules(config, folder):
        yield "model.source", "sentence-transformers", TRANSFORMER_ALONE
    if config.model.adapter is not None:
        yield "model.adapter", "adapters", None
    if config.inputs.images is not None:
        yield "inputs.images", "images", None


def _has_sentence_modules(config: Config, folder: Path) -> bool:
    """Returns True if `sentence_embedding.wanted` loads a folder's modules without a task."""
    lies = source_folder(config.model.source, folder)
    if lies is None or not (lies / "modules.json").is_file():
        return False
    saved = lies / "config_sentence_transformers.json"
    try:
        return sentence_kind(saved if saved.is_file() else None) == "SentenceTransformer"
    except (OSError, ValueError, AttributeError):  # loading reports this error with more detail
        return False


def open_question(config: Config) -> str | None:
    """Returns a reason why a valid config may still fail to run, or None.

    The reason is that it is a template, or that its inputs depend on the model.
    """
    if is_template(config.model.source):
        return "It is a template: optexport batch CONFIG --from-registry FILTER runs it, for each model of a registry."
    inputs = config.inputs
    given = any(getattr(inputs, key) is not None for key in ("texts", "images", "data", "tensors"))
    if given or not config.model.source.startswith("python:"):
        return None
    return (
        "It gives no inputs: they can be made for a model of transformers; for any other the run will be refused.\n"
        '  Add [inputs.tensors.NAME] with shape = ["batch", ...], or data = "inputs.safetensors".'
    )
