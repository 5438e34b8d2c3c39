"""Checks of a finished bundle: unchanged files that reproduce the stored outputs.

This needs torch and onnxruntime, but neither transformers nor the original model or its code.
"""

from __future__ import annotations

import math
from pathlib import Path

from optexport.bundle import digests
from optexport.bundle.layout import MANIFEST, REFERENCE, as_path
from optexport.bundle.manifest import Manifest
from optexport.bundle.parity_records import GateRecord, ToleranceRecord
from optexport.config.metrics import MEASURES, METRIC
from optexport.errors import BundleError, ExportError
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import CaseDecision, Gate, pooled
from optexport.parity.noise_floor import Tolerance
from optexport.parity.reference_file import read_reference
from optexport.runtime import runners


def verify(folder: str | Path) -> ParityChecker:
    """Runs a bundle's files on its stored inputs and compares them with its stored outputs.

    Gates are checked again on the stored cases, except gates on user metrics, whose code is not in the bundle.

    Returns:
        The comparison of each file in each of its runtimes, after the original.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: A file is missing, added or changed, or cannot be loaded.
        DeviceError: The device that the files need is missing.
    """
    folder = as_path(folder, "folder")
    return prove(folder, digests.read_manifest(folder))


def prove(folder: Path, manifest: Manifest) -> ParityChecker:
    """Runs and compares the files of a bundle whose digests are already verified.

    Raises:
        BundleError: A file cannot be loaded.
        DeviceError: The device that the files need is missing.
    """
    _check_precisions(manifest)
    outputs = [output.name for output in manifest.outputs]
    reference = read_reference(folder / REFERENCE, manifest.reference_cases, outputs, manifest.parity.extreme_cases)
    bounds = {name: tolerance_of(record) for name, record in manifest.parity.bounds.items()}
    proof = ParityChecker(reference, bounds, gates_of(manifest))
    try:
        for artifact in manifest.artifacts:
            for target, run in runners.open_file(folder / artifact.path, artifact.format, outputs, artifact.device):
                precision = None if artifact.precision is None else artifact.precision.precision
                proof.check(target, run, traced_shape_only=artifact.fixed_shape is not None, precision=precision)
                del run  # frees the weights before the next file is opened
    except ExportError as error:  # its hint is for the exporting user only
        raise BundleError(error.message, location=error.location) from error
    _check_cases(proof, manifest)
    return proof


def unchecked_gates(manifest: Manifest) -> list[str]:
    """Returns the gates of a bundle that `verify` cannot check."""
    checked = [(gate.measure, gate.output) for gate in gates_of(manifest)]
    left = [record for record in manifest.parity.gates if (record.measure, record.output) not in checked]
    return [record.measure if record.output is None else f"{record.output}, {record.measure}" for record in left]


def _check_precisions(manifest: Manifest) -> None:
    """Rejects a file whose lower precision does not match the bundle's parity record.

    No distance limits a file of lower precision, so one edited line of the manifest would let any file pass.
    """
    proven = {target.target: target.precision for target in manifest.parity.targets}
    for artifact in manifest.artifacts:
        precision = None if artifact.precision is None else artifact.precision.precision
        if proven.get(artifact.format) != precision or (precision is not None and not manifest.parity.gates):
            told = "of the model's own precision" if precision is None else precision
            raise BundleError(f"it calls {artifact.format} {told}, and holds no proof of that", location=MANIFEST)


def _check_cases(proof: ParityChecker, manifest: Manifest) -> None:
    """Rejects a file without a parity record, or with a fixed shape that it contradicts."""
    proven = {target.target: target for target in manifest.parity.targets}
    for target in proof.targets[1:]:
        now = {case.case for output in target.outputs for case in output.cases}
        if (record := proven.get(target.target)) is None:
            raise BundleError(f"it holds no proof of {target.target}", location=MANIFEST)
        then = {case.case for output in record.outputs for case in output.cases}
        if missing := sorted(then.intersection(manifest.reference_cases) - now):
            told = f"it calls {target.target} of fixed shape, and its proof has {missing[0]}"
            raise BundleError(told, location=MANIFEST)


def gates_of(manifest: Manifest) -> list[Gate]:
    """Returns the gates that the stored cases allow to check.

    Raises:
        BundleError: A gate refers to an unknown metric or output.
    """
    outputs = [output.name for output in manifest.outputs]
    records = [record for record in manifest.parity.gates if not record.measure.startswith(METRIC)]
    if not all(record.measure in MEASURES and record.output in outputs for record in records):
        raise BundleError("it has a gate on what is no measure, or no output", location=MANIFEST)
    gates = [_gate(record, manifest) for record in records]
    return [gate for gate in gates if gate is not None]


def tolerance_of(record: ToleranceRecord) -> Tolerance:
    """Converts a tolerance record of the manifest into a tolerance."""
    extremes = {case: math.inf if limit is None else limit for case, limit in record.extremes.items()}
    return Tolerance(record.floor, record.limit, record.atol, record.rtol, extremes)


def _gate(record: GateRecord, manifest: Manifest) -> Gate | None:
    """Returns a gate for the stored cases, or None if they have nothing to count.

    The share over all cases may exceed the share over the stored ones. The minimum is then lowered to the stored share.
    """
    least = record.min
    for target in manifest.parity.targets:
        for decision in target.decisions:
            if (decision.measure, decision.output) == (record.measure, record.output):
                stored = [
                    CaseDecision(c.case, c.total, math.inf if c.smallest is None else c.smallest, c.count)
                    for c in decision.cases
                    if c.case in manifest.reference_cases
                ]
                if math.isnan(value := pooled(record.measure, stored)):
                    return None
                least = min(least, value)
    cases, real = tuple(record.cases), record.real
    return Gate(record.measure, record.output, least, cases, real, record.k, record.classes, record.slack)
