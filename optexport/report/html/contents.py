"""Derives the contents of the report from a bundle, such as verdict and parity matrix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from optexport.bundle.manifest import ArtifactRecord, Manifest
from optexport.bundle.measurements import FigureRecord, Measured
from optexport.bundle.outcomes import Outcome, Trial
from optexport.bundle.parity_records import CaseRecord, OutputRecord, ParityRecord, TargetRecord
from optexport.bundle.verdict import passed_text
from optexport.errors import on_one_line
from optexport.report.html.plots import Interval
from optexport.report.parity_text import case_names, list_coarse_gates

MAX_ROWS = 200
_MAX_NAMES = 12
# Python is not a package, and optexport is installed from its repository.
_NOT_ON_PYPI = ("python", "optexport")
# Names and versions as PyPI has them. pip would take other texts of a manifest for an option, an address or a file.
_PACKAGE = re.compile(r"[a-z0-9][\w.-]*==[a-z0-9][\w.+!]*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """Verdict of the parity check.

    Attributes:
        passed: True if every target passed.
        sentence: The verdict as one sentence.
        reservations: What a user of the bundle must know.
    """

    passed: bool
    sentence: str
    reservations: tuple[str, ...]


def verdict(manifest: Manifest) -> Verdict:
    """Returns the verdict on a bundle."""
    parity = manifest.parity
    failures = [f"{target.title}, {output.output}: {case.failure}" for target in parity.targets
                for output in target.outputs for case in output.cases if case.failure is not None]  # fmt: skip
    failures += [f"{target.title}: {d.failure}" for target in parity.targets for d in target.gate_results if d.failure]
    if failures:
        sentence = f"{_count(len(failures), 'comparison', 'comparisons')} failed: {failures[0]}."
    else:
        sentence = passed_text(manifest)
    return Verdict(not failures, sentence, tuple(_reservations(manifest)))


def _reservations(manifest: Manifest) -> Iterator[str]:
    parity = manifest.parity
    for artifact in manifest.artifacts:
        if artifact.fixed_shape is not None:
            yield f"{artifact.path} works only at the traced sizes: {artifact.fixed_shape}."
    if any(artifact.precision is not None for artifact in manifest.artifacts):
        if manifest.ungated:
            yield f"No gate checks {_join(manifest.ungated)} in files of lower precision."
        if any(gate.is_user_data for gate in parity.gates):
            yield (
                "Gates of files with lower precision use your data only; at other sizes only gross errors are detected."
            )
    if parity.fallback is not None:
        yield f"float64 failed ({parity.fallback}), so the files are compared with the original itself."
    if manifest.few_digits:
        yield f"The original differs from float64 in {_join(manifest.few_digits)}: errors of that size pass."
    if manifest.only_zeros:
        yield f"In all ordinary cases {_join(manifest.only_zeros)} is zero, so its check shows little."
    for text in list_coarse_gates(parity):
        yield f"{text}, so it requires that all agree."
    if parity.left_out:
        yield f"Not checked: {_join(parity.left_out)}."
    if parity.unguided:
        yield f"Compared with the original itself, because float64 takes another path: {_join(parity.unguided)}."


def _join(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{'; '.join(names[:_MAX_NAMES])}{rest}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def short_case_names(parity: ParityRecord) -> str:
    """Returns the names of the first cases."""
    return _join(case_names(parity.cases).split("; "))


@dataclass(frozen=True)
class Cell:
    """A cell of the parity matrix: one output of one target."""

    output: OutputRecord
    target: TargetRecord
    failed: bool

    @property
    def share(self) -> float | None:
        """Largest share of the tolerance that is used; None without a tolerance."""
        return self.output.used_share


def matrix(parity: ParityRecord) -> dict[str, list[Cell | None]]:
    """Returns a row of cells by output, with a cell for every target."""
    rows: dict[str, list[Cell | None]] = {name: [] for name in parity.bounds}
    for target in parity.targets:
        outputs = {output.output: output for output in target.outputs}
        for name, cells in rows.items():
            output = outputs.get(name)
            failed = output is not None and any(case.failure is not None for case in output.cases)
            cells.append(None if output is None else Cell(output, target, failed))
    return rows


@dataclass(frozen=True)
class WorstOfCase:
    """The target and output that use most of the tolerance in a case."""

    case: str
    target: str
    output: str
    record: CaseRecord

    @property
    def share(self) -> float | None:
        """Share of the tolerance that is used."""
        return self.record.used_share


def worst_of_cases(parity: ParityRecord) -> list[WorstOfCase]:
    """Returns, for each case, the target and output that use most of the tolerance."""
    worst: dict[str, WorstOfCase] = {}
    for target in parity.targets:
        for output in target.outputs:
            for case in output.cases:
                row = WorstOfCase(case.case, target.title, output.output, case)
                if case.case not in worst or (row.share or 0.0) > (worst[case.case].share or 0.0):
                    worst[case.case] = row
    return [worst[name] for name in parity.cases if name in worst]


@dataclass(frozen=True)
class Skipped:
    """Something that was not done, where, and for what reason."""

    subject: str
    locations: tuple[str, ...]
    reason: str


def skipped(manifest: Manifest, measured: Measured) -> list[Skipped]:
    """Returns everything that was skipped, with equal near misses grouped."""
    rows = [Skipped(artifact.format, ("other sizes than the traced ones",), artifact.fixed_shape)
            for artifact in manifest.artifacts if artifact.fixed_shape is not None]  # fmt: skip
    rows += [Skipped("a dynamic axis", (axis,), "the model fixes it") for axis in manifest.fixed_axes]
    rows += [Skipped("a check of values", (line,), "files do not raise") for line in manifest.skipped_checks]
    rows += [Skipped("a check", (), reason) for reason in manifest.parity.left_out]
    if manifest.application is not None:
        rows += [Skipped("a preprocessor", (), reason) for reason in manifest.application.missing]
    rows += _near_misses(manifest)
    for artifact in manifest.artifacts:
        rows += _float32_layers(artifact)
    return rows + _skipped_measurements(measured)


def _near_misses(manifest: Manifest) -> Iterator[Skipped]:
    for rule in manifest.transformations:
        nodes: dict[str, list[str]] = {}
        for miss in rule.near_misses:
            nodes.setdefault(miss.reason, []).append(miss.node)
        title = f"{rule.rule} ({', '.join(rule.formats)})" if rule.formats else rule.rule
        yield from (Skipped(title, tuple(names), reason) for reason, names in nodes.items())


def _float32_layers(artifact: ArtifactRecord) -> Iterator[Skipped]:
    layers: dict[str, list[str]] = {}
    for layer in artifact.precision.layers if artifact.precision is not None else ():
        if layer.kept is not None:
            asked_for = layer.kept == "asked for"
            reason = "set by the config" if asked_for else "measured: with lower precision a gate fails"
            layers.setdefault(reason, []).append(layer.layer)
    subject = f"lower precision in {artifact.format}"
    yield from (Skipped(subject, tuple(names), reason) for reason, names in layers.items())


def _skipped_measurements(measured: Measured) -> list[Skipped]:
    rows: list[Skipped] = []
    for outcome in measured.tune:
        rows += [Skipped(f"tuning {outcome.format}", (trial.change,), trial.refused)
                 for trial in outcome.trials if trial.refused is not None]  # fmt: skip
        if outcome.untried:
            rows.append(Skipped(f"tuning {outcome.format}", outcome.untried, "no time left"))
    if measured.bench is not None:
        rows += [Skipped("benchmark", (), note) for note in measured.bench.notes]
    elif not measured.gain:
        reason = "not enabled; set [bench] enabled = true, or run optexport bench BUNDLE"
        rows.append(Skipped("benchmark", (), reason))
    return rows


def first_figures(measured: Measured) -> list[FigureRecord]:
    """Returns the measurement of each exported file at its first shape."""
    if measured.bench is None:
        return []
    exported = {artifact.name for artifact in measured.bench.artifacts if artifact.proven}
    figures: dict[str, FigureRecord] = {}
    for figure in measured.bench.figures:
        if figure.artifact in exported:
            figures.setdefault(figure.artifact, figure)
    return list(figures.values())


def speedups(measured: Measured) -> list[Interval]:
    """Returns the comparisons of the benchmark for a plot."""
    rows = measured.bench.comparisons if measured.bench is not None else []
    return [
        Interval(f"{row.artifact} over {row.baseline}, {row.shape}", row.speedup, row.low, row.high) for row in rows
    ]


def trials(measured: Measured) -> list[Interval]:
    """Returns the speedups of the tuning trials over the configured file for a plot."""
    return [
        Interval(f"{outcome.format}: {trial.change}", comparison.speedup, comparison.low, comparison.high)
        for outcome in measured.tune
        for trial in outcome.trials
        if (comparison := trial.comparison) is not None
    ]


def trial_result(outcome: Outcome, trial: Trial) -> str:
    """Returns the result of a trial of an outcome in words."""
    if trial.refused is not None:
        return f"rejected: {trial.refused}"
    if trial.comparison is None:
        return "baseline" if trial.change == outcome.measure else "not measured"
    return trial.comparison.verdict_text


def commands(manifest: Manifest, *, has_config_file: bool) -> list[str]:
    """Returns shell commands that reproduce and check the bundle.

    Texts of the manifest are quoted for the shell.

    Args:
        manifest: The bundle's manifest.
        has_config_file: True if the bundle was made from a config file.
    """
    if manifest.config.get("generation") is None:
        export = "reproduce BUNDLE --folder FOLDER  # the original folder of config.toml"
    else:
        export = "run config.toml  # with the options of the original run, such as --without"
    versions = manifest.versions
    packages = [f"{name}=={version}" for name, version in versions.items() if name not in _NOT_ON_PYPI]
    if manifest.model.source.startswith("package:") and manifest.model.revision:
        packages.append(manifest.model.revision.replace(" ", "=="))
    packages = [package for package in packages if _PACKAGE.fullmatch(package)]
    label = re.search(r"\+(\w+)$", versions.get("torch", ""), re.ASCII)
    index = f"--extra-index-url https://download.pytorch.org/whl/{label[1]} " if label else ""
    python = shlex.quote(f"python{'.'.join(versions.get('python', '3').split('.')[:2])}")
    return [
        f"{python} -m venv .venv",
        f".venv/bin/pip install {index}{' '.join(map(shlex.quote, packages))}",
        f".venv/bin/pip install PATH/TO/OPTEXPORT  # version {on_one_line(manifest.optexport_version)}",
        *([f".venv/bin/optexport {export}"] if has_config_file else []),
        ".venv/bin/optexport verify BUNDLE",
    ]


def source_name(manifest: Manifest) -> str:
    """Returns the model's source without its prefix, as a title."""
    return manifest.model.source.removeprefix("package:").removeprefix("python:").removeprefix("mlflow:")


def sizes(manifest: Manifest) -> dict[str, int]:
    """Returns the bytes of each exported model by format, with all of its files."""
    return {artifact.format: manifest.size_of(artifact) for artifact in manifest.artifacts}
