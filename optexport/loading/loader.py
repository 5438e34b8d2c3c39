"""Loads a model from the source in its config."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from optexport._utils.tensors import bytes_of
from optexport._utils.torch_settings import Settings
from optexport.config.schema import ModelConfig
from optexport.config.source import TORCHSCRIPT_SUFFIXES, SourceKind, missing_model, source_kind
from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError, SourceError, first_line
from optexport.exporters.torchscript import passes as torch_passes
from optexport.loading import (
    adapters,
    config_limits,
    hub_kernels,
    pretrained_files,
    sentence_embedding,
    torchscript,
)
from optexport.runtime.untrusted import archives
from optexport.signature import exported_program
from optexport.signature.arguments import Arguments, Constant, fix_inputs, take_flat_tensors
from optexport.signature.signature import as_arguments
from optexport.tracing import transformers_exporter
from optexport.tracing.module_reconstruction import unlift
from optexport.transformations import registry


@dataclass(frozen=True)
class Pretrained:
    """The location of a model's tokenizer or processor: a folder or hub id, and load options.

    Attributes:
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

    def called_with(self, tensors: Mapping[str, torch.Tensor], arguments: Arguments | None) -> Loaded:
        """Returns the model prepared for a trace with an example.

        Args:
            arguments: The places of the tensors in the model's arguments; None if the names are arguments.

        Raises:
            SourceError: The model is a TorchScript program that cannot be converted to a graph.
        """
        model, converted = self.model, self.converted
        if isinstance(model, torch.jit.ScriptModule):
            args, kwargs = ((), dict(tensors)) if arguments is None else arguments.fill(as_arguments(tensors))
            converted = torchscript.convert(model, args, kwargs)
        if arguments is None:
            return replace(self, converted=converted)
        return replace(
            self,
            model=take_flat_tensors(model, arguments),
            converted=None if converted is None else take_flat_tensors(converted, arguments),
            constants=arguments.constants,
        )

    def holding(self, names: Sequence[str], held: Mapping[str, torch.Tensor]) -> Loaded:
        """Returns the model with some tensors fixed to values.

        Args:
            names: The names of all its tensors.
            held: The fixed values by name.
        """
        return replace(
            self,
            model=fix_inputs(self.model, names, held),
            converted=None if self.converted is None else fix_inputs(self.converted, names, held),
            constants={**self.constants, **held},
        )

    @classmethod
    def of_program(cls, program: ExportedProgram, revision: str | None = None) -> Loaded:
        """Returns a program with its module."""
        return cls(unlift(program), program, revision, constants=exported_program.constants(program))

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
_set_by: weakref.WeakKeyDictionary[ModuleType, Settings] = weakref.WeakKeyDictionary()

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
    factory: Callable[..., Any] = registry.import_from(location, folder, "model.source")
    module = sys.modules[location.partition(":")[0]]
    if (after := Settings.now()) != before:
        _set_by[module] = after
    elif module in _set_by:
        _set_by[module].apply()
    registry.check_makes(nn.Module, factory, location, "model.source")
    try:
        with registry.importing_beside(folder):
            model = factory(**config.arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or exit
        raise SourceError(
            f"the factory raised {type(error).__name__}: {first_line(error)}",
            location=f"model.source: python:{location}",
            hint=f"It is called as {location.rpartition(':')[2]}{registry.parameters(factory)}.",
        ) from error
    if not isinstance(model, nn.Module):
        raise SourceError(f"the factory returned a {type(model).__name__}, not a module", location=f"python:{location}")
    training = next((name for name, part in model.named_modules() if part.training and _heeds_training(part)), None)
    if training and not model.training:
        raise SourceError(
            f"the factory returned a model in eval mode, and {training} in it is in training mode",
            location=f"model.source: python:{location}",
            hint="Call model.eval() at its end: dropout and batch norms compute something else in training.",
        )
    tensors = (*model.named_parameters(), *model.named_buffers())
    if (unfilled := next((name for name, tensor in tensors if tensor.is_meta), None)) is not None:
        raise SourceError(
            f"the factory returned a model whose {unfilled} holds no values: it is on the meta device",
            location=f"model.source: python:{location}",
            hint="Call model.to_empty(device='cpu') and load_state_dict, or make it outside of torch.device('meta').",
        )
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return Loaded(model.eval(), pretrained=Pretrained(name, {}) if name else None)


def _heeds_training(module: nn.Module) -> bool:
    """Returns True if the code of a module reads ``self.training``; an activation does not."""
    try:
        return any(
            "self.training" in inspect.getsource(kind) for kind in type(module).__mro__[: -len(nn.Module.__mro__)]
        )
    except (OSError, TypeError):
        return True


def _in_package(rest: str) -> tuple[Path, str | None]:
    """Returns a path in a package and the package's version, without importing it."""
    name, _, inner = rest.partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"the package {name} is not installed", location="model.source", hint="pip install it.")
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.exists():
        raise SourceError(f"the package {name} has no {inner}", location="model.source")
    distributions = importlib.metadata.packages_distributions().get(name, [])
    revision = f"{distributions[0]} {importlib.metadata.version(distributions[0])}" if distributions else None
    return path, revision


