"""Converts a model's outputs to answers of its task, such as labels; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from optexport.bundle.manifest import ApplicationRecord
from optexport.config.schema import LABELS, PROBABILITIES
from optexport.config.tasks import SPEECH
from optexport.inference.arrays import Arrays
from optexport.inference.preprocessing import Preprocessing

Answer = dict[str, Any]
Array = npt.NDArray[Any]

_LOGITS = "logits"
_SHOWN = 5
# An array of at most 16 numbers is shown completely, and of a larger one the first 4.
_ALL_NUMBERS, _FIRST_NUMBERS = 16, 4


def answers(preprocessing: Preprocessing, inputs: Arrays, outputs: Arrays) -> list[Answer]:
    """Returns one answer for each row of a batch, as JSON.

    An answer holds the raw outputs if the task is unknown, its tokenizer is missing, or its output is missing, contains
    NaN or has another number of rows.
    """
    rows = next((array.shape[0] for array in inputs.values() if array.ndim), 1)
    application = preprocessing.application
    answer = _ANSWERS.get(application.task or "")
    output = outputs.get(_LOGITS if application.outputs == _LOGITS else PROBABILITIES)
    token_inputs = inputs.keys() & {"input_ids", "decoder_input_ids"}
    if answer in _READING_TOKENS and ("input_ids" not in token_inputs or "tokenizer" not in application.preprocessors):
        answer = None
    if answer is _transcript and (token_inputs or "tokenizer" not in application.preprocessors):
        answer = None
    if answer is None or output is None or output.shape[0] != rows or np.isnan(output).any():
        return [_outputs(outputs, row, rows) for row in range(rows)]
    if application.outputs == LABELS:
        return [_ranked(application, outputs[LABELS][row], output[row]) for row in range(rows)]
    return [
        answer(preprocessing, {name: array[row] for name, array in inputs.items()}, output[row]) for row in range(rows)
    ]


def similarities(results: Sequence[Answer]) -> list[list[float]] | None:
    """Returns the cosines of all pairs of sentence embeddings; None if there are not two."""
    rows = [answer.get("outputs", {}).get("sentence_embedding") for answer in results]
    if len(rows) < 2 or None in rows:
        return None
    vectors = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(vectors).all():
        return None
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return [[float(value) for value in row] for row in vectors @ vectors.T]


def _outputs(outputs: Arrays, row: int, rows: int) -> Answer:
    """Returns the outputs of a row; an output without a batch axis is returned completely."""
    row_outputs = {
        name: array[row] if array.ndim and array.shape[0] == rows else array for name, array in outputs.items()
    }
    return {"outputs": {name: _numbers(array) for name, array in row_outputs.items()}}


def _numbers(array: Array) -> Any:
    """Returns nested lists; NaN and infinity become texts, because JSON has none."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        texts = np.where(np.isfinite(array), array.astype(object), array.astype(str))
        return texts.tolist()
    return array.tolist()


def _scores(application: ApplicationRecord, output: Array, kind: str | None) -> Array:
    """Returns the scores of the last axis: softmax, sigmoid, logits, or the file's scores."""
    logits = output.astype(np.float64)
    kind = kind if application.outputs == _LOGITS else None
    if kind == "softmax":
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return shifted / shifted.sum(-1, keepdims=True)  # type: ignore[no-any-return]  # numpy's arithmetic is untyped
    return 1 / (1 + np.exp(-logits)) if kind == "sigmoid" else logits


def _label(application: ApplicationRecord, index: int) -> str:
    labels = application.labels or []
    return labels[index] if index < len(labels) else str(index)


def _best(scores: Array, count: int = _SHOWN) -> list[int]:
    return [int(index) for index in np.argsort(-scores, kind="stable")[:count]]


def _classes(preprocessing: Preprocessing, _: Arrays, output: Array) -> Answer:
    scores = _scores(preprocessing.application, output.reshape(-1), preprocessing.application.scores)
    best = np.asarray(_best(scores, len(scores)))
    return _ranked(preprocessing.application, best, scores[best])


def _ranked(application: ApplicationRecord, labels: Array, scores: Array) -> Answer:
    """Returns labels with their scores, in the order of the indices."""
    pairs = zip(labels.reshape(-1).tolist(), scores.reshape(-1).tolist(), strict=True)
    return {"labels": [{"label": _label(application, index), "score": score} for index, score in pairs]}


