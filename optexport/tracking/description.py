"""The description of a run on its page in MLflow, as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from optexport._utils.markup import escape_markdown, size_in_words, table_row, times_as_fast
from optexport.bundle.layout import REPORT
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured
from optexport.bundle.outcomes import PYTORCH
from optexport.bundle.verdict import passed_text
from optexport.config.benchmarks import GateConfig
from optexport.config.metrics import round_for_gate
from optexport.errors import short_line
from optexport.tracking.bundle_record import BUNDLE, BundleRecord
from optexport.tracking.tables import TABLES

# Tag with the description of a run.
DESCRIPTION_TAG = "mlflow.note.content"
# Artifact path of the folder of a failed check.
FAILURE = "bundle-failure"
# In characters: MLflow's databases limit tags to 8,000, those of earlier versions to 5,000.
_MAX_DESCRIPTION = 5000
_MAX_REASON = 3500
_MAX_GATES = 15
_MAX_NAME = 100
_FILE_TABLE = """
| file | format | size | speed, compared with PyTorch |
|---|---|---:|---|"""
_GATE_TABLE = """
| gate | worst at | measured | limit |
|---|---|---:|---:|"""
_ARTIFACTS = {
    REPORT: "the report",
    BUNDLE: "the bundle with the files",
    TABLES: "all numbers",
    "config.toml": "the config",
}


def describe_bundle(bundle: BundleRecord, names: Sequence[str]) -> str:
    """Returns the description of the run of a bundle: verdict, files, gates and artifacts.

    Args:
        names: The names of the run's artifacts.
    """
    manifest, measured = bundle.manifest, bundle.measurements
    lines = [
        f"**PASSED** {passed_text(manifest)}",
        _FILE_TABLE,
        *_file_rows(manifest, measured),
        *_gain_note(measured),
        *_gate_lines(manifest, measured, bundle.settings.gate),
        "",
        _artifact_list({name: text for name, text in _ARTIFACTS.items() if name in names}),
    ]
    return "\n".join(lines)[:_MAX_DESCRIPTION]


def describe_failure(reason: str, status: str, artifacts: Mapping[str, str] | None = None) -> str:
    """Returns the description of a run that failed or was interrupted.

    Args:
        reason: The text of the error.
        status: The status of the run.
        artifacts: The content of each artifact of the run, by name.
    """
    title = "INTERRUPTED" if status == "KILLED" else "FAILED"
    # Markdown shows indented lines as they are.
    blocks = [f"**{title}**", textwrap.indent(reason[:_MAX_REASON], "    ")]
    return "\n\n".join(blocks + ([_artifact_list(artifacts)] if artifacts else []))


def _artifact_list(artifacts: Mapping[str, str]) -> str:
    return "\n".join(["Artifacts of this run:", "", *(f"- `{name}`: {text}" for name, text in artifacts.items())])


def _file_rows(manifest: Manifest, measured: Measured) -> Iterator[str]:
    gains = {
        record.format: f"{times_as_fast(record.speedup, record.low, record.high)} ({record.ms:.3g} ms per call)"
        for record in measured.gain
    }
    for artifact in manifest.artifacts:
        precision = "" if artifact.precision is None else f" ({artifact.precision.precision})"
        size, gain = size_in_words(manifest.size_of(artifact)), gains.get(artifact.format, "not measured")
        yield table_row(escape_markdown(artifact.path), f"{artifact.format}{precision}", size, gain)


def _gain_note(measured: Measured) -> list[str]:
    """Returns how the speed was measured, and why that of a file was not."""
    skipped = [f"The speed was not measured: {measured.gain_skipped}."] if measured.gain_skipped else []
    setting = [f"The speed is that at {measured.gain[0].setting}."] if measured.gain else []
    return [line for text in (*setting, *skipped) for line in ("", text)]


def _gate_lines(manifest: Manifest, measured: Measured, gate: GateConfig) -> list[str]:
    rows = [*_metric_rows(manifest), *_limit_rows(manifest, measured, gate)]
    hidden = len(rows) - _MAX_GATES
    rest = (
        ["", f"{hidden} more {'gate is' if hidden == 1 else 'gates are'} in `{TABLES}/gates.json` and `config.toml`."]
        if hidden > 0
        else []
    )
    return [_GATE_TABLE, *rows[:_MAX_GATES], *rest] if rows else []


def _metric_rows(manifest: Manifest) -> Iterator[str]:
    """Yields a row for each gate on a metric, at the target with the smallest value."""
    smallest: dict[tuple[str, str | None], tuple[str, float, float]] = {}
    for target in manifest.parity.compared:
        for result in target.gate_results:
            key = (result.measure, result.output)
            if result.value is not None and (key not in smallest or result.value < smallest[key][1]):
                smallest[key] = (target.title, result.value, result.min)
    for (measure, output), (title, value, minimum) in smallest.items():
        name = escape_markdown(short_line(measure if output is None else f"{measure} of {output}", _MAX_NAME))
        yield table_row(name, title, round_for_gate(value, minimum), f"at least {minimum:.15g}")


def _limit_rows(manifest: Manifest, measured: Measured, gate: GateConfig) -> Iterator[str]:
    """Yields a row for each limit of ``[gate]``, with the worst measured value."""
    formats: list[str] = [artifact.format for artifact in manifest.artifacts]
    sizes = {str(artifact.format): manifest.size_of(artifact) / 1e6 for artifact in manifest.artifacts}
    latencies, speedups = dict[str, float](), dict[str, float]()
    if measured.bench is not None:
        # Candidates and the plain export are measured too.
        names = {file.name: file.format for file in measured.bench.artifacts if file.proven}
        for figure in (figure for figure in measured.bench.figures if figure.artifact in names):
            latencies[figure.format] = max(figure.p50_ms, latencies.get(figure.format, 0.0))
        for row in measured.bench.comparisons:
            if row.artifact not in names or row.baseline == PYTORCH:
                continue
            name = names[row.artifact]
            speedups[name] = min(row.low, speedups.get(name, row.low))
    for title, limits, values, bound in (
        ("max_size_mb", gate.max_size_mb, sizes, "at most"),
        ("max_latency_ms", gate.max_latency_ms, latencies, "at most"),
        ("min_speedup", gate.min_speedup, speedups, "at least"),
    ):
        for name in formats:
            if limits is not None and (limit := limits.of(name)) is not None and name in values:
                yield table_row(escape_markdown(title), name, f"{values[name]:.4g}", f"{bound} {limit:g}")
