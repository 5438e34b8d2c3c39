"""The tasks that a config may name, and the class of transformers that loads a model for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# A model that goes on from what it has heard, or, without model.task, one that gives a letter for each moment (CTC).
SPEECH = "automatic-speech-recognition"
# That of a model of sentence-transformers with its modules, and what to do where the library is missing.
SENTENCES = "sentence-similarity"
TRANSFORMER_ALONE = 'Or export the transformer alone: task = "feature-extraction".'

AUTO_CLASSES: Mapping[str, str] = {
    "audio-classification": "AutoModelForAudioClassification",
    SPEECH: "AutoModelForSpeechSeq2Seq",
    "depth-estimation": "AutoModelForDepthEstimation",
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "image-feature-extraction": "AutoModel",
    "image-segmentation": "AutoModelForImageSegmentation",
    "image-text-to-text": "AutoModelForImageTextToText",
    "masked-image-modeling": "AutoModelForMaskedImageModeling",
    "multiple-choice": "AutoModelForMultipleChoice",
    "object-detection": "AutoModelForObjectDetection",
    "question-answering": "AutoModelForQuestionAnswering",
    SENTENCES: "AutoModel",  # with the modules of sentence-transformers behind it
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "token-classification": "AutoModelForTokenClassification",
    "video-classification": "AutoModelForVideoClassification",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "zero-shot-object-detection": "AutoModelForZeroShotObjectDetection",
}


def sentence_kind(config: Path | None) -> str:
    """The class of sentence-transformers that a folder with its modules was saved from.

    Args:
        config: ``config_sentence_transformers.json``; None where there is none.

    Raises:
        ValueError: It is no JSON.
        AttributeError: It is no object.
    """
    settings = {} if config is None else json.loads(config.read_text(encoding="utf-8"))
    return str(settings.get("model_type", "SentenceTransformer"))  # older versions had no other, and left it out
