"""Tables of a bundle's files and limits in Markdown, for GitHub and MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from optexport._utils.markup import escape_markdown, size_in_words, table_row, times_as_fast
from optexport.bundle.gate_limits import GateLimit
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import GainRecord

GATE_TABLE = """
| gate | worst at | measured | limit |
|---|---|---:|---:|"""
_FILE_TABLE = """
| file | format | size | speed, compared with PyTorch |
|---|---|---:|---|"""


def file_lines(manifest: Manifest, gain: Sequence[GainRecord], gain_skipped: str) -> list[str]:
    """Returns a table with size and speed of each file, how the speed was measured, and why that of a file was not.

    Args:
        gain: The times of the files and of the original model.
        gain_skipped: The reason if times are missing; empty otherwise.
    """
    skipped = [f"The speed was not measured: {gain_skipped}."] if gain_skipped else []
    setting = [f"The speed is that at {gain[0].setting}."] if gain else []
    notes = [line for text in (*setting, *skipped) for line in ("", text)]
    return [_FILE_TABLE, *_file_rows(manifest, gain), *notes]


def _file_rows(manifest: Manifest, gain: Sequence[GainRecord]) -> Iterator[str]:
    gains = {
        record.format: f"{times_as_fast(record.speedup, record.low, record.high)} ({record.ms:.3g} ms per call)"
        for record in gain
    }
    for artifact in manifest.artifacts:
        precision = "" if artifact.precision is None else f" ({artifact.precision.precision})"
        size, speed = size_in_words(manifest.size_of(artifact)), gains.get(artifact.format, "not measured")
        yield table_row(escape_markdown(artifact.path), f"{artifact.format}{precision}", size, speed)


def limit_rows(limits: Iterable[GateLimit]) -> Iterator[str]:
    """Yields a row of `GATE_TABLE` for each limit of ``[gate]``."""
    for limit in limits:
        yield table_row(escape_markdown(limit.gate), limit.format, limit.value_text, limit.bound)
