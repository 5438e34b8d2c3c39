"""Loads models of sentence-transformers: a transformer, and modules that embed a sentence.

Only this module imports ``sentence_transformers``, an optional package with the extra ``sentence-transformers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from optexport._utils.extras import check_extra
from optexport.config.tasks import OR_TRANSFORMER_ALONE, SENTENCES, TRANSFORMER_ALONE, sentence_kind
from optexport.errors import SourceError, describe_error, first_line, panics_as_errors
from optexport.loading import sentence_settings
from optexport.loading.pretrained_files import find
from optexport.loading.sentence_settings import MODULES
from optexport.signature.signature import unused

_OUTPUT = "sentence_embedding"


class SentenceEmbedder(nn.Module):
    """The modules of a ``SentenceTransformer`` as a function of tensors.

    Args:
        modules: The transformer, then the modules that compute a sentence embedding from token embeddings.
        width: The size that embeddings are truncated to, or None.
    """

    main_input_name = "input_ids"

    def __init__(self, modules: Sequence[nn.Module], width: int | None = None) -> None:
        super().__init__()
        for module in modules:
            name = type(module).__name__.lower()
            self.add_module(unused(name, self._modules), module)
        self.width = width

    @property
    def config(self) -> Any:
        """The config of the transformer."""
        return next(iter(self.children())).config

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Embeds sentences.

        Args:
            input_ids: Integers, [batch, sequence].
            attention_mask: Integers, [batch, sequence]; 0 for padding.
            token_type_ids: Integers, [batch, sequence].

        Returns:
            ``sentence_embedding``, floating point, [batch, width].
        """
        features: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            features["token_type_ids"] = token_type_ids
        for module in self.children():
            features = module(features)
        return {_OUTPUT: features[_OUTPUT][..., : self.width]}


@dataclass(frozen=True)
class Embedder:
    """A loaded sentence-transformers model, in eval mode.

    Attributes:
        tokenizer: The model's tokenizer, which truncates texts as the model requires.
        prompt: A prefix of every text.
    """

    model: SentenceEmbedder
    tokenizer: Any
    prompt: str


def is_sentence_model(task: str | None, name: str, options: Mapping[str, Any]) -> bool:
    """Returns True if the task, or without one the folder, asks for sentence embeddings.

    Args:
        name: A folder, or a hub id.
        options: Options of ``from_pretrained``.
    """
    return task == SENTENCES or (task is None and _kind(name, options) == "SentenceTransformer")


def _kind(name: str, options: Mapping[str, Any]) -> str | None:
    """Returns the sentence-transformers class of a source, or None."""
    if find(name, MODULES, options) is None:
        return None
    path = find(name, "config_sentence_transformers.json", options)
    try:
        return sentence_kind(path)
    except (ValueError, AttributeError) as error:
        raise SourceError(
            f"the file is not a JSON object: {first_line(error)}", location=str(path), hint="Save the model again."
        ) from error


