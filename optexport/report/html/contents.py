"""What the page says, of what a bundle holds: the verdict, the matrix, what was skipped, how to make it again."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from optexport.bundle.manifest import CaseRecord, Manifest, OutputRecord, ParityRecord, TargetRecord
from optexport.bundle.measurements import Measured
from optexport.errors import on_one_line
from optexport.report.ci import batches
from optexport.report.html.figures import Interval
from optexport.tuning.outcome import AS_CONFIGURED, Trial

MOST_ROWS = 200
_MOST_NAMES = 12
# Python is no package, and this one is installed from its repository.
_NOT_BY_NAME = ("python", "optexport")
# A name and a version as PyPI has them. pip takes more for an option, an address or a file, whoever wrote the manifest.
_PACKAGE = re.compile(r"[a-z0-9][\w.-]*==[a-z0-9][\w.+!]*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """What the proof came to.

    Attributes:
        told: In one sentence.
        reservations: What whoever relies on it has to know.
    """

    passed: bool
    told: str
    reservations: tuple[str, ...]


def verdict(manifest: Manifest) -> Verdict:
    """The verdict on a bundle, of the record of its proof."""
    proof = manifest.parity
    failures = [f"{target.title}, {output.output}: {case.failure}" for target in proof.targets for output in target.outputs
                for case in output.cases if case.failure is not None]  # fmt: skip
    failures += [f"{target.title}: {d.failure}" for target in proof.targets for d in target.decisions if d.failure]
    files = len(manifest.artifacts)
    lowered = [artifact for artifact in manifest.artifacts if artifact.precision is not None]
    near = files - len(lowered)
    told = []
    if near:
        what = f"{near} of {files} files compute" if near < files else f"All {files} files compute"
        what = "The file computes" if files == 1 else what
        told.append(f"{what} what the original computes, as near as its own rounding allows")
    if lowered:
        names = ", ".join(f"{a.format} ({a.precision.precision})" for a in lowered if a.precision is not None)
        told.append(f"{names} {'decides' if len(lowered) == 1 else 'decide'} as the gates demand")
    sentence = f"{'; '.join(told)}: checked on {_count(len(proof.cases), 'batch', 'batches')}."
    if failures:
        sentence = f"{_count(len(failures), 'comparison', 'comparisons')} failed: {failures[0]}."
    return Verdict(not failures, sentence, tuple(_reservations(manifest)))


def _reservations(manifest: Manifest) -> Iterator[str]:
    proof = manifest.parity
    for artifact in manifest.artifacts:
        if artifact.fixed_shape is not None:
            yield f"{artifact.path} works at the traced sizes only: {artifact.fixed_shape}."
    if any(artifact.precision is not None for artifact in manifest.artifacts) and manifest.ungated:
        yield f"Nothing is demanded of {_names(manifest.ungated)} where a file is of lower precision."
    if any(a.precision is not None for a in manifest.artifacts) and any(gate.real for gate in proof.gates):
        yield "Gates on files of lower precision count on the data alone: at other sizes gross faults alone are found."
    if proof.fallback is not None:
        yield f"float64 could not be had ({proof.fallback}), so that all is compared with the original itself."
    if manifest.few_digits:
        yield f"The original differs from float64 in {_names(manifest.few_digits)}: a fault of that size passes."
    if manifest.only_zeros:
        yield f"On ordinary batches nothing but zeros is in {_names(manifest.only_zeros)}, which shows little."
    if proof.left_out:
        yield f"Not checked: {_names(proof.left_out)}."
    if proof.unguided:
        yield (f"Compared with the original itself, since float64 goes another way there: {_names(proof.unguided)}.")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{'; '.join(names[:_MOST_NAMES])}{more}"


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def shown_batches(proof: ParityRecord) -> str:
    """The names of what was checked on."""
    return _names(batches(proof.cases).split("; "))


@dataclass(frozen=True)
class Cell:
    """One output at one place: what stands in the matrix."""

    output: OutputRecord
    target: TargetRecord
    failed: bool

    @property
    def share(self) -> float | None:
        """The largest distance as a share of what was allowed of it; None where no distance was limited."""
        return max((share for case in self.output.cases if (share := share_of(case)) is not None), default=None)


def share_of(case: CaseRecord) -> float | None:
    """The distance as a share of its limit; None where it has none."""
    if case.limit is None or case.distance is None:
        return None
    return case.distance / case.limit if case.limit > 0 else 0.0 if case.distance == 0 else math.inf


def matrix(proof: ParityRecord) -> dict[str, list[Cell | None]]:
    """By output, one cell for every place."""
    rows: dict[str, list[Cell | None]] = {name: [] for name in proof.bounds}
    for target in proof.targets:
        found = {output.output: output for output in target.outputs}
        for name, cells in rows.items():
            output = found.get(name)
            failed = output is not None and any(case.failure is not None for case in output.cases)
            cells.append(None if output is None else Cell(output, target, failed))
    return rows


@dataclass(frozen=True)
class WorstOfCase:
    """Where a batch came nearest to its limit."""

    case: str
    target: str
    output: str
    record: CaseRecord

    @property
    def share(self) -> float | None:
        return share_of(self.record)


def worst_of_cases(proof: ParityRecord) -> list[WorstOfCase]:
    """For each batch, the place and output that came nearest to the limit."""
    worst: dict[str, WorstOfCase] = {}
    for target in proof.targets:
        for output in target.outputs:
            for case in output.cases:
                found = WorstOfCase(case.case, target.title, output.output, case)
                if case.case not in worst or (found.share or 0.0) > (worst[case.case].share or 0.0):
                    worst[case.case] = found
    return [worst[name] for name in proof.cases if name in worst]


@dataclass(frozen=True)
class Skipped:
    """Something that was not done: what, at which places, and why."""

    what: str
    where: tuple[str, ...]
    why: str


def skipped(manifest: Manifest, measured: Measured) -> list[Skipped]:
    """All that was left out, with the reason: near misses that are alike together."""
    found = [Skipped(artifact.format, ("other sizes than the traced ones",), artifact.fixed_shape)
             for artifact in manifest.artifacts if artifact.fixed_shape is not None]  # fmt: skip
    found += [Skipped("a size", (axis,), "the model fixes it") for axis in manifest.fixed_axes]
    found += [Skipped("a check", (), what) for what in manifest.parity.left_out]
    if manifest.application is not None:
        found += [Skipped("a preprocessor", (), what) for what in manifest.application.missing]
    for rule in manifest.transformations:
        reasons: dict[str, list[str]] = {}
        for miss in rule.near_misses:
            reasons.setdefault(miss.reason, []).append(miss.node)
        title = f"{rule.rule} ({', '.join(rule.formats)})" if rule.formats else rule.rule
        found += [Skipped(title, tuple(nodes), reason) for reason, nodes in reasons.items()]
    for artifact in manifest.artifacts:
        kept: dict[str, list[str]] = {}
        for layer in artifact.precision.layers if artifact.precision is not None else ():
            if layer.kept is not None:
                why = "the config keeps it" if layer.kept == "asked for" else "measured: lowering it breaks a gate"
                kept.setdefault(why, []).append(layer.layer)
        found += [Skipped(f"{artifact.format} in lower precision", tuple(names), why) for why, names in kept.items()]
    for outcome in measured.tune:
        found += [Skipped(f"tuning {outcome.format}", (trial.change,), trial.refused)
                  for trial in outcome.trials if trial.refused is not None]  # fmt: skip
        if outcome.untried:
            found.append(Skipped(f"tuning {outcome.format}", outcome.untried, "no time was left"))
    if measured.bench is None:
        found.append(Skipped("latency", (), "it was not asked for: [bench] enabled = true, or optexport bench BUNDLE"))
    else:
        found += [Skipped("latency", (), note) for note in measured.bench.notes]
    return found


def speedups(measured: Measured) -> list[Interval]:
    """The comparisons of a run, to be drawn."""
    rows = measured.bench.comparisons if measured.bench is not None else []
    return [Interval(f"{row.artifact}, {row.shape}", row.speedup, row.low, row.high) for row in rows]


def trials(measured: Measured) -> list[Interval]:
    """What tuning tried, to be drawn: each over what is configured."""
    return [
        Interval(f"{outcome.format}: {trial.change}", c.speedup, c.low, c.high)
        for outcome in measured.tune
        for trial in outcome.trials
        if (c := trial.comparison) is not None
    ]


def trial_told(trial: Trial) -> str:
    """What came of something that tuning tried."""
    if trial.refused is not None:
        return f"refused: {trial.refused}"
    if trial.comparison is None:
        return "" if trial.change == AS_CONFIGURED else "not measured"
    return trial.comparison.told


def commands(manifest: Manifest, *, from_file: bool) -> list[str]:
    """What to type to make the bundle again, and to check it; what the manifest says is quoted for the shell.

    Args:
        from_file: Whether there was a config file.
    """
    if manifest.config.get("generation") is None:
        again = "reproduce BUNDLE --folder FOLDER  # the folder in which config.toml lay"
    else:
        again = "run config.toml  # with the options that it was given, as --without"
    versions = manifest.versions
    packages = [f"{name}=={version}" for name, version in versions.items() if name not in _NOT_BY_NAME]
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
        *([f".venv/bin/optexport {again}"] if from_file else []),
        ".venv/bin/optexport verify BUNDLE",
    ]


def named(manifest: Manifest) -> str:
    """What to call the bundle: the model's source, in short."""
    return manifest.model.source.removeprefix("package:").removeprefix("python:").removeprefix("mlflow:")


def sizes(manifest: Manifest) -> dict[str, int]:
    """The bytes of each exported model, with the weights that ONNX keeps beside it, by format."""
    by_path = {file.path: file.size for file in manifest.files}
    return {a.format: by_path.get(a.path, 0) + by_path.get(f"{a.path}.data", 0) for a in manifest.artifacts}
