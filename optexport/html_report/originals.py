"""Whether the originals of two bundles gave the same, on the inputs that both were proven on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from optexport.proof.reference import Reference


@dataclass(frozen=True)
class Found:
    """What the stored results of two originals tell.

    Attributes:
        shared: How many inputs both hold.
        apart: The first result that is farther apart than both proofs allow, as words; None where none is.
    """

    shared: int
    apart: str | None


def compare(one: Path, a: Manifest, other: Path, b: Manifest) -> Found:
    """Compares what the originals of two bundles gave in float64; extreme inputs are left out.

    Args:
        one, other: The folders, whose files are those of their manifests.

    Raises:
        BundleError: One of them holds no results as its manifest names them.
    """
    ours, theirs = _read(one, a), _read(other, b)
    known = {_content(case.batch): number for number, case in enumerate(theirs.cases) if case.name in _judged(b)}
    shared = 0
    for number, case in enumerate(ours.cases):
        if case.name not in _judged(a) or (same := known.get(_content(case.batch))) is None:
            continue
        shared += 1
        for name, result in ours.exact[number].items():
            limit = sum(m.parity.bounds[name].limit for m in (a, b) if name in m.parity.bounds)
            if name in theirs.exact[same] and (far := _distance(result, theirs.exact[same][name])) > limit:
                return Found(
                    shared, f"the originals' {name} are {far:.2g} apart at {case.name}, of {limit:.2g} allowed"
                )
    return Found(shared, None)


def _read(folder: Path, manifest: Manifest) -> Reference:
    from optexport.bundle.contents import REFERENCE, read_reference  # torch, which two equal bundles do not need

    return read_reference(folder / REFERENCE, manifest.reference_cases, [each.name for each in manifest.outputs])


def _judged(manifest: Manifest) -> set[str]:
    extreme = {case for bound in manifest.parity.bounds.values() for case in bound.extremes}
    return set(manifest.reference_cases) - extreme


def _content(batch: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str, tuple[int, ...], bytes], ...]:
    import torch

    return tuple(
        (name, str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(_bytes(tensor, torch.uint8)).digest())
        for name, tensor in sorted(batch.items())
    )


def _bytes(tensor: torch.Tensor, byte: torch.dtype) -> bytes:
    return tensor.contiguous().reshape(-1).view(byte).numpy().tobytes()


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest; infinite where shapes differ, or one is not a number where the other is one."""
    import torch

    if one.shape != other.shape:
        return float("inf")
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if apart.numel() else 0.0
