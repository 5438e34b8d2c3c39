"""The schema of ``measurements.json``. Bundles of earlier versions may lack some parts."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from optexport.bundle import digest_json
from optexport.bundle.layout import MEASUREMENTS
from optexport.bundle.outcomes import Outcome
from optexport.bundle.parity_records import Count


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MeasuredFile(_Record):
    """A benchmarked file.

    Attributes:
        name: The name of the file.
        format: The format of the file.
        bytes: The size in bytes.
        proven: True if the file is part of the bundle.
    """

    name: str
    format: str
    bytes: Count
    proven: bool


class FigureRecord(_Record):
    """Benchmark of a file at one shape.

    Attributes:
        artifact: The name of the file.
        format: The format of the file.
        shape: The shape of the inputs.
        p50_ms: The median time of a call, in milliseconds.
        p90_ms: The 90th percentile, in milliseconds.
        p99_ms: The 99th percentile, in milliseconds.
        low_ms: The lower end of the 95 % interval of the median turn; null after too few rounds.
        high_ms: The upper end of the 95 % interval of the median turn; null after too few rounds.
        rows_per_second: The throughput.
        load_seconds: The time to load the file, in seconds.
        peak_memory_bytes: The peak resident memory minus that before loading, in bytes; null if unknown.
    """

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
    """Speedup of a file over a baseline at one shape, with its 95 % interval."""

    artifact: str
    baseline: str
    shape: str
    speedup: float
    low: float
    high: float
    verdict: str


class BenchRecord(_Record):
    """All benchmarks of a run's files."""

    threads: Count
    rounds: Count
    artifacts: list[MeasuredFile]
    figures: list[FigureRecord]
    comparisons: list[ComparisonRecord]
    notes: list[str]

    @property
    def shapes(self) -> list[str]:
        """Returns the shapes in the order of their measurement."""
        return list(dict.fromkeys(figure.shape for figure in self.figures))


class GainRecord(_Record):
    """Times of a file and of the original model in PyTorch, on the traced batch.

    Attributes:
        format: The format of the file.
        ms: The time of a call of the file, in milliseconds.
        original_ms: The time of a call of the original model, in milliseconds.
        speedup: How many times as fast as the original the file is: the median of the ratios of all rounds.
        low: The lower end of the 95 % interval of ``speedup``.
        high: The upper end.
        sizes: The sizes of the inputs.
        threads: The number of threads.
    """

    format: str
    ms: float
    original_ms: float
    speedup: float
    low: float
    high: float
    sizes: str
    threads: Count

    @property
    def setting(self) -> str:
        """Returns the sizes and threads in words."""
        return f"{self.sizes.replace(',', ', ')}; {self.threads} thread{'s' if self.threads != 1 else ''}"


class Origin(_Record):
    """Origin of a bundle; empty for a bundle that was made in memory.

    Attributes:
        git: The commit, branch and repository of the config.
        part: The part of a generative model.
        lock_sha256: The digest of the lockfile that the run used.
        mlflow_run: The id of the run that was started for the bundle.
    """

    git: dict[str, str] = {}
    part: str | None = None
    lock_sha256: str | None = None
    mlflow_run: str | None = None


class Measured(_Record):
    """Measurements of a run: date, machine, duration of each step, and benchmarks.

    Attributes:
        manifest: The digest of the bundle's manifest.
        date: The date in ISO 8601 format.
        seconds: The duration of each step, in seconds.
        gain: The times of the files and of the original model.
        gain_skipped: The reason if these times are missing; empty otherwise.
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
    gain: list[GainRecord] = []
    gain_skipped: str = ""
    bench: BenchRecord | None = None
    tune: list[Outcome] = []
    origin: Origin = Origin()


def read_measured(folder: Path) -> Measured:
    """Reads the measurements of a bundle.

    Raises:
        BundleError: The measurements are missing, damaged, or have another schema.
    """
    return digest_json.validated(Measured, digest_json.read(folder / MEASUREMENTS), folder / MEASUREMENTS)
