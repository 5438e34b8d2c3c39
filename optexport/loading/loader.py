"""Loads a model from the source in its config."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram

from optexport._utils import imports
from optexport._utils.tensors import bytes_of
from optexport._utils.torch_settings import Settings
from optexport._utils.user_lines import describe_error_and_line
from optexport.config.schema import ModelConfig
from optexport.config.source import TORCHSCRIPT_SUFFIXES, SourceKind, find_model_problem, source_kind
from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError, SourceError, first_line
from optexport.exporters import torch_passes
from optexport.loading import (
    adapters,
    config_limits,
    pretrained_files,
    sentence_embedding,
    torchscript,
)
from optexport.loading.train_mode import find_training_module
from optexport.runtime.untrusted import archives
from optexport.signature import program_arguments
from optexport.signature.arguments import Arguments, Constant, fix_inputs, take_flat_tensors
from optexport.signature.signature import as_arguments, call_signature
from optexport.tracing import dynamo_exporter, script_conversion
from optexport.tracing.module_reconstruction import unlift


@dataclass(frozen=True)
class Pretrained:
    """The location of a model's tokenizer or processor: a folder or hub id, and load options.

    Attributes:
        name: The folder or hub id; empty if there is none, for processors that were passed in Python.
        tokenizer: The tokenizer, if it was loaded with the model.
        image_processor: The image processor, if it replaces the one in the folder.
        prompt: A prefix of every text.
    """

    name: str
    options: Mapping[str, Any]
    tokenizer: Any = None
    prompt: str = ""
    image_processor: Any = None


@dataclass(frozen=True)
class Loaded:
    """A loaded model, in eval mode.

    Attributes:
        model: The original, to trace and to compare with.
        program: The program of a ``.pt2`` file; ``model`` is then its module.
        revision: The version of the source: a commit, or a package with its version; None if unknown.
        pretrained: The location of the tokenizer or processor, or None.
        constants: The fixed arguments, by name.
        converted: The module to trace instead of ``model``, if that is a TorchScript program.
    """

    model: nn.Module
    program: ExportedProgram | None = None
    revision: str | None = None
    pretrained: Pretrained | None = None
    constants: Mapping[str, Constant] = field(default_factory=dict)
    converted: nn.Module | None = None

    @property
    def to_trace(self) -> nn.Module | ExportedProgram:
        return self.program or self.converted or self.model

    def with_example(self, tensors: Mapping[str, torch.Tensor], arguments: Arguments | None) -> Loaded:
        """Returns the model prepared for a trace with an example.

        Args:
            arguments: The places of the tensors in the model's arguments; None if the names are arguments.

        Raises:
            SourceError: The model is a TorchScript program that cannot be converted to a graph.
        """
        model, converted = self.model, self.converted
        if isinstance(model, torch.jit.ScriptModule):
            args, kwargs = ((), dict(tensors)) if arguments is None else arguments.fill(as_arguments(tensors))
            converted = script_conversion.convert(model, args, kwargs)
        constants = {} if isinstance(model, torch.jit.ScriptModule) else _numbers_left_out(model, tensors)
        if arguments is None:
            return replace(self, converted=converted, constants=constants)
        return replace(
            self,
            model=take_flat_tensors(model, arguments),
            converted=None if converted is None else take_flat_tensors(converted, arguments),
            constants={**constants, **arguments.constants},
        )

    def with_constants(self, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> Loaded:
        """Returns the model with some tensors fixed to values.

        Args:
            names: The names of all its tensors.
            constants: The fixed values by name.
        """
        return replace(
            self,
            model=fix_inputs(self.model, names, constants),
            converted=None if self.converted is None else fix_inputs(self.converted, names, constants),
            constants={**self.constants, **constants},
        )

    @classmethod
    def from_program(cls, program: ExportedProgram, revision: str | None = None) -> Loaded:
        """Returns a program with its module."""
        return cls(unlift(program), program, revision, constants=program_arguments.constants(program))

    @cached_property
    def weights_sha256(self) -> str:
        """A digest of the names, dtypes, shapes and bytes of all parameters and buffers.

        Includes buffers that are not saved.
        """
        digest = hashlib.sha256()
        tensors = {**dict(self.model.named_buffers(remove_duplicate=False)), **self.model.state_dict()}
        for name, tensor in sorted(tensors.items()):
            if isinstance(tensor, torch.Tensor):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(bytes_of(tensor.cpu()).numpy().data)
        return digest.hexdigest()


# Process-wide settings that modules change when they are imported. That is once per process, so later runs of their
# models apply them again.
_import_settings: weakref.WeakKeyDictionary[ModuleType, Settings] = weakref.WeakKeyDictionary()

# Heads whose weights have the same names and shapes in models of several tasks.
_HEAD = re.compile(r"For(SequenceClassification|TokenClassification|MultipleChoice|QuestionAnswering)$")
# Options of a model that also apply to its tokenizer.
_SHARED_OPTIONS = ("trust_remote_code", "local_files_only", "revision")


def load(config: ModelConfig, folder: Path, downloaded: Path | None = None) -> Loaded:
    """Loads a model.

    Args:
        folder: The folder of the config; paths are relative to it.
        downloaded: The local copy of an MLflow source: a transformers folder, or a ``.pt2`` file.

    Raises:
        SourceError: The model cannot be loaded, needs untrusted code, or lacks some of its weights.
    """
    if config.adapter is not None:
        config = config.model_copy(update={"adapter": str(_resolved(config.adapter, folder))})
    kind = source_kind(config.source, folder)
    rest = config.source.partition(":")[2]
    if kind is SourceKind.PYTHON:
        return _from_factory(rest, config, folder)
    if kind is SourceKind.PACKAGE:
        location, revision = _in_package(rest)
        return _from_path(location, config, revision)
    if kind is SourceKind.MLFLOW:
        assert downloaded is not None
        return _from_path(downloaded, config, rest)
    if kind is SourceKind.HUB:
        return _from_pretrained(config.source, config, local=False)
    return _from_path(_resolved(config.source, folder), config, None)


def _resolved(path: str, folder: Path) -> Path:
    return (folder / os.path.expanduser(path)).resolve()


def _from_factory(location: str, config: ModelConfig, folder: Path) -> Loaded:
    before = Settings.now()
    factory: Callable[..., Any] = imports.import_from(location, folder, "model.source")
    module = sys.modules[location.partition(":")[0]]
    if (after := Settings.now()) != before:
        _import_settings[module] = after
    elif module in _import_settings:
        _import_settings[module].apply()
    imports.check_makes(nn.Module, factory, location, "model.source")
    try:
        with imports.importing_beside(folder):
            model = factory(**config.arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or exit
        raise SourceError(
            f"the factory raised {describe_error_and_line(error)}",
            location=f"model.source: python:{location}",
            hint=f"Correct the factory or model.arguments. "
            f"The factory is called as {location.rpartition(':')[2]}{imports.parameters(factory)}.",
        ) from error
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"expected a torch.nn.Module from the factory, found {type(model).__name__}",
            location=f"model.source: python:{location}",
            hint="Return the model from the factory.",
        )
    if training := find_training_module(model):
        raise SourceError(
            f"the factory returned a model in eval mode with a module in training mode: {training}",
            location=f"model.source: python:{location}",
            hint="Call model.eval() before the model is returned. Dropout and batch norms differ in training mode.",
        )
    tensors = (*model.named_parameters(), *model.named_buffers())
    if (empty := next((name for name, tensor in tensors if tensor.is_meta), None)) is not None:
        raise SourceError(
            f"the factory returned a model without values for {empty}, which is on the meta device",
            location=f"model.source: python:{location}",
            hint="Call model.to_empty(device='cpu') and load_state_dict, or build it outside of torch.device('meta').",
        )
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return Loaded(model.eval(), pretrained=Pretrained(name, {}) if name else None)


def _numbers_left_out(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Constant]:
    """Returns the arguments of ``forward`` that have a number as their default: the files compute with it.

    A model of transformers has many such options, which its users do not pass.
    """
    if hasattr(model, "main_input_name"):
        return {}
    given = {name.partition(".")[0] for name in tensors}
    return {
        name: parameter.default
        for name, parameter in call_signature(model).parameters.items()
        if name not in given and type(parameter.default) in (int, float)
    }


def _in_package(rest: str) -> tuple[Path, str | None]:
    """Returns a path in a package and the package's version, without importing it."""
    name, _, inner = rest.partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(
            f"the package {name} is not installed",
            location="model.source",
            hint=f"Run pip install {name}, or correct the name.",
        )
    package_path = Path(next(iter(spec.submodule_search_locations)))
    path = package_path / inner
    if not path.exists():
        raise SourceError(
            f"the package {name} has no file or folder {inner}",
            location="model.source",
            hint=f"Choose a file or folder in {package_path}.",
        )
    distributions = importlib.metadata.packages_distributions().get(name, [])
    revision = f"{distributions[0]} {importlib.metadata.version(distributions[0])}" if distributions else None
    return path, revision


