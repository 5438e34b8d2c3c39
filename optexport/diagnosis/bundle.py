"""Diagnosis of a bundle without its model: failed files and their first divergence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import fx

from optexport.bundle import digests
from optexport.bundle.layout import REFERENCE
from optexport.diagnosis import failure
from optexport.diagnosis.bisect_artifacts import diagnose_artifacts
from optexport.diagnosis.reproduction import Finding
from optexport.errors import BundleError, ExportError
from optexport.exporters import targets
from optexport.parity.checker import ParityChecker
from optexport.parity.reference_file import read_reference
from optexport.parity.verify import gates_of, tolerance_of
from optexport.runtime.untrusted import archives


def diagnose_bundle(folder: Path) -> str:
    """Runs a bundle's files on its stored inputs, even if changed, and explains failures.

    Returns:
        A message about passed checks.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: The bundle is damaged, but its files reproduce the stored outputs. Also raised for unknown files
            and for an invalid manifest.
        ParityError: A file does not reproduce the stored outputs. ``<folder>-failure`` contains the reproduction.
    """
    folder = folder.resolve()
    manifest = digests.read_structure(folder)
    damage: BundleError | None = None
    try:
        digests.check_unchanged(folder, manifest)
    except BundleError as error:
        damage = error
    outputs = [output.name for output in manifest.outputs]
    reference = read_reference(folder / REFERENCE, manifest.reference_cases, outputs, manifest.parity.extreme_cases)
    is_lowered = any(artifact.precision is not None for artifact in manifest.artifacts)
    bounds = {name: tolerance_of(record) for name, record in manifest.parity.bounds.items()}
    checker = ParityChecker(reference, bounds, gates_of(manifest) if is_lowered else ())  # for lower precision only
    files: dict[str, Path] = {artifact.format: folder / artifact.path for artifact in manifest.artifacts}
    for artifact in manifest.artifacts:
        fixed = artifact.fixed_shape is not None
        try:
            for target, run in targets.open_file(folder / artifact.path, artifact.format, outputs, artifact.device):
                precision = None if artifact.precision is None else artifact.precision.precision
                checker.check(target, run, traced_shape_only=fixed, precision=precision)
        except ExportError as error:  # its hint is for the exporting user only
            damage = damage or BundleError(error.message, location=error.location)
    if not checker.passed:

        def find() -> Finding:
            device = manifest.artifacts[0].device
            finding = diagnose_artifacts(_find_passing_graph(files, checker), files, checker, device)
            if damage is None:
                return finding
            note = f"The bundle is damaged, which may be the cause: {damage.location}: {damage.message}."
            return replace(finding, explanation=f"{note}\n{finding.explanation}")

        raise failure.diagnose_failure(checker, folder.with_name(f"{folder.name}-failure"), None, find, lambda: None)
    if damage is not None:
        raise damage
    return failure.describe_margin(checker.targets)


def _find_passing_graph(files: dict[str, Path], checker: ParityChecker) -> fx.GraphModule | None:
    """Returns the graph of the bundle's ``.pt2`` file if that file passes."""
    passing = {target.target for target in checker.targets if target.passed}
    if "pt2" not in passing or "pt2" not in files:
        return None
    module = archives.pt2_module(files["pt2"], check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module
