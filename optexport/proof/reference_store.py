"""Keeps what the original computes in float64, by content, so that it is computed once for the same model and inputs.

The name of an entry is a digest of all that has a say in it: the weights, the inputs, and what the model made of them
in its own precision. That is computed anew every time, so a model whose code was changed is never taken for the one
before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from optexport import __version__
from optexport.places import cache

_Outputs = Mapping[str, torch.Tensor]

# An entry larger than this is not kept, and together they take no more than that.
_ENTRY_BYTES = 512 << 20
_ALL_BYTES = 4 << 30


def digest(
    model: nn.Module, inputs: Sequence[_Outputs], outputs: Sequence[_Outputs], settings: Sequence[object]
) -> str:
    """Names what is computed: SHA-256 over names, dtypes, shapes and bytes of weights, inputs and outputs."""
    versions = [__version__, torch.__version__, torch.get_num_threads()]
    found = hashlib.sha256(json.dumps([*versions, *map(str, settings)]).encode())
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for group in (tensors, *inputs, *outputs):
        for name, tensor in group.items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
            found.update(dense.cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def read(name: str) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]] | None:
    """The tensors by case, and the notes, that are kept under a name; None where there are none."""
    place = cache()
    if place is None:
        return None
    try:
        with safe_open(place / f"{name}.safetensors", framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            checksum = notes.pop("checksum")
            cases: list[dict[str, torch.Tensor]] = [{} for _ in range(notes.pop("cases"))]
            for key in sorted(file.keys()):
                index, _, output = key.partition(".")
                cases[int(index)][output] = file.get_tensor(key)
            if checksum != _checksum(cases, notes):
                return None
            (place / f"{name}.safetensors").touch()  # what was not used for longest goes first
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # none, or a damaged one: it is computed
        return None
    return cases, notes


def write(name: str, cases: Sequence[_Outputs], notes: Mapping[str, Any]) -> None:
    """Keeps tensors by case, and notes that JSON can hold, where there is a place for them."""
    place = cache()
    size = sum(tensor.nbytes for outputs in cases for tensor in outputs.values())
    if place is None or size > _ENTRY_BYTES:
        return
    tensors = {
        f"{i}.{key}": t.detach().clone().contiguous() for i, outputs in enumerate(cases) for key, t in outputs.items()
    }
    with contextlib.suppress(OSError):  # where nothing can be written it is computed every time
        place.mkdir(parents=True, exist_ok=True)
        _make_room(place, size)
        with tempfile.TemporaryDirectory(dir=place) as draft:
            written = Path(draft) / name
            said = json.loads(json.dumps(notes))
            checksum = _checksum(cases, said)
            save_file(tensors, written, {"notes": json.dumps({"cases": len(cases), "checksum": checksum, **said})})
            written.replace(place / f"{name}.safetensors")


def _checksum(cases: Sequence[_Outputs], notes: Mapping[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for outputs in cases:
        for name in sorted(outputs):
            tensor = outputs[name].detach()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.flatten().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _make_room(place: Path, size: int) -> None:
    entries = sorted(place.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    for entry in entries:
        size += entry.stat().st_size
        if size > _ALL_BYTES:
            entry.unlink(missing_ok=True)
