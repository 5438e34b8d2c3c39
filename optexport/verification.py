"""Checks a bundle by itself: its files are the ones that were proven, and they still give the stored outputs.

Needs torch and onnxruntime; neither transformers, nor the original model, nor its code.
"""

from __future__ import annotations

import math
from pathlib import Path

from optexport import bundle, runtimes
from optexport.errors import BundleError, ExportError, SourceError
from optexport.floor import Bound
from optexport.manifest import BoundRecord
from optexport.parity import PlaceParity, Proof


def verify(folder: Path) -> list[PlaceParity]:
    """Runs a bundle's files on its stored inputs and compares them with its stored outputs.

    Returns:
        How each file compares, in each of its runtimes.

    Raises:
        ConfigError: The folder is no bundle.
        BundleError: A file is missing, added, changed, or cannot be loaded.
    """
    manifest = bundle.read_manifest(folder)
    outputs = [output.name for output in manifest.outputs]
    reference = bundle.read_reference(folder / bundle.REFERENCE, manifest.reference_cases, outputs)
    proof = Proof(reference, {name: bound_of(record) for name, record in manifest.parity.bounds.items()})
    try:
        return [
            proof.check(place, run, traced_shape_only=artifact.fixed_shape is not None)
            for artifact in manifest.artifacts
            for place, run in runtimes.open_file(folder / artifact.path, artifact.format, outputs)
        ]
    except (ExportError, SourceError) as error:  # whose mends are for those who export
        raise BundleError(error.cause, place=error.place) from error


def bound_of(record: BoundRecord) -> Bound:
    """The bound that a manifest holds."""
    extremes = {case: math.inf if limit is None else limit for case, limit in record.extremes.items()}
    return Bound(record.floor, record.limit, record.atol, record.rtol, extremes)