def _from_path(path: Path, config: ModelConfig, revision: str | None) -> Loaded:
    if path.suffix == ".pt2":
        program = archives.load_pt2(path)
        torch_passes.restore_aten(program)
        return Loaded.from_program(program, revision)
    if path.suffix in TORCHSCRIPT_SUFFIXES:
        return Loaded(torchscript.load(path), revision=revision)
    if (problem := find_model_problem(path, path.name)) is not None:
        raise SourceError(problem[0], location=str(path), hint=problem[1])
    loaded = _from_pretrained(str(path), config, local=True)
    return Loaded(loaded.model, revision=revision, pretrained=loaded.pretrained)


def _from_pretrained(name: str, config: ModelConfig, *, local: bool) -> Loaded:
    import transformers

    options: dict[str, Any] = {
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": local,
        **({"revision": config.revision} if config.revision else {}),
    }
    architectures = ""
    try:
        if not local:
            pretrained_files.check_reachable(name, options)
        config_limits.check_counts(name, options)
        # transformers loads an adapter in a model's folder by default.
        adapters.check_configs(name, options)
        pretrained_files.check_shards(name)
        if sentence_embedding.is_sentence_model(config.task, name, options):
            return _from_sentence_transformers(name, config, options)
        with dynamo_exporter.quiet(), _block_kernels(options):
            model_config = transformers.AutoConfig.from_pretrained(name, **options)
            architectures = f" The config.json names {', '.join(model_config.architectures or ['no class'])}."
            cls = _model_class(config.task, model_config)
            if config.attn_implementation:
                options["attn_implementation"] = config.attn_implementation
            if config.dtype:
                options["dtype"] = getattr(torch, config.dtype)
            if local:
                config_limits.check_weights(cls, model_config, Path(name), trust_remote_code=config.trust_remote_code)
            model, info = cls.from_pretrained(name, config=model_config, output_loading_info=True, **options)
    except (ConfigError, SourceError):
        raise
    except Exception as error:  # transformers and its hub client raise many kinds
        if "Weights only load failed" in str(error):  # torch's own advice is to run the code
            raise SourceError(
                "the weights are a pickle that calls code, so they are not loaded",
                location=f"model.source: {config.source}",
                hint="Save them as safetensors on a machine that may run this code: model.save_pretrained(folder).",
            ) from error
        raise SourceError(
            f"transformers could not load the model: {first_line(error)}",
            location=f"model.source: {config.source}",
            hint=f"Check the folder and model.task.{architectures}"
            if local
            else f"Check the name and the network. No folder {name} was found, so it is taken as a hub id.",
        ) from error
    adapter = None if config.adapter is None else Path(config.adapter)
    # An adapter may contain other weights, for example of a head that was trained with it.
    adapter_weights = () if adapter is None else adapters.read_weight_names(adapter)
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing := [key for key in absent if key not in adapter_weights]:
        raise SourceError(
            f"{len(missing)} weights are missing in the checkpoint, such as {missing[0]}, and would be random",
            location=f"model.source: {config.source} as {type(model).__name__}",
            hint=f"Set model.task to the task that the model was trained for.{architectures}",
        )
    _check_head(type(model).__name__, model_config, config)
    if adapter is not None:
        model = adapters.merge(model, adapter)
    pretrained = Pretrained(name, {key: options[key] for key in _SHARED_OPTIONS if key in options})
    return Loaded(model.eval(), revision=getattr(model_config, "_commit_hash", None), pretrained=pretrained)


