"""The bundle: what a run writes into it beside the exported files, and reads again."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from optexport.bundle import digest_json
from optexport.bundle.layout import MANIFEST, MEASUREMENTS, check_place
from optexport.bundle.layout import REFERENCE as REFERENCE
from optexport.bundle.manifest import Manifest
from optexport.errors import BundleError, ConfigError, unreadable
from optexport.parity.cases import Case
from optexport.parity.reference import Outputs, Reference

# Reference tensors beyond this many bytes are left out, largest cases first; the traced case always stays.
_REFERENCE_BYTES = 16 << 20


def check_output(output: Path) -> None:
    """Checks that a bundle may be written to a place, before any work is done for it.

    Raises:
        ConfigError: Something else is there, or nothing can be written there.
    """
    check_place(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"nothing can be written there: {error}", place=f"export.output: {output}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest; the last file of a bundle but for the measurements."""
    digest_json.write(folder / MANIFEST, manifest.model_dump(mode="json", exclude={"digest"}))


def write_measurements(folder: Path, measurements: Mapping[str, Any]) -> None:
    """Writes what may differ between two equal runs, tied to the manifest beside it."""
    digest_json.write(
        folder / MEASUREMENTS, {**measurements, "manifest": digest_json.read(folder / MANIFEST)["digest"]}
    )


def write_reference(path: Path, reference: Reference) -> list[str]:
    """Stores inputs and the original's outputs: of the traced case, and of as many others as fit, smallest first.

    Returns:
        The names of the stored cases.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: list[str] = []
    size = 0
    traced, *others = zip(reference.cases, reference.outputs, reference.exact, strict=True)
    for case, outputs, exact in [traced, *sorted(others, key=lambda row: _bytes(row[1]))]:
        size += 3 * _bytes(outputs)
        if names and size > _REFERENCE_BYTES:
            break
        for part, values in (("inputs", case.batch), ("outputs", outputs), ("float64", exact)):
            for name, tensor in values.items():
                tensors[f"{len(names)}.{part}.{name}"] = tensor.detach().contiguous().clone()
        names.append(case.name)
    save_file(tensors, path)
    return names


def _bytes(outputs: Outputs) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())


def read_reference(
    path: Path, case_names: Sequence[str], output_names: Sequence[str], extreme: Collection[str] = ()
) -> Reference:
    """Reads what `write_reference` stored.

    Args:
        extreme: The cases of values unlike data.

    Raises:
        BundleError: It is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise unreadable(error, path) from error

    def part(index: int, kind: str) -> dict[str, torch.Tensor]:
        prefix = f"{index}.{kind}."
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    indices = range(len(case_names))
    if not {key.partition(".")[0] for key in tensors} <= {str(index) for index in indices}:
        raise BundleError("it holds more cases than the manifest names", place=str(path))
    reference = Reference(
        cases=tuple(
            Case(name, part(index, "inputs"), extreme=name in extreme) for index, name in enumerate(case_names)
        ),
        outputs=tuple(part(index, "outputs") for index in indices),
        exact=tuple(part(index, "float64") for index in indices),
    )
    if not indices or any(set(part) != set(output_names) for part in (*reference.outputs, *reference.exact)):
        raise BundleError("it does not hold the outputs that the manifest names", place=str(path))
    for outputs, exact in zip(reference.outputs, reference.exact, strict=True):
        for name, output in outputs.items():
            kinds = (output.dtype, torch.float64, torch.complex128)
            if exact[name].shape != output.shape or exact[name].dtype not in kinds:
                raise BundleError(f"it holds {name} twice, of other shapes or dtypes", place=str(path))
    return reference
