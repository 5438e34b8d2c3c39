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
from optexport.parity import Proof


def verify(folder: Path) -> Proof:
    """Runs a bundle's files on its stored inputs and compares them with its stored outputs.

    Returns:
        How each file compares, in each of its runtimes, after the original itself.

    Raises:
        ConfigError: The folder is no bundle.
        BundleError: A file is missing, added, changed, or cannot be loaded.
    """
    manifest = bundle.read_manifest(folder)
    outputs = [output.name for output in manifest.outputs]
    reference = bundle.read_reference(folder / bundle.REFERENCE, manifest.reference_cases, outputs)
    proof = Proof(reference, {name: _bound(record) for name, record in manifest.parity.bounds.items()})
    try:
        for artifact in manifest.artifacts:
            for place, run in runtimes.open_file(folder / artifact.path, artifact.format, outputs):
                proof.check(place, run, traced_shape_only=artifact.fixed_shape is not None)
    except (ExportError, SourceError) as error:  # whose mends are for those who export
        raise BundleError(error.cause, place=error.place) from error
    return proof


def _bound(record: BoundRecord) -> Bound:
    extremes = {case: math.inf if limit is None else limit for case, limit in record.extremes.items()}
    return Bound(record.floor, record.limit, record.atol, record.rtol, extremes)