def _check_head(loaded: str, model_config: Any, config: ModelConfig) -> None:
    """Raises SourceError if a head would be used for another task: its weights fit, but its results mean nothing."""
    trained = [name for name in model_config.architectures or [] if _HEAD.search(name)]
    if _HEAD.search(loaded) and trained and loaded not in trained:
        raise SourceError(
            f"the head of {trained[0]} was trained for another task than that of {loaded}",
            location=f"model.task: {config.task}",
            hint="Leave model.task out: the config.json names the class of the model.",
        )


@contextlib.contextmanager
def _block_kernels(options: Mapping[str, Any]) -> Iterator[None]:
    """Blocks kernels of the hub: code that transformers runs if ``kernels`` is installed.

    A model's config may name one, as ``"attn_implementation": "org/name"``. Some transformers models also request one.
    transformers then uses its own code instead, or raises.

    Args:
        options: Options of ``from_pretrained``. ``trust_remote_code`` allows the kernels.
    """
    from transformers.integrations import hub_kernels

    original = hub_kernels.get_kernel
    if not options.get("trust_remote_code"):
        hub_kernels.get_kernel = _refuse_kernel
    try:
        yield
    finally:
        hub_kernels.get_kernel = original


def _refuse_kernel(kernel_name: str, *_: Any, **__: Any) -> NoReturn:
    # transformers continues without a kernel after this error, if the model requested the kernel by default.
    raise FileNotFoundError(f"{kernel_name} is code from the hub, which runs only with model.trust_remote_code = true")


def _from_sentence_transformers(name: str, config: ModelConfig, options: Mapping[str, Any]) -> Loaded:
    if config.adapter is not None:
        raise SourceError(
            "an adapter cannot be merged into a sentence-transformers model",
            location=f"model.adapter: {Path(config.adapter).name}",
            hint='Merge it before you save the model, or export the transformer alone: task = "feature-extraction".',
        )
    settings = {
        "dtype": config.dtype and getattr(torch, config.dtype),
        "attn_implementation": config.attn_implementation,
    }
    model_options = {key: value for key, value in settings.items() if value}
    with dynamo_exporter.quiet(), _block_kernels(options):
        embedder = sentence_embedding.load(name, options, model_options, f"model.source: {config.source}")
    pretrained = Pretrained(name, options, embedder.tokenizer, embedder.prompt)
    revision = getattr(embedder.model.config, "_commit_hash", None)
    return Loaded(embedder.model, revision=revision, pretrained=pretrained)


def _model_class(task: str | None, model_config: Any) -> Any:
    import transformers

    if task is not None:
        return getattr(transformers, AUTO_CLASSES[task])
    classes = [getattr(transformers, name, None) for name in model_config.architectures or []]
    return next((cls for cls in classes if cls is not None), transformers.AutoModel)
