"""The description of a run on its page in MLflow, as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from optexport._utils.markup import escape_markdown, table_row
from optexport.bundle.gate_limits import list_gate_limits
from optexport.bundle.layout import REPORT
from optexport.bundle.manifest import Manifest
from optexport.bundle.markdown import GATE_TABLE, file_lines, limit_rows
from optexport.bundle.measurements import Measured
from optexport.bundle.verdict import passed_text
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
        *file_lines(manifest, measured.gain, measured.gain_skipped),
        *_gate_lines(manifest, measured),
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


def _gate_lines(manifest: Manifest, measured: Measured) -> list[str]:
    rows = [*_metric_rows(manifest), *limit_rows(list_gate_limits(manifest, measured.bench))]
    hidden = len(rows) - _MAX_GATES
    rest = (
        ["", f"{hidden} more {'gate is' if hidden == 1 else 'gates are'} in `{TABLES}/gates.json` and `config.toml`."]
        if hidden > 0
        else []
    )
    return [GATE_TABLE, *rows[:_MAX_GATES], *rest] if rows else []


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
