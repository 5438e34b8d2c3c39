"""The tasks that a config may name, and the AutoModel class of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# An encoder-decoder model. Without model.task, a CTC model is also possible.
SPEECH = "automatic-speech-recognition"
# The task of a sentence-transformers model with its modules, and a hint for doing without the modules.
SENTENCES = "sentence-similarity"
TRANSFORMER_ALONE = 'Export the transformer alone: write task = "feature-extraction".'
OR_TRANSFORMER_ALONE = f"Or e{TRANSFORMER_ALONE[1:]}"

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
    SENTENCES: "AutoModel",  # followed by the modules of sentence-transformers
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
    """Returns the sentence-transformers class that saved a folder.

    Args:
        config: ``config_sentence_transformers.json``; None if the folder has no such file.

    Raises:
        ValueError: The file is not JSON.
        AttributeError: The file is not a JSON object.
    """
    settings = {} if config is None else json.loads(config.read_text(encoding="utf-8"))
    return str(settings.get("model_type", "SentenceTransformer"))  # older versions know only this class
