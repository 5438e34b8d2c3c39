"""The command ``optexport predict``, which runs a bundle on texts and files."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import echo
from optexport.cli._format_option import check_formats
from optexport.cli._group import Command, json_option, print_json
from optexport.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import numpy.typing as npt

    from optexport.bundle.manifest import TensorRecord
    from optexport.inference.arrays import Arrays
    from optexport.inference.bundle import Bundle
    from optexport.inference.predictions import Query

# Arguments like these are names of files, not texts.
_FILE_NAME = re.compile(
    r"\S+\.(txt|csv|tsv|jsonl?|npz|npy|safetensors|png|jpe?g|gif|bmp|webp|wav|mp3|flac)", re.IGNORECASE
)
_TEXT_OF_A_FILE = 'Pass texts in a .jsonl file with --data: {"text": ...} on each line.'


@click.command(
    cls=Command,
    examples=[
        'optexport predict build/my-model "A text." "Another text."',
        "optexport predict build/my-model --data rows.jsonl --json",
        "optexport predict build/my-model --data images.npz",
    ],
)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.argument("inputs", nargs=-1, metavar="[TEXT|IMAGE|WAV]...")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='A .jsonl file, with {"text": ...} or one row of each input by name on each line (without the batch axis), or '
    "an .npz file with arrays by name, rows along the first axis.",
)
@click.option(
    *("--format", "file_format"),
    callback=check_formats,
    metavar="FORMAT",
    help="The file to run (default: onnx, or else the first in the bundle).",
)
@json_option
def predict(bundle: Path, inputs: tuple[str, ...], data: Path | None, file_format: str | None, as_json: bool) -> None:
    """Run BUNDLE on texts, image files or WAV files.

    Use this to try an exported model. It needs neither the original model nor its code. It prints the answer of the
    model's task: labels with scores, words for a mask, a transcript, or embeddings with their similarities.

    For a model with other inputs, give them by name with --data.
    """
    if bool(inputs) == (data is not None):
        raise click.UsageError(
            "no inputs: give texts or files, or --data." if data is None else "give either inputs or --data, not both."
        )
    from optexport.inference import answers, predictions
    from optexport.inference.bundle import Bundle

    names = [text for text in inputs if _FILE_NAME.fullmatch(text)]
    for name in names:
        if not Path(name).is_file():
            raise ConfigError("the file does not exist", location=name, hint=_TEXT_OF_A_FILE)
    loaded = Bundle.load(bundle, file_format)
    queries = predictions.as_queries(loaded.preprocessing, inputs) if data is None else read_file(loaded, data)
    if names and (query := next((query for query in queries if query.text in names), None)) is not None:
        raise ConfigError("the model takes texts, not files", location=query.title, hint=_TEXT_OF_A_FILE)
    results = predictions.predict_all(loaded, loaded.preprocessing, queries)
    table = answers.similarities(results)
    if as_json:
        rows = [{"input": query.title, **answer} for query, answer in zip(queries, results, strict=True)]
        document = {"task": loaded.application.task, "format": loaded.format, "results": rows}
        print_json(document | ({} if table is None else {"similarity": table}))
        return
    for query, answer in zip(queries, results, strict=True):
        echo(query.title)
        for line in answers.as_text(answer):
            echo(f"  {line}")
    for line in [] if table is None else answers.similarities_as_text(table):
        echo(line)


def read_file(bundle: Bundle, path: Path) -> list[Query]:
    """Reads a ``.jsonl`` file with a text, or one row of each input, per line; or an ``.npz`` file of arrays by name.

    A line is ``{"text": ...}``, or an object of inputs by name.

    Raises:
        ConfigError: The file cannot be read, is empty, or contains an invalid line or array.
    """
    if path.suffix == ".npz":
        return _read_arrays(bundle, path)
    if path.suffix == ".npy":
        names = [spec.name for spec in bundle.manifest.inputs]
        raise ConfigError(
            "a .npy file does not name the input of its array",
            location=f"--data {path}",
            hint=f"Save with numpy.savez('{path.stem}.npz', {', '.join(f'{name}=array' for name in names)})",
        )
    from optexport.inference.predictions import Query
    from optexport.inputs.data_lines import find_texts, read_lines

    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file: {error}", location=f"--data {path}") from error
    records = read_lines(content, f"--data {path}")
    if not records:
        raise ConfigError("the file is empty", location=f"--data {path}")
    texts = find_texts(records, f"--data {path}")
    locations = {number: f"--data {path}, line {number}" for number in records}
    if texts is not None:
        pairs = zip(texts, locations.values(), strict=True)
        return [Query(text, text=text, location=location) for text, location in pairs]
    return [
        Query(f"line {number}", arrays=_row(bundle, record, locations[number]), location=locations[number])
        for number, record in records.items()
    ]


def _read_arrays(bundle: Bundle, path: Path) -> list[Query]:
    """Reads the arrays of an ``.npz`` file as one query for each row."""
    import numpy as np

    from optexport.inference.arrays import check_rank
    from optexport.inference.predictions import Query

    location = f"--data {path}"
    try:
        with path.open("rb") as file, zipfile.ZipFile(file), np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy and zipfile raise many types
        raise ConfigError(f"cannot read the file: {error}", location=location) from error
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ConfigError(f"{others[0]} is not an array", location=location)
    specs = {spec.name: spec for spec in bundle.manifest.inputs}
    for name in arrays:
        if name in (constants := bundle.manifest.constants):
            _check_constant(constants[name], arrays[name], f'{location}, "{name}"')
        elif name not in specs:
            key = f'{location}, "{name}"'
            raise ConfigError("the model has no input of this name", location=key, hint=did_you_mean(name, specs))
    for name in arrays.keys() & specs.keys():
        try:
            check_rank(specs[name], arrays[name])
        except ConfigError as error:
            error.locate(f'{location}, "{name}"')
            raise
    rows = {name: len(array) for name, array in arrays.items() if name in specs and specs[name].shape and array.ndim}
    if not rows or 0 in rows.values() or len({*rows.values()}) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ConfigError(f"the inputs need the same number of rows (found {counts or 'none'})", location=location)
    return [
        Query(
            f"row {index + 1}",
            arrays={
                name: array[index : index + 1] if name in rows else array
                for name, array in arrays.items()
                if name in specs
            },
            location=f"{location}, row {index + 1}",
        )
        for index in range(min(rows.values()))
    ]


def _row(bundle: Bundle, record: Any, location: str) -> Arrays:
    """Returns the inputs of a line as a batch of one row; a missing mask is all ones."""
    import numpy as np  # keeps --help fast

    specs = {spec.name: spec for spec in bundle.manifest.inputs}
    if not isinstance(record, dict):
        raise ConfigError('the line is not an object such as {"text": ...} or {"input_ids": [...]}', location=location)
    row: Arrays = {}
    for name, value in record.items():
        key = f'{location}, "{name}"'
        if name in (constants := bundle.manifest.constants):
            _check_constant(constants[name], value, key)
            continue
        if name == "text" and name not in specs:
            raise ConfigError(
                'a line with "text" cannot have other keys, and all lines must have the same keys',
                location=key,
                hint='Write {"text": ...} on every line, or inputs by name on every line.',
            )
        if name not in specs:
            raise ConfigError("the model has no input of this name", location=key, hint=did_you_mean(name, specs))
        array = _as_array(value, specs[name], key)
        row[name] = array[np.newaxis] if specs[name].shape else array
    if "attention_mask" in specs and "attention_mask" not in row and "input_ids" in row:
        row["attention_mask"] = np.ones_like(row["input_ids"])
    return row


def _check_constant(constant: Any, value: Any, location: str) -> None:
    """Checks that a line has the value that is constant in the file, or a row of it."""
    from optexport.inference.arrays import constant_error, is_constant

    rows = constant if isinstance(constant, list) and constant else [constant]
    if not (is_constant(constant, value) or all(is_constant(row, value) for row in rows)):
        raise constant_error(location, constant)


def _as_array(value: Any, spec: TensorRecord, location: str) -> npt.NDArray[Any]:
    """Converts JSON to an array of an input's dtype; rejects values that would change."""
    import numpy as np

    from optexport.inference.arrays import numpy_dtype

    try:
        array = np.asarray(value)
        if array.dtype.kind in ("biu" if numpy_dtype(spec).kind in "biu" else "biuf"):
            with np.errstate(over="ignore"):
                converted = array.astype(numpy_dtype(spec))
            # Numbers outside the range of the dtype would wrap around or become infinite.
            is_float = converted.dtype.kind == "f"
            is_same = np.isfinite(converted) | ~np.isfinite(array) if is_float else converted == array
            if bool(is_same.all()):
                return converted
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the value is not a list of {spec.dtype} numbers", location=location) from error
    raise ConfigError(f"the value is not a list of {spec.dtype} numbers", location=location)
