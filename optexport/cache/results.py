"""Cached results: named tensors for each of several cases, with notes in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from optexport.cache import store

_FILE = "results.safetensors"


def read(entry: str) -> tuple[list[dict[str, torch.Tensor]], Any] | None:
    """Returns the tensors by case and the notes of an entry, or None if it is missing."""
    if (cached := store.read(entry)) is None:
        return None
    folder, (count, notes) = cached
    try:
        tensors = load_file(folder / _FILE)
    except (OSError, SafetensorError):  # another run has removed the entry
        return None
    cases: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        cases[int(index)][name] = tensor
    return cases, notes


def write(entry: str, cases: Sequence[Mapping[str, torch.Tensor]], notes: Any = None) -> None:
    """Stores tensors by case, and notes."""

    def fill(folder: Path) -> None:
        named = {f"{index}.{name}": tensor for index, case in enumerate(cases) for name, tensor in case.items()}
        try:
            save_file({key: tensor.detach().clone().contiguous() for key, tensor in named.items()}, folder / _FILE)
        except SafetensorError as error:  # also raised for a full disk
            raise OSError(str(error)) from error

    size = sum(tensor.nbytes for case in cases for tensor in case.values())
    store.write(entry, [len(cases), notes], size=size, fill=fill)
