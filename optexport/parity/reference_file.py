"""Reference file of a bundle: inputs and outputs of the original."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from optexport.bundle.contents import read_reference_tensors
from optexport.errors import BundleError
from optexport.parity.cases.case import Case
from optexport.parity.reference import Outputs, Reference

# Limit of the file in bytes. The largest cases are dropped first; the traced case always stays.
_REFERENCE_BYTES = 16 << 20


def write_reference(path: Path, reference: Reference) -> list[str]:
    """Writes inputs and outputs of the traced case and of the smallest other cases that fit.

    Returns:
        The names of the stored cases.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: list[str] = []
    size = 0
    traced, *rest = zip(reference.cases, reference.outputs, reference.exact, strict=True)
    for case, outputs, exact in [traced, *sorted(rest, key=lambda row: _bytes(row[1]))]:
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
    """Reads a file that `write_reference` wrote.

    Args:
        case_names: Names of the stored cases, in order.
        output_names: Names of the outputs that each case must have.
        extreme: Names of the extreme cases.

    Raises:
        BundleError: The file does not match the manifest.
    """
    tensors = read_reference_tensors(path)

    def part(index: int, kind: str) -> dict[str, torch.Tensor]:
        prefix = f"{index}.{kind}."
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    indices = range(len(case_names))
    if not {key.partition(".")[0] for key in tensors} <= {str(index) for index in indices}:
        raise BundleError("the file has more cases than the manifest lists", location=str(path))
    reference = Reference(
        cases=tuple(
            Case(name, part(index, "inputs"), extreme=name in extreme) for index, name in enumerate(case_names)
        ),
        outputs=tuple(part(index, "outputs") for index in indices),
        exact=tuple(part(index, "float64") for index in indices),
    )
    if not indices or any(set(part) != set(output_names) for part in (*reference.outputs, *reference.exact)):
        raise BundleError("the file does not have exactly the outputs that the manifest lists", location=str(path))
    for outputs, exact in zip(reference.outputs, reference.exact, strict=True):
        for name, output in outputs.items():
            kinds = (output.dtype, torch.float64, torch.complex128)
            if exact[name].shape != output.shape or exact[name].dtype not in kinds:
                raise BundleError(
                    f"the stored output {name} and its float64 values have different shapes or dtypes",
                    location=str(path),
                )
    return reference
