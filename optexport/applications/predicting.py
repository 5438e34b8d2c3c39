"""Runs a bundle on what a person gives: texts, image files, or a file of lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optexport.applications.answers import Answer, answers
from optexport.applications.bundle import Arrays, Bundle
from optexport.errors import ConfigError

_ROWS = 16


@dataclass(frozen=True)
class Given:
    """One thing to predict on: a text, an image file, or the inputs themselves."""

    shown: str
    text: str | None = None
    image: Path | None = None
    inputs: Arrays | None = None


def given_as_arguments(bundle: Bundle, arguments: Sequence[str]) -> list[Given]:
    """Reads arguments as texts, or as image files where the model takes images."""
    kinds = bundle.application.preprocessors
    if "image_processor" in kinds and "tokenizer" in kinds:
        raise ConfigError(
            f"the model takes {', '.join(spec.name for spec in bundle.manifest.inputs)} at once",
            place="predict",
            mend="From Python: bundle(**bundle.preprocess(texts, images)).",
        )
    if "image_processor" not in kinds:
        return [Given(text, text=text) for text in arguments]
    for path in arguments:
        if not Path(path).is_file():
            raise ConfigError("there is no such file, and the model takes images", place=path)
    return [Given(path, image=Path(path)) for path in arguments]


def given_in_file(bundle: Bundle, path: Path) -> list[Given]:
    """Reads a ``.jsonl`` file: ``{"text": ...}``, or inputs by name, one row of each a line."""
    from optexport.data_lines import read_lines, texts_of

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", place=f"--data {path}") from error
    records = read_lines(text, f"--data {path}")
    if not records:
        raise ConfigError("it is empty", place=f"--data {path}")
    texts = texts_of(records, f"--data {path}")
    if texts is not None:
        return [Given(text, text=text) for text in texts]
    return [
        Given(f"line {number}", inputs=_row(bundle, record, f"--data {path}, line {number}"))
        for number, record in records.items()
    ]


def _row(bundle: Bundle, record: Any, place: str) -> Arrays:
    """The inputs of a line, as a batch of one row; a mask that is not given hides nothing."""
    specs = {spec.name: spec for spec in bundle.manifest.inputs}
    if not isinstance(record, dict):
        raise ConfigError('it is no object such as {"text": ...} or {"input_ids": [...]}', place=place)
    row: Arrays = {}
    for name, value in record.items():
        try:
            array = np.asarray(value, dtype=specs[name].dtype if name in specs else None)
            row[name] = array if name in specs and not specs[name].shape else array[np.newaxis]
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"it is no row of {specs[name].dtype}", place=f'{place}, "{name}"') from error
    if "attention_mask" in specs and "attention_mask" not in row and "input_ids" in row:
        row["attention_mask"] = np.ones_like(row["input_ids"])
    return row


def predict(bundle: Bundle, given: Sequence[Given]) -> list[Answer]:
    """Answers each thing that is given, in order.

    Texts go several at a time where the model takes a mask, which keeps padding out of their results.

    Raises:
        ConfigError: Something given cannot be made an input of, or the model does not take it.
    """
    found: list[Answer] = []
    for batch in _batches(bundle, given):
        if batch[0].inputs is not None:
            inputs = batch[0].inputs
        elif batch[0].image is not None:
            inputs = bundle.preprocess(images=[one.image for one in batch])
        else:
            inputs = bundle.preprocess([one.text or "" for one in batch])
        found += answers(bundle, inputs, bundle(**inputs))
    return found


def _batches(bundle: Bundle, given: Sequence[Given]) -> Iterator[Sequence[Given]]:
    names = [spec.name for spec in bundle.manifest.inputs]
    head = next((spec.shape[0] for spec in bundle.manifest.inputs if spec.shape), 1)
    dim = bundle.manifest.dims.get(str(head))
    alone = given[0].inputs is not None or ("input_ids" in names and "attention_mask" not in names)
    rows = 1 if alone or (dim is None and head == 1) else min(_ROWS, (dim and dim.max) or _ROWS)
    for start in range(0, len(given), rows):
        yield given[start : start + rows]