def _tokens(preprocessing: Preprocessing, inputs: Arrays, output: Array) -> Answer:
    """Returns a label for every token that is not special."""
    ids, tokenizer = inputs["input_ids"], preprocessing.tokenizer
    scores = _scores(preprocessing.application, output, preprocessing.application.scores)
    labelled = [
        {"token": token, "label": _label(preprocessing.application, int(row.argmax())), "score": float(row.max())}
        for token, identity, row in zip(tokenizer.convert_ids_to_tokens(ids.tolist()), ids, scores, strict=True)
        if identity not in tokenizer.all_special_ids
    ]
    return {"tokens": labelled}


def _fills(preprocessing: Preprocessing, inputs: Arrays, output: Array) -> Answer:
    """Returns the best tokens for each mask, and the text with each of them."""
    ids, tokenizer = inputs["input_ids"], preprocessing.tokenizer
    masks = []
    for location in np.flatnonzero(ids == tokenizer.mask_token_id):
        scores = _scores(preprocessing.application, output[location], "softmax")
        fills = []
        for index in _best(scores):
            filled = ids.copy()
            filled[location] = index
            text = tokenizer.decode(filled, skip_special_tokens=True)
            fills.append({"token": tokenizer.decode([index]).strip(), "score": float(scores[index]), "text": text})
        masks.append(fills)
    return {"mask_token": tokenizer.mask_token, "masks": masks}


def _next_tokens(preprocessing: Preprocessing, inputs: Arrays, output: Array) -> Answer:
    """Returns the most likely tokens after the text."""
    positions = np.flatnonzero(inputs.get("attention_mask", np.ones(len(output), np.int64)))
    scores = _scores(preprocessing.application, output[positions[-1] if len(positions) else -1], "softmax")
    return {"next": [{"token": preprocessing.tokenizer.decode([i]), "score": float(scores[i])} for i in _best(scores)]}


def _transcript(preprocessing: Preprocessing, _: Arrays, output: Array) -> Answer:
    """Returns the text of a CTC output: the tokenizer merges repetitions and drops blanks."""
    return {"transcript": preprocessing.tokenizer.decode(output.argmax(-1))}


_ANSWERS: dict[str, Callable[[Preprocessing, Arrays, Array], Answer]] = {
    **dict.fromkeys(
        ("text-classification", "image-classification", "audio-classification", "video-classification"), _classes
    ),
    "token-classification": _tokens,
    "fill-mask": _fills,
    "text-generation": _next_tokens,
    SPEECH: _transcript,
}
_READING_TOKENS = (_tokens, _fills, _next_tokens)


def as_text(answer: Answer) -> list[str]:
    """Returns an answer as lines of text."""
    if "transcript" in answer:
        return [answer["transcript"]]
    if "labels" in answer:
        return [f"{ranked['label']:24} {ranked['score']:.4f}" for ranked in answer["labels"][:_SHOWN]]
    if "tokens" in answer:
        return [f"{token['token']:24} {token['label']:16} {token['score']:.4f}" for token in answer["tokens"]]
    if "masks" in answer:
        lines = [
            f"{fill['token']:24} {fill['score']:.4f}  {fill['text']}" for fills in answer["masks"] for fill in fills
        ]
        return lines or [f"the text has no {answer['mask_token']} to fill"]
    if "next" in answer:
        return [f"{token['token']!r:24} {token['score']:.4f}" for token in answer["next"]]
    return [line for name, value in answer["outputs"].items() for line in _array_as_text(name, np.asarray(value))]


def _array_as_text(name: str, array: Array) -> list[str]:
    is_short = array.size <= _ALL_NUMBERS
    first = " ".join(f"{value:.4g}" if isinstance(value, float) else str(value)
                     for value in array.reshape(-1)[: None if is_short else _FIRST_NUMBERS].tolist())  # fmt: skip
    more = "" if is_short else " ..."
    return [f"{name} [{', '.join(map(str, array.shape))}] {first}{more}"]


def similarities_as_text(table: Sequence[Sequence[float]]) -> list[str]:
    """Returns a table of cosines as lines of text."""
    return ["cosine similarity", *("  " + " ".join(f"{value:6.3f}" for value in row) for row in table)]