def load(name: str, options: Mapping[str, Any], model_options: Mapping[str, Any], location: str) -> Embedder:
    """Loads a model with its modules.

    Args:
        name: A folder, or a hub id.
        options: ``trust_remote_code``, ``local_files_only`` and ``revision``.
        model_options: Further options of the transformer: ``dtype`` and ``attn_implementation``.
        location: The location for errors.

    Raises:
        ConfigError: The library is not installed.
        SourceError: The source is not such a model, cannot be loaded, lacks weights, or needs more than tensors.
    """
    kind = _kind(name, options)
    if kind != "SentenceTransformer":
        problem = f"is a {kind} of sentence-transformers" if kind else f"has no {MODULES}"
        raise SourceError(
            f"the model {problem}, so it has no sentence embeddings",
            location=location,
            hint=f'Use task = "{SENTENCES}" for a folder that SentenceTransformer.save_pretrained wrote.',
        )
    check_extra("sentence-transformers", location, OR_TRANSFORMER_ALONE)
    from sentence_transformers import SentenceTransformer

    sentence_settings.check(name, options)
    model_kwargs = {**model_options, "weights_only": True}  # these options override the folder's settings
    try:
        with panics_as_errors():
            sentences = SentenceTransformer(name, device="cpu", model_kwargs=model_kwargs, **options).eval()
            probe = sentences.preprocess(["a", "a b c"])
    except Exception as error:  # sentence-transformers, transformers and the hub's client raise many kinds
        raise SourceError(
            f"sentence-transformers could not load the model: {first_line(error)}",
            location=location,
            hint="The folder contains custom code. Read that code, then set model.trust_remote_code = true."
            if "trust_remote_code" in str(error)
            else TRANSFORMER_ALONE,
        ) from error
    modules = list(sentences.children())
    _check_transformer(modules[0], location)
    _check_weights(modules, name, options, location)
    prompt = sentences.prompts.get(sentences.default_prompt_name or "") or ""
    if prompt and any(getattr(module, "include_prompt", True) is False for module in modules):
        raise SourceError(
            "the pooling cannot be exported: which tokens to skip depends on padding",
            location=location,
            hint=TRANSFORMER_ALONE,
        )
    _check_modules(modules, probe, location)
    return Embedder(SentenceEmbedder(modules, sentences.truncate_dim).eval(), sentences.tokenizer, prompt)


def _check_transformer(module: nn.Module, location: str) -> None:
    if not isinstance(getattr(module, "model", None), PreTrainedModel):
        raise SourceError(
            f"expected a transformers model as the first module, found {type(module).__name__}",
            location=location,
            hint='Write a function that builds the model, and set source = "python:my_model:build".',
        )
    takes: Any = module.modality_config
    if "text" not in takes or "message" in takes:  # chat models take messages
        raise SourceError(
            f"expected a model of plain texts, found a model of {', '.join(map(str, takes))}",
            location=location,
            hint=TRANSFORMER_ALONE,
        )


def _check_weights(modules: Sequence[nn.Module], name: str, options: Mapping[str, Any], location: str) -> None:
    """Rejects a checkpoint that lacks weights; sentence-transformers would use random ones."""
    path = find(name, MODULES, options)
    assert path is not None
    for module, entry in zip(modules, json.loads(path.read_text(encoding="utf-8")), strict=True):
        model: Any = getattr(module, "model", None)
        if not str(entry["type"]).endswith(".Transformer") or getattr(model, "peft_config", None):
            continue
        _, info = type(model).from_pretrained(
            name, subfolder=entry["path"], config=model.config, output_loading_info=True, **options
        )
        read = module.modality_config["text"]["method_output_name"]  # type: ignore[index]  # an attribute of the module
        missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        if read == "last_hidden_state":  # the pooler is not used
            missing = [key for key in missing if not key.startswith("pooler.")]
        if missing:
            raise SourceError(
                f"{len(missing)} weights are missing in the checkpoint, such as {missing[0]}, and would be random",
                location=f"{location}, {entry['path'] or type(model).__name__}",
                hint="Save the model again with all its weights.",
            )


def _check_modules(modules: Sequence[nn.Module], features: dict[str, Any], location: str) -> None:
    """Runs the modules on ids and mask only, so that an error names the module."""
    features = {name: value for name, value in features.items() if name in ("input_ids", "attention_mask")}
    for module in modules:
        module_location = f"{location}, {type(module).__name__}"
        try:
            with torch.no_grad():
                features = module(features)
        except Exception as error:  # a module's own code may raise anything
            raise SourceError(
                f"the module does not run on token ids and a mask alone: {describe_error(error)}",
                location=module_location,
                hint=TRANSFORMER_ALONE,
            ) from error
    if not isinstance(features.get(_OUTPUT), torch.Tensor):
        raise SourceError(f"the modules of the model return no {_OUTPUT}", location=location, hint=TRANSFORMER_ALONE)
