"""``optexport bench``: from paths and sizes to a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils import signals
from optexport.bench.artifact import Artifact, Target, bundle_of, open_target
from optexport.bench.measure import Report, measure, pairs_of
from optexport.bench.turns import Settings
from optexport.bench.workload import Sizes, Workload, from_bundle, from_file, from_onnx
from optexport.bundle.layout import check_outside
from optexport.errors import ConfigError


def bench(
    paths: Sequence[Path],
    against: Sequence[Path] = (),
    shapes: Sequence[Sizes] = (),
    settings: Settings | None = None,
    formats: Sequence[str] = (),
    inputs: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures bundles and files, and compares them with others.

    Args:
        against: Bundles and files to compare with; by default the first of a format is compared with.
        shapes: Sizes of dynamic dimensions, for each shape; by default the traced ones.
        formats: Only artifacts of these formats; all by default.
        inputs: A safetensors file of the inputs; by default those of the first bundle, or made up from the first ONNX
            file.

    Raises:
        ConfigError: A path, size or format cannot be meant.
        BundleError: A bundle was changed.
        BenchError: An artifact cannot be run.
    """
    targets = [open_target(path) for path in (*paths, *against)]
    names = Counter[str]()
    chosen: list[list[Artifact]] = [[], []]
    for index, target in enumerate(targets):
        for artifact in target.artifacts:
            if not formats or artifact.format in formats:
                names[artifact.name] += 1
                again = names[artifact.name]  # one file may be given twice, to see how far that is from alike
                name = artifact.name if again == 1 else f"{artifact.name} ({again})"
                chosen[index >= len(paths)].append(replace(artifact, name=name))
    artifacts, baselines = chosen
    for given, option in ((artifacts, "--format"), (baselines if against else artifacts, "--against")):
        if not given:
            raise ConfigError(f"none of what is given is {' or '.join(formats)}", location=option)
    with signals.temporary_folder() as folder:
        try:
            workloads, notes = _workloads(targets, [*artifacts, *baselines], inputs, shapes, folder)
        except MemoryError as error:
            raise ConfigError(f"inputs of these sizes do not fit: {error}", location="--shape") from error
        _check_takes([*artifacts, *baselines], workloads)
        settings = settings or Settings()
        pairs = pairs_of(artifacts, baselines)
        report = measure([*artifacts, *baselines], workloads, pairs, settings, announce)
    if len(artifacts) > 1 and not pairs:
        notes.append("Files of different formats are compared where one of them is given by --against.")
    return replace(report, notes=(*notes, *report.notes))


def _check_takes(artifacts: Sequence[Artifact], workloads: Sequence[Workload]) -> None:
    given = workloads[0].names()
    for artifact in artifacts:
        if missing := [name for name in artifact.inputs or () if name not in given]:
            raise ConfigError(
                f"it takes {', '.join(missing)}, and the inputs are {', '.join(given)}",
                location=artifact.name,
                hint="All run on the same inputs: give files of one model, or --inputs with what all of them take.",
            )


def check_output(output: Path, measured: Sequence[Path]) -> None:
    """Checks that the result may be written to a place: outside what is measured, and over no file but such a result.

    Any other file may hold the weights, or the inputs, of what is measured.

    Raises:
        ConfigError: It may not.
    """
    bundles = [bundle for path in measured if (bundle := bundle_of(path)) is not None]
    check_outside("--output", output, [*measured, *bundles])
    if not output.exists():
        return
    try:
        document = json.loads(output.read_bytes()) if output.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError, RecursionError):
        document = None
    if not (isinstance(document, dict) and {"machine", "artifacts"} <= document.keys()):
        raise ConfigError(
            "it exists and holds no measurements", location=f"--output {output}", hint="Name another file."
        )


def _workloads(
    targets: Sequence[Target], artifacts: Sequence[Artifact], inputs: Path | None, shapes: Sequence[Sizes], folder: Path
) -> tuple[list[Workload], list[str]]:
    for target in targets:
        if target.bundle is not None and target.manifest is not None:
            return from_bundle(target.bundle, target.manifest, inputs, shapes, folder), []
    if inputs is not None:
        return from_file(inputs, shapes, artifacts), []
    for artifact in artifacts:
        if artifact.format == "onnx":
            return from_onnx(artifact, shapes, folder)
    raise ConfigError(
        f"nothing says what inputs {artifacts[0].name} takes",
        hint="Give --inputs FILE.safetensors, or the bundle that it is of.",
    )