def _from_path(path: Path, config: ModelConfig, revision: str | None) -> Loaded:
    if path.suffix == ".pt2":
        program = archives.load_pt2(path)
        torch_passes.raise_again(program)
        return Loaded.of_program(program, revision)
    if path.suffix in TORCHSCRIPT_SUFFIXES:
        return Loaded(torchscript.load(path), revision=revision)
    if (missing := missing_model(path)) is not None:
        raise SourceError(f"it {missing[0]}", location=str(path), hint=missing[1])
    loaded = _from_pretrained(str(path), config, local=True)
    return Loaded(loaded.model, revision=revision, pretrained=loaded.pretrained)


def _from_pretrained(name: str, config: ModelConfig, *, local: bool) -> Loaded:
    import transformers

    options: dict[str, Any] = {
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": local,
        **({"revision": config.revision} if config.revision else {}),
    }
    trained_for = ""
    try:
        if not local:
            pretrained_files.check_reachable(name, options)
        config_limits.check_counts(name, options)
        # transformers loads an adapter in a model's folder by default.
        adapters.check_configs(name, options)
        pretrained_files.check_shards(name)
        if sentence_embedding.wanted(config.task, name, options):
            return _from_sentence_transformers(name, config, options)
        with transformers_exporter.quiet(), hub_kernels.refused(options):
            model_config = transformers.AutoConfig.from_pretrained(name, **options)
            trained_for = f"; its config names {', '.join(model_config.architectures or ['no task'])}"
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
                "its weights are a pickle that calls code, which is not run",
                location=f"model.source: {config.source}",
                hint="Save them as safetensors, on a machine that may run that code: model.save_pretrained(folder).",
            ) from error
        raise SourceError(
            f"transformers could not load it: {first_line(error)}",
            location=f"model.source: {config.source}",
            hint=f"Check the folder, and model.task{trained_for}."
            if local
            else f"There is no folder {name} beside the config, so that it is looked for on the hub. "
            "Check the path, or the name and the network.",
        ) from error
    adapter = None if config.adapter is None else Path(config.adapter)
    brought = () if adapter is None else adapters.saved_weights(adapter)  # for example a head that was trained with it
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing := [key for key in absent if key not in brought]:
        raise SourceError(
            f"{len(missing)} weights are not in the checkpoint, {missing[0]} for one: they would be random numbers",
            location=f"model.source: {config.source} as {type(model).__name__}",
            hint=f"Choose the task that it was trained for; its config names {model_config.architectures}.",
        )
    if adapter is not None:
        model = adapters.merge(model, adapter)
    beside = Pretrained(name, {key: options[key] for key in _SHARED_OPTIONS if key in options})
    return Loaded(model.eval(), revision=getattr(model_config, "_commit_hash", None), pretrained=beside)


def _from_sentence_transformers(name: str, config: ModelConfig, options: Mapping[str, Any]) -> Loaded:
    if config.adapter is not None:
        raise SourceError(
            "an adapter is not merged into the modules of sentence-transformers",
            location=f"model.adapter: {Path(config.adapter).name}",
            hint='Merge it before saving the model, or export the transformer alone: task = "feature-extraction".',
        )
    given = {"dtype": config.dtype and getattr(torch, config.dtype), "attn_implementation": config.attn_implementation}
    with transformers_exporter.quiet(), hub_kernels.refused(options):
        found = sentence_embedding.load(
            name, options, {key: value for key, value in given.items() if value}, f"model.source: {config.source}"
        )
    beside = Pretrained(name, options, found.tokenizer, found.prompt)
    return Loaded(found.model, revision=getattr(found.model.config, "_commit_hash", None), pretrained=beside)


def _model_class(task: str | None, model_config: Any) -> Any:
    import transformers

    if task is not None:
        return getattr(transformers, AUTO_CLASSES[task])
    named = [getattr(transformers, name, None) for name in model_config.architectures or []]
    return next((cls for cls in named if cls is not None), transformers.AutoModel)
