"""Reads ``.jsonl`` files with one record per line; errors name the line and the key."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from optexport.errors import ConfigError


def read_lines(text: str, location: str) -> dict[int, Any]:
    """Returns the records by line number, without empty lines.

    Raises:
        ConfigError: A line is not JSON.
    """
    records: dict[int, Any] = {}
    # Not splitlines, because JSON strings may contain Unicode line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                records[number] = json.loads(line)
            except json.JSONDecodeError as error:
                message = f"line {number} is not JSON: {error.msg} at column {error.colno}"
                hint = 'Give a file with one JSON object per line, such as {"text": "A text."} or {"x": [1.0, 2.0]}.'
                raise ConfigError(message, location=location, hint=None if records else hint) from error
            except (ValueError, RecursionError) as error:  # numbers with too many digits, too deep nesting
                raise ConfigError(f"line {number} cannot be read: {error}", location=location) from error
    return records


def find_texts(records: Mapping[int, Any], location: str) -> list[str] | None:
    """Returns the texts if all records are ``{"text": ...}``, or otherwise None.

    Raises:
        ConfigError: A text is not a string.
    """
    if not records or not all(isinstance(record, dict) and set(record) == {"text"} for record in records.values()):
        return None
    for number, record in records.items():
        if not isinstance(record["text"], str):
            raise ConfigError(
                f'"text" must be a string (found {type(record["text"]).__name__})',
                location=f"{location}, line {number}",
            )
    return [record["text"] for record in records.values()]


def stack_records(records: Mapping[int, Any], model: nn.Module, location: str) -> dict[str, torch.Tensor]:
    """Stacks records to one row each; shorter rows are padded and get an attention mask.

    Returns:
        Tensors by key, with one row per record.

    Raises:
        ConfigError: Records have different keys, or a value cannot become a tensor.
    """
    keys = next((set(record) for record in records.values() if isinstance(record, dict)), None)
    odd = next((n for n, record in records.items() if not isinstance(record, dict) or set(record) != keys), None)
    if keys is None or odd is not None:
        if odd is None:
            raise ConfigError("the file is empty", location=location, hint="Write one JSON object per line.")
        raise ConfigError(
            "the keys differ from the keys of other lines"
            if isinstance(records[odd], dict)
            else "the line is not a JSON object",
            location=f"{location}, line {odd}",
            hint='Write {"text": ...} or {"input_ids": [...]}.',
        )
    padding = {"input_ids": int(getattr(getattr(model, "config", None), "pad_token_id", None) or 0)}
    batch: dict[str, torch.Tensor] = {}
    for name in next(iter(records.values())):
        rows = {
            number: _row_tensor(record[name], f'{location}, line {number}, "{name}"')
            for number, record in records.items()
        }
        rows = _promote_rows(rows, name, location)
        first, shape = next((number, row.shape) for number, row in rows.items())
        if name == "input_ids" and not shape:
            raise ConfigError("the value is not a list of token ids", location=f'{location}, line {first}, "{name}"')
        differing = next((number for number, row in rows.items() if row.shape != shape), None)
        if differing is None:
            batch[name] = torch.stack(list(rows.values()))
        elif all(row.dim() == 1 for row in rows.values()):
            batch[name] = nn.utils.rnn.pad_sequence(
                list(rows.values()), batch_first=True, padding_value=padding.get(name, 0)
            )
        else:
            raise ConfigError(
                f"wrong shape (expected {list(shape)} as in line {first}, found {list(rows[differing].shape)})",
                location=f'{location}, line {differing}, "{name}"',
            )
    if "input_ids" in batch and batch["input_ids"].dim() == 2 and "attention_mask" not in batch:
        lengths = torch.tensor([len(record["input_ids"]) for record in records.values()])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def _promote_rows(rows: Mapping[int, torch.Tensor], name: str, location: str) -> dict[int, torch.Tensor]:
    """Promotes rows to a common dtype, because padding uses the dtype of the first row."""
    first = next(iter(rows.values())).dtype
    odd = next((number for number, row in rows.items() if (row.dtype == torch.bool) != (first == torch.bool)), None)
    if odd is not None:
        raise ConfigError("some lines have numbers, others true or false", location=f'{location}, line {odd}, "{name}"')
    dtype = functools.reduce(torch.promote_types, (row.dtype for row in rows.values()))
    return {number: row.to(dtype) for number, row in rows.items()}


def _row_tensor(value: Any, location: str) -> torch.Tensor:
    try:
        row = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            "the value is neither a number nor nested lists of numbers of equal length", location=location
        ) from error
    if not row.numel():
        raise ConfigError("the list is empty", location=location)
    if row.is_floating_point() and bool((row.isinf() & torch.tensor(value, dtype=torch.float64).isfinite()).any()):
        raise ConfigError(
            f"a number is outside the range of {str(row.dtype).removeprefix('torch.')}", location=location
        )
    return row
