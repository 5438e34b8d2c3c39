"""Answers of a bundle for texts, images, sounds or arrays; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle.manifest import Manifest
from optexport.errors import ConfigError
from optexport.inference.answers import Answer, answers
from optexport.inference.arrays import Arrays
from optexport.inference.preprocessing import Preprocessing

# The batch size if the batch axis has no upper limit.
_BATCH_SIZE = 16
_MEDIA = {"image_processor": "image", "feature_extractor": "sound"}


@dataclass(frozen=True)
class Query:
    """One input of a prediction: a text, an image, a sound, or arrays.

    Attributes:
        title: The text or file for the output, or the number of the line.
        location: The file and the line, for errors; None for an argument.
    """

    title: str
    text: str | None = None
    image: Any = None
    sound: Any = None
    arrays: Arrays | None = None
    location: str | None = None


def as_queries(preprocessing: Preprocessing, inputs: Sequence[Any]) -> list[Query]:
    """Reads inputs as texts, or as images or sounds if the model takes those.

    Raises:
        ConfigError: The model takes other inputs, or a file does not exist.
    """
    kinds, names = preprocessing.application.preprocessors, [spec.name for spec in preprocessing.manifest.inputs]
    media = [medium for kind, medium in _MEDIA.items() if kind in kinds]
    if len(media) + ("tokenizer" in kinds and "input_ids" in names) > 1:
        raise ConfigError(
            f"the model needs several inputs for one prediction: {', '.join(names)}",
            location="predict",
            hint="Use the Python API: bundle(**preprocessing(texts, images, sounds)).",
        )
    if not media and "tokenizer" not in kinds and "input_ids" not in names:
        reasons = "; ".join(preprocessing.application.missing)
        raise ConfigError(
            f"the bundle has no tokenizer or processor that makes {', '.join(names)} from texts or files"
            + (f" ({reasons})" if reasons else ", because its source has none or it is a part of a generative model"),
            location="predict",
            hint="Give the inputs by name, with bundle(**inputs).",
        )
    if not media:
        if wrong := [text for text in inputs if not isinstance(text, str)]:
            raise ConfigError(f"expected a text, found {type(wrong[0]).__name__}", location="predict")
        return [Query(text, text=text) for text in inputs]
    for path in inputs:
        if isinstance(path, str | os.PathLike) and not Path(path).is_file():
            raise ConfigError(f"the file does not exist (the model takes {media[0]} files)", location=str(path))
    return [Query(str(item), **{media[0]: item}) for item in inputs]


def predict_all(run: Callable[..., Arrays], preprocessing: Preprocessing, queries: Sequence[Query]) -> list[Answer]:
    """Returns an answer for each query, in order.

    Texts and sounds run one at a time, because padding changes the results of some models despite the mask.

    Raises:
        ConfigError: An input cannot be converted, or the model does not accept it.
    """
    results: list[Answer] = []
    for batch in _batches(preprocessing.manifest, queries):
        try:
            inputs = _preprocess(preprocessing, batch)
            results += answers(preprocessing, inputs, run(**inputs))
        except ConfigError as error:
            if batch[0].location is None:
                raise
            location = f"{batch[0].location}, {error.location}"
            raise ConfigError(error.message, location=location, hint=error.hint) from error
    return results


def _preprocess(preprocessing: Preprocessing, batch: Sequence[Query]) -> Arrays:
    if batch[0].arrays is not None:
        return batch[0].arrays
    if batch[0].image is not None:
        return preprocessing(images=[query.image for query in batch])
    if batch[0].sound is not None:
        return preprocessing(sounds=[query.sound for query in batch])
    return preprocessing([query.text or "" for query in batch])


def _batches(manifest: Manifest, queries: Sequence[Query]) -> Iterator[Sequence[Query]]:
    axis = next((spec.shape[0] for spec in manifest.inputs if spec.shape), 1)
    dim = manifest.dims.get(str(axis))
    if dim is not None:
        minimum, maximum = dim.min, dim.max or _BATCH_SIZE
    else:
        minimum = maximum = axis if isinstance(axis, int) else 1
    if queries[0].arrays is not None:
        rows = 1
    else:
        rows = minimum if queries[0].image is None else min(_BATCH_SIZE, maximum)
    for start in range(0, len(queries), rows):
        yield queries[start : start + rows]
