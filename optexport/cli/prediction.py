"""Runs a bundle on arguments of the command line, or on the lines of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optexport.bundle.manifest import TensorRecord
from optexport.errors import ConfigError, did_you_mean
from optexport.inference.answers import Answer, answers
from optexport.inference.bundle import Arrays, Bundle, held_error, is_held

_ROWS = 16
_MEDIA = {"image_processor": "image", "feature_extractor": "sound"}


@dataclass(frozen=True)
class Given:
    """One input of a prediction, which is a text, a file or arrays; and its line in a file."""

    shown: str
    text: str | None = None
    image: Path | None = None
    sound: Path | None = None
    inputs: Arrays | None = None
    line: str | None = None


def given_as_arguments(bundle: Bundle, arguments: Sequence[str]) -> list[Given]:
    """Reads arguments as texts, or as files if the model takes images or sounds.

    Raises:
        ConfigError: The model takes other inputs, or a file does not exist.
    """
    kinds, names = bundle.application.preprocessors, [spec.name for spec in bundle.manifest.inputs]
    media = [what for kind, what in _MEDIA.items() if kind in kinds]
    if len(media) + ("tokenizer" in kinds and "input_ids" in names) > 1:
        raise ConfigError(
            f"the model takes {', '.join(names)} at once",
            location="predict",
            hint="From Python: bundle(**bundle.preprocess(texts, images, sounds)).",
        )
    if not media and "tokenizer" not in kinds and "input_ids" not in names:
        why = "; ".join(bundle.application.missing)
        raise ConfigError(
            f"it holds nothing that makes {', '.join(names)} of texts or files"
            + (f" ({why})" if why else ", as its source had none, or it is a part of a generative model"),
            location="predict",
            hint="Give the inputs themselves, with --data FILE.jsonl.",
        )
    if not media:
        return [Given(text, text=text) for text in arguments]
    for path in arguments:
        if not Path(path).is_file():
            raise ConfigError(f"there is no such file, and the model takes {media[0]}s", location=path)
    if media[0] == "image":
        return [Given(path, image=Path(path)) for path in arguments]
    return [Given(path, sound=Path(path)) for path in arguments]


def given_in_file(bundle: Bundle, path: Path) -> list[Given]:
    """Reads a ``.jsonl`` file with a text, or one row of each input, per line.

    A line is ``{"text": ...}``, or an object of inputs by name.

    Raises:
        ConfigError: The file cannot be read, is empty, or contains an invalid line.
    """
    from optexport.inputs.data_lines import find_texts, read_lines

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", location=f"--data {path}") from error
    records = read_lines(text, f"--data {path}")
    if not records:
        raise ConfigError("it is empty", location=f"--data {path}")
    texts = find_texts(records, f"--data {path}")
    lines = {number: f"--data {path}, line {number}" for number in records}
    if texts is not None:
        return [Given(text, text=text, line=line) for text, line in zip(texts, lines.values(), strict=True)]
    return [
        Given(f"line {number}", inputs=_row(bundle, record, lines[number]), line=lines[number])
        for number, record in records.items()
    ]


def _row(bundle: Bundle, record: Any, location: str) -> Arrays:
    """Returns the inputs of a line as a batch of one row; a missing mask is all ones."""
    specs = {spec.name: spec for spec in bundle.manifest.inputs}
    if not isinstance(record, dict):
        raise ConfigError('it is no object such as {"text": ...} or {"input_ids": [...]}', location=location)
    row: Arrays = {}
    for name, value in record.items():
        where = f'{location}, "{name}"'
        if name in (constants := bundle.manifest.constants):
            _check_held(constants[name], value, where)
            continue
        if name == "text" and name not in specs:
            raise ConfigError(
                "a line with a text holds nothing else, and so do all the others",
                location=where,
                hint='Write {"text": ...} on each line, or inputs by name.',
            )
        if name not in specs:
            raise ConfigError("the model takes no such input", location=where, hint=did_you_mean(name, specs))
        array = _numbers(value, specs[name], where)
        row[name] = array[np.newaxis] if specs[name].shape else array
    if "attention_mask" in specs and "attention_mask" not in row and "input_ids" in row:
        row["attention_mask"] = np.ones_like(row["input_ids"])
    return row


def _check_held(held: Any, value: Any, location: str) -> None:
    """Checks that a line gives the value that is constant in the file, or a row of it."""
    rows = held if isinstance(held, list) and held else [held]
    if not (is_held(held, value) or all(is_held(row, value) for row in rows)):
        raise held_error(location, held)


def _numbers(value: Any, spec: TensorRecord, location: str) -> npt.NDArray[Any]:
    """Converts JSON to an array of an input's dtype; rejects values that would change."""
    try:
        array = np.asarray(value)
        if array.dtype.kind in ("biu" if np.dtype(spec.dtype).kind in "biu" else "biuf"):
            with np.errstate(over="ignore"):
                held = array.astype(spec.dtype)
            # Numbers outside the range of the dtype would wrap around or become infinite.
            is_same = np.isfinite(held) | ~np.isfinite(array) if held.dtype.kind == "f" else held == array
            if bool(is_same.all()):
                return held
    except (TypeError, ValueError) as error:
        raise ConfigError(f"it is no row of {spec.dtype}", location=location) from error
    raise ConfigError(f"it is no row of {spec.dtype}", location=location)


def predict(bundle: Bundle, given: Sequence[Given]) -> list[Answer]:
    """Returns an answer for each input, in order.

    Texts and sounds run one at a time, because padding changes the results of some models despite the mask.

    Raises:
        ConfigError: An input cannot be converted, or the model does not accept it.
    """
    found: list[Answer] = []
    for batch in _batches(bundle, given):
        try:
            inputs = _inputs(bundle, batch)
            found += answers(bundle, inputs, bundle(**inputs))
        except ConfigError as error:
            if batch[0].line is None:
                raise
            raise ConfigError(error.message, location=f"{batch[0].line}, {error.location}", hint=error.hint) from error
    return found


def _inputs(bundle: Bundle, batch: Sequence[Given]) -> Arrays:
    if batch[0].inputs is not None:
        return batch[0].inputs
    if batch[0].image is not None:
        return bundle.preprocess(images=[one.image for one in batch])
    if batch[0].sound is not None:
        return bundle.preprocess(sounds=[one.sound for one in batch])
    return bundle.preprocess([one.text or "" for one in batch])


def _batches(bundle: Bundle, given: Sequence[Given]) -> Iterator[Sequence[Given]]:
    head = next((spec.shape[0] for spec in bundle.manifest.inputs if spec.shape), 1)
    dim = bundle.manifest.dims.get(str(head))
    least, most = (dim.min, dim.max or _ROWS) if dim is not None else (head, head) if isinstance(head, int) else (1, 1)
    rows = 1 if given[0].inputs is not None else least if given[0].image is None else min(_ROWS, most)
    for start in range(0, len(given), rows):
        yield given[start : start + rows]
