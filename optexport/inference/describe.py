"""Describes the use of a model for the manifest: task, labels, and preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from optexport.bundle.manifest import ApplicationRecord
from optexport.config.schema import LABELS, PROBABILITIES
from optexport.config.tasks import AUTO_CLASSES, SENTENCES, SPEECH
from optexport.loading import preprocessors, sentence_embedding
from optexport.loading.loader import Loaded
from optexport.loading.processing import get_processing
from optexport.signature.signature import Signature
from optexport.signature.token_limit import find_token_limit

# Suffixes of class names, by task; a model without a head returns features.
_TASKS_BY_ENDING = {auto.removeprefix("AutoModel"): task for task, auto in AUTO_CLASSES.items() if auto != "AutoModel"}
_TASKS_BY_ENDING |= {"LMHeadModel": "text-generation", "ForCTC": SPEECH}


def describe(task: str | None, loaded: Loaded, signature: Signature, folder: Path) -> ApplicationRecord:
    """Writes the tokenizer or processor to a bundle's draft, and describes the model's use.

    Args:
        task: The task of the config, if any.
        folder: The folder of the draft.
    """
    task = task or _task_of(loaded.model)
    config: Any = getattr(loaded.model, "config", None)
    inputs = [spec.name for spec in signature.inputs]
    has_encoder = getattr(config, "is_encoder_decoder", False)  # its tokens are decoded by generation instead
    classes = get_processing(loaded.model).classes
    saved = preprocessors.save(
        loaded.pretrained, inputs, folder, find_token_limit(config), gives_tokens=task == SPEECH and not has_encoder
    )
    return ApplicationRecord(
        task=task,
        labels=_labels(task, config),
        scores=_scores(task, config) if classes is None else classes.function,
        preprocessors=list(saved.kinds),
        prompt="" if loaded.pretrained is None else loaded.pretrained.prompt,
        missing=list(saved.missing),
        outputs="logits" if classes is None else PROBABILITIES if classes.label_count is None else LABELS,
    )


def _task_of(model: Any) -> str | None:
    if isinstance(model, sentence_embedding.SentenceEmbedder):
        return SENTENCES
    if not hasattr(model, "main_input_name"):
        return None
    name = type(model).__name__
    return next((task for ending, task in _TASKS_BY_ENDING.items() if name.endswith(ending)), None) or (
        "feature-extraction" if name.endswith("Model") else None
    )


def _classifies(task: str | None, config: Any) -> bool:
    return task is not None and task.endswith("-classification") and getattr(config, "num_labels", 0) > 0


def _labels(task: str | None, config: Any) -> list[str] | None:
    if not _classifies(task, config):
        return None
    return [str(config.id2label.get(index, index)) for index in range(config.num_labels)]


def _scores(task: str | None, config: Any) -> Literal["softmax", "sigmoid"] | None:
    """Returns the function that transformers' pipelines apply to the logits."""
    problem = getattr(config, "problem_type", None)
    if not _classifies(task, config) or problem == "regression":
        return None
    is_multi_label = problem == "multi_label_classification" or (
        config.num_labels == 1 and task != "token-classification"
    )
    return "sigmoid" if is_multi_label else "softmax"
