"""Implements ``optexport bench``: from paths and sizes to a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils import signals
from optexport.bench.artifact import Artifact, ArtifactSet, find_bundle, open_artifacts
from optexport.bench.measure import choose_pairs, measure
from optexport.bench.report import Report
from optexport.bench.turns import Settings
from optexport.bench.workload import Sizes, Workload, from_bundle, from_file, from_onnx
from optexport.bundle.layout import check_outside
from optexport.errors import ConfigError
from optexport.exporters.format import Format
from optexport.exporters.registry import get_format


def bench(
    paths: Sequence[Path],
    against: Sequence[Path] = (),
    shapes: Sequence[Sizes] = (),
    settings: Settings | None = None,
    formats: Sequence[str] = (),
    inputs: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures bundles and files, and compares them.

    Args:
        paths: Bundles and files to measure.
        against: Bundles and files to compare with; by default the first file of each format, which is compared with the
            first file of all.
        shapes: Sizes of dynamic axes, for each shape; by default the traced sizes.
        settings: Threads, rounds and seconds.
        formats: Formats to measure; by default all.
        inputs: A safetensors file of inputs; by default the inputs of the first bundle, or random inputs for the first
            ONNX file.
        announce: Called before each workload and group of artifacts.

    Raises:
        ConfigError: A path, size or format is invalid.
        BundleError: A bundle was changed.
        BenchError: An artifact cannot run.
    """
    sets = [open_artifacts(path) for path in (*paths, *against)]
    artifacts, baselines = _name_artifacts(sets, len(paths), formats)
    for artifact_list, name in ((artifacts, "formats"), (baselines if against else artifacts, "against")):
        if not artifact_list:
            raise ConfigError(f"no file has the format {' or '.join(formats)}", location=f"`{name}`")
    for artifact in (*artifacts, *baselines):
        get_format(artifact.format).check_installed(artifact.name)
    with signals.temporary_folder() as folder:
        try:
            workloads, notes = _workloads(sets, [*artifacts, *baselines], inputs, shapes, folder)
        except MemoryError as error:
            raise ConfigError(f"inputs of these sizes do not fit into memory: {error}", location="`shapes`") from error
        _check_inputs([*artifacts, *baselines], workloads)
        settings = settings or Settings()
        pairs = choose_pairs(artifacts, baselines)
        report = measure([*artifacts, *baselines], workloads, pairs, settings, announce)
    for name in sorted({artifact.format for artifact in (*artifacts, *baselines)}):
        if type(get_format(name)).prepare_benchmark is Format.prepare_benchmark:
            notes.append(f"{name}: `threads` may have no effect, because the format does not define prepare_benchmark.")
    return replace(report, notes=(*notes, *report.notes))


def _name_artifacts(
    sets: Sequence[ArtifactSet], candidates: int, formats: Sequence[str]
) -> tuple[list[Artifact], list[Artifact]]:
    """Returns artifacts and baselines with unique names; the first sets are the candidates.

    A file may occur twice, so that a user can see how far two measurements of it differ.
    """
    counts = Counter[str]()
    artifacts: list[Artifact] = []
    baselines: list[Artifact] = []
    for index, artifact_set in enumerate(sets):
        for artifact in artifact_set.artifacts:
            if formats and artifact.format not in formats:
                continue
            counts[artifact.name] += 1
            count = counts[artifact.name]
            name = artifact.name if count == 1 else f"{artifact.name} ({count})"
            (artifacts if index < candidates else baselines).append(replace(artifact, name=name))
    return artifacts, baselines


def _check_inputs(artifacts: Sequence[Artifact], workloads: Sequence[Workload]) -> None:
    available = workloads[0].names()
    for artifact in artifacts:
        if missing := [name for name in artifact.inputs or () if name not in available]:
            raise ConfigError(
                f"inputs {', '.join(missing)} are missing (found {', '.join(available)})",
                location=artifact.name,
                hint="All files run on the same inputs. Give files of one model, or `inputs` with all inputs.",
            )


def check_output(output: Path, measured: Sequence[Path]) -> None:
    """Checks that a result may be written to a file.

    The file must be outside of what is measured. It may replace only an earlier result, because any other file may
    hold weights or inputs.

    Raises:
        ConfigError: The result may not be written there.
    """
    bundles = [bundle for path in measured if (bundle := find_bundle(path)) is not None]
    check_outside("output", output, [*measured, *bundles])
    if not output.exists():
        return
    try:
        document = json.loads(output.read_bytes()) if output.is_file() else None  # reading a pipe would block
    except (OSError, ValueError, RecursionError):
        document = None
    if not (isinstance(document, dict) and {"machine", "artifacts"} <= document.keys()):
        raise ConfigError(
            "the file exists and is not a benchmark result", location=f"`output={output}`", hint="Name another file."
        )


def _workloads(
    sets: Sequence[ArtifactSet], artifacts: Sequence[Artifact], inputs: Path | None, shapes: Sequence[Sizes],
    folder: Path,
) -> tuple[list[Workload], list[str]]:  # fmt: skip
    """Returns the workloads, and notes about assumptions."""
    for artifact_set in sets:
        if artifact_set.bundle is not None and artifact_set.manifest is not None:
            return from_bundle(artifact_set.bundle, artifact_set.manifest, inputs, shapes, folder), []
    if inputs is not None:
        return from_file(inputs, shapes, artifacts), []
    for artifact in artifacts:
        if artifact.format == "onnx":
            return from_onnx(artifact, shapes, folder)
    raise ConfigError(
        "the inputs of the file are unknown",
        location=artifacts[0].name,
        hint="Give `inputs=FILE.safetensors`, or the bundle of the file.",
    )
