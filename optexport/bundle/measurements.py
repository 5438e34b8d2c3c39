"""What ``measurements.json`` holds. Of a bundle of an earlier version parts may be missing."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from optexport.bundle import digest_json
from optexport.bundle.layout import MEASUREMENTS
from optexport.bundle.manifest import Count
from optexport.tuning.outcome import Outcome


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MeasuredFile(_Record):
    """A file that was measured: its name among all, its size in bytes, and whether it is part of the bundle."""

    name: str
    format: str
    bytes: Count
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
    peak_memory_bytes: Count | None


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

    threads: Count
    rounds: Count
    artifacts: list[MeasuredFile]
    figures: list[FigureRecord]
    comparisons: list[ComparisonRecord]
    notes: list[str]

    @property
    def shapes(self) -> list[str]:
        """The shapes that were measured, in that order."""
        return list(dict.fromkeys(figure.shape for figure in self.figures))


class Origin(_Record):
    """What a bundle was made of, as far as there is any: bundles that were made in memory have none of it.

    Attributes:
        git: The commit, branch and repository of the config.
        part: Of a generative model.
        lock_sha256: The digest of the lock that it was held to.
        mlflow_run: The id of the run that was started for it.
    """

    git: dict[str, str] = {}
    part: str | None = None
    lock_sha256: str | None = None
    mlflow_run: str | None = None


class Measured(_Record):
    """When, on what machine, how long each stage took, and what was measured of the files.

    Attributes:
        manifest: The digest of the manifest that it belongs to.
        date: As ISO 8601 writes it.
        seconds: By stage.
    """

    manifest: str
    date: str
    host: str = ""
    platform: str = ""
    processor: str = ""
    cpus: Count | None = None
    device: str = "cpu"
    threads: Count | None = None
    seconds: dict[str, float] = {}
    bench: BenchRecord | None = None
    tune: list[Outcome] = []
    origin: Origin = Origin()


def read_measured(folder: Path) -> Measured:
    """Reads the measurements of a bundle.

    Raises:
        BundleError: They are missing, damaged, or of another form.
    """
    return digest_json.validated(Measured, digest_json.read(folder / MEASUREMENTS), folder / MEASUREMENTS)
