"""Checks of a finished bundle: unchanged files that reproduce the stored outputs.

This needs torch and onnxruntime, but neither transformers nor the original model or its code.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from optexport._utils.paths import as_path
from optexport.bundle import digests
from optexport.bundle.layout import MANIFEST, REFERENCE
from optexport.bundle.manifest import Manifest
from optexport.bundle.parity_records import GateRecord, ToleranceRecord
from optexport.bundle.sign import check_signature
from optexport.config.metrics import CUSTOM_METRIC, METRICS
from optexport.errors import BundleError, ExportError
from optexport.exporters import targets
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import CaseMetric, Gate, pool_cases
from optexport.parity.noise_floor import Tolerance
from optexport.parity.reference_file import read_reference
from optexport.parity.verified import Verified


def verify(folder: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> Verified:
    """Runs a bundle's files on its stored inputs and compares them with its stored outputs.

    Gates are checked again on the stored cases, except gates on user metrics, whose code is not in the bundle.

    Args:
        folder: The bundle.
        key: A public key; the bundle must then have a valid signature.

    Returns:
        The comparison of each file in each of its runtimes, after the original. Its `summary` has the text of
        ``optexport verify``, and `passed` the verdict.

    Raises:
        ConfigError: The folder is not a bundle, or the key is unusable.
        BundleError: A file is missing, added or changed, or cannot be loaded, or the signature is not valid.
        DeviceError: The device that the files need is missing.
    """
    folder = as_path(folder, "folder")
    check_signature(folder, key)
    verified = check_files(folder, digests.read_manifest(folder))
    verified.key = None if key is None else as_path(key, "key")
    return verified


def check_files(folder: Path, manifest: Manifest, shown_folder: Path | None = None) -> Verified:
    """Runs and compares the files of a bundle whose digests are already verified.

    Args:
        shown_folder: The folder as the user wrote it.

    Raises:
        BundleError: A file cannot be loaded.
        DeviceError: The device that the files need is missing.
    """
    _check_precisions(manifest)
    outputs = [output.name for output in manifest.outputs]
    reference = read_reference(folder / REFERENCE, manifest.reference_cases, outputs, manifest.parity.extreme_cases)
    tolerances = {name: tolerance_of(record) for name, record in manifest.parity.bounds.items()}
    checker = Verified(
        reference,
        tolerances,
        gates_of(manifest),
        folder=shown_folder or folder,
        unchecked=list_unchecked_gates(manifest),
        fixed=[artifact.format for artifact in manifest.artifacts if artifact.fixed_shape is not None],
    )
    try:
        for artifact in manifest.artifacts:
            for target, run in targets.open_file(folder / artifact.path, artifact.format, outputs, artifact.device):
                precision = None if artifact.precision is None else artifact.precision.precision
                checker.check(target, run, traced_shape_only=artifact.fixed_shape is not None, precision=precision)
                del run  # frees the weights before the next file is opened
    except ExportError as error:  # its hint is for the exporting user only
        raise BundleError(error.message, location=error.location) from error
    _check_cases(checker, manifest)
    return checker


def list_unchecked_gates(manifest: Manifest) -> list[str]:
    """Returns the gates of a bundle that `verify` cannot check."""
    checked = [(gate.measure, gate.output) for gate in gates_of(manifest)]
    unchecked = [record for record in manifest.parity.gates if (record.measure, record.output) not in checked]
    return [record.measure if record.output is None else f"{record.output}, {record.measure}" for record in unchecked]


def _check_precisions(manifest: Manifest) -> None:
    """Rejects a file whose lower precision does not match the bundle's parity record.

    No distance limits a file of lower precision, so one edited line of the manifest would let any file pass.
    """
    recorded = {target.target: target.precision for target in manifest.parity.targets}
    for artifact in manifest.artifacts:
        precision = None if artifact.precision is None else artifact.precision.precision
        if recorded.get(artifact.format) != precision or (precision is not None and not manifest.parity.gates):
            described = "the model's own precision" if precision is None else precision
            raise BundleError(
                f"the parity record does not show that {artifact.format} was checked in {described}", location=MANIFEST
            )


def _check_cases(checker: ParityChecker, manifest: Manifest) -> None:
    """Rejects a file without a parity record, or with a fixed shape that it contradicts."""
    recorded = {target.target: target for target in manifest.parity.targets}
    for target in checker.targets[1:]:
        cases = {case.case for output in target.outputs for case in output.cases}
        if (record := recorded.get(target.target)) is None:
            raise BundleError(f"the manifest has no parity record of {target.target}", location=MANIFEST)
        recorded_cases = {case.case for output in record.outputs for case in output.cases}
        if missing := sorted(recorded_cases.intersection(manifest.reference_cases) - cases):
            raise BundleError(
                f"{target.target} is recorded with a fixed shape, but its parity record has the case {missing[0]}, "
                "which has another shape",
                location=MANIFEST,
            )


def gates_of(manifest: Manifest) -> list[Gate]:
    """Returns the gates that the stored cases allow to check.

    Raises:
        BundleError: A gate refers to an unknown metric or output.
    """
    outputs = [output.name for output in manifest.outputs]
    records = [record for record in manifest.parity.gates if not record.measure.startswith(CUSTOM_METRIC)]
    if not all(record.measure in METRICS and record.output in outputs for record in records):
        raise BundleError("a gate of the manifest has an unknown metric or an unknown output", location=MANIFEST)
    gates = [_gate(record, manifest) for record in records]
    return [gate for gate in gates if gate is not None]


def tolerance_of(record: ToleranceRecord) -> Tolerance:
    """Converts a tolerance record of the manifest into a tolerance."""
    own_limits = {case: math.inf if limit is None else limit for case, limit in record.extremes.items()}
    return Tolerance(record.floor, record.limit, record.atol, record.rtol, own_limits)


def _gate(record: GateRecord, manifest: Manifest) -> Gate | None:
    """Returns a gate for the stored cases, or None if they have nothing to count.

    The share over all cases may exceed the share over the stored ones. The minimum is then lowered to the stored share.
    """
    minimum = record.min
    for target in manifest.parity.targets:
        for gate_result in target.gate_results:
            if (gate_result.measure, gate_result.output) == (record.measure, record.output):
                stored = [
                    CaseMetric(c.case, c.total, math.inf if c.smallest is None else c.smallest, c.count)
                    for c in gate_result.cases
                    if c.case in manifest.reference_cases
                ]
                if math.isnan(value := pool_cases(record.measure, stored)):
                    return None
                minimum = min(minimum, value)
    cases, is_user_data = tuple(record.cases), record.is_user_data
    return Gate(record.measure, record.output, minimum, cases, is_user_data, record.k, record.classes, record.slack)
