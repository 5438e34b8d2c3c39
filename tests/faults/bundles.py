"""Changes of a finished bundle whose digests are updated to match."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from optexport.bundle import contents as bundles
from tests._helpers import exports
from tests.faults import onnx_files, torch_files


@dataclass(frozen=True)
class Tampering:
    """A change of a bundle in place.

    Attributes:
        fails: The targets that fail when the bundle is verified. Empty if it is refused before that.
        missed: Why the change is not caught. None if it is caught.
    """

    name: str
    act: Callable[[Path], None]
    fails: tuple[str, ...]
    missed: str | None = None


TAMPERINGS: dict[str, Tampering] = {}
ALL = ("torchscript", "onnx", "onnx-optimized", "pt2")


def tampering(
    *fails: str, missed: str | None = None
) -> Callable[[Callable[[Path], Iterable[str]]], Callable[[Path], Iterable[str]]]:
    """Registers a function that changes a bundle. Updates the digests of the files it returns."""

    def enter(change: Callable[[Path], Iterable[str]]) -> Callable[[Path], Iterable[str]]:
        def act(folder: Path) -> None:
            exports.reseal(folder, *change(folder))

        name = change.__name__.replace("_", " ")
        TAMPERINGS[name] = Tampering(name, act, fails, missed)
        return change

    return enter


def _edit_reference(folder: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Changes the stored tensors of a part: ``inputs``, ``outputs`` or ``float64``."""
    path = folder / bundles.REFERENCE
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if f".{part}." in name and tensor.is_floating_point():
            tensors[name] = change(tensor).contiguous()
    save_file(tensors, path)
    return [path.name]


def _edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    exports.edit_json(folder / bundles.MANIFEST, change)


@tampering("onnx", "onnx-optimized")
def a_weight_of_the_onnx_file_is_edited(folder: Path) -> list[str]:
    onnx_files.one_number_is_edited(folder / "model.onnx", "norm.weight", 1e-4)
    return ["model.onnx"]


@tampering("torchscript")
def the_script_is_exchanged_for_that_of_another_model(folder: Path) -> list[str]:
    torch_files.the_script_is_of_another_model(folder / "model.torchscript.pt")
    return ["model.torchscript.pt"]


@tampering("pt2")
def the_program_is_exchanged_for_an_earlier_one(folder: Path) -> list[str]:
    torch_files.the_program_is_of_the_model_before_it_was_trained(folder / "model.pt2")
    return ["model.pt2"]


@tampering("onnx", "onnx-optimized")
def the_onnx_file_keeps_its_weights_in_a_stale_file_beside_it(folder: Path) -> list[str]:
    onnx_files.the_weights_beside_the_file_are_of_an_earlier_run(folder / "model.onnx")
    record = {"path": "model.onnx.data", "size": 0, "sha256": "0" * 64}  # exports.reseal fills this in
    _edit_manifest(folder, lambda document: document["files"].append(record))
    return ["model.onnx", "model.onnx.data"]


@tampering(*ALL)
def the_stored_inputs_are_edited(folder: Path) -> list[str]:
    return _edit_reference(folder, "inputs", lambda tensor: tensor + 1e-3)


@tampering(*ALL)
def the_stored_results_in_float64_are_edited(folder: Path) -> list[str]:
    return _edit_reference(folder, "float64", lambda tensor: tensor + 1e-4)


@tampering(*ALL)
def the_stored_results_are_of_another_dtype(folder: Path) -> list[str]:
    return _edit_reference(folder, "outputs", torch.Tensor.half)


@tampering(*ALL)
def the_allowed_distance_is_made_smaller(folder: Path) -> list[str]:
    _edit_manifest(folder, lambda document: document["parity"]["bounds"]["hidden"].update(limit=1e-9))
    return []


@tampering()
def an_output_has_no_bound(folder: Path) -> list[str]:
    _edit_manifest(folder, lambda document: document["parity"]["bounds"].pop("longest"))
    return []


@tampering()
def a_file_is_taken_out(folder: Path) -> list[str]:
    (folder / "model.pt2").unlink()
    return []


@tampering()
def more_results_are_named_than_are_stored(folder: Path) -> list[str]:
    _edit_manifest(folder, lambda document: document["reference_cases"].append("batch 1000"))
    return []


@tampering("onnx", "onnx-optimized", missed="the bundle's own limit is believed")
def the_allowed_distance_is_made_larger_and_a_weight_edited(folder: Path) -> list[str]:
    def change(document: dict[str, Any]) -> None:
        bound = document["parity"]["bounds"]["hidden"]
        bound.update(limit=1.0, extremes=dict.fromkeys(bound["extremes"]))

    _edit_manifest(folder, change)
    return a_weight_of_the_onnx_file_is_edited(folder)


@tampering()
def a_file_that_holds_a_size_is_called_one_of_fixed_shape(folder: Path) -> list[str]:
    torch_files.the_script_is_a_trace_that_holds_a_size(folder / "model.torchscript.pt", "sequence")

    def change(document: dict[str, Any]) -> None:
        for artifact in document["artifacts"]:
            if artifact["format"] == "torchscript":
                artifact["fixed_shape"] = "it could not be scripted"

    _edit_manifest(folder, change)
    return ["model.torchscript.pt"]
