"""What ``measurements.json`` holds that a report shows. Of a bundle of an earlier version parts may be missing."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from optexport.bundle import sealed_json
from optexport.bundle.places import MEASUREMENTS
from optexport.errors import BundleError
from optexport.tuning.outcome import Outcome


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MeasuredFile(_Record):
    """A file that was measured: its name among all, its size in bytes, and whether it is part of the bundle."""

    name: str
    format: str
    bytes: int
    proven: bool


class FigureRecord(_Record):
    """What a file takes at one shape; the interval is that of the median turn, at 95 %, null of too few rounds."""

    artifact: str
    format: str
    shape: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    low_ms: float | None = None
    high_ms: float | None = None
    rows_per_second: float
    load_seconds: float
    peak_memory_bytes: int | None


class ComparisonRecord(_Record):
    """How many times as fast one file is as another at one shape, with its 95 % interval."""

    artifact: str
    baseline: str
    shape: str
    speedup: float
    low: float
    high: float
    verdict: str


class BenchRecord(_Record):
    """All that was measured of the files of a run."""

    threads: int
    rounds: int
    artifacts: list[MeasuredFile]
    figures: list[FigureRecord]
    comparisons: list[ComparisonRecord]
    notes: list[str]

    @property
    def shapes(self) -> list[str]:
        """The shapes that were measured, in that order."""
        return list(dict.fromkeys(figure.shape for figure in self.figures))


class Measured(_Record):
    """When, on what machine, how long each stage took, and what was measured of the files."""

    date: str
    platform: str = ""
    processor: str = ""
    cpus: int | None = None
    device: str = "cpu"
    threads: int | None = None
    seconds: dict[str, float] = {}
    bench: BenchRecord | None = None
    tune: list[Outcome] = []


def read_measured(folder: Path) -> Measured:
    """Reads the measurements of a bundle.

    Raises:
        BundleError: They are missing, damaged, or of another form.
    """
    try:
        return Measured.model_validate(sealed_json.read(folder / MEASUREMENTS))
    except ValueError as error:
        raise BundleError(f"it does not hold what a report shows: {error}", place=str(folder / MEASUREMENTS)) from error
