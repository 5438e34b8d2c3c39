"""The data of a finished run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from optexport.bench.report import Report
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import GainRecord
from optexport.bundle.outcomes import Outcome
from optexport.errors import OptexportError, TrackingError
from optexport.parity.checker import TargetParity
from optexport.tracking import Tracker
from optexport.tracking.registry.registration import Registered


@dataclass(frozen=True)
class RunData:
    """Data of a successful run; `optexport.Result` describes the fields."""

    output: Path
    parity: tuple[TargetParity, ...] = field(repr=False)  # too long for a repr, as are the other fields without one
    manifest: Manifest = field(repr=False)
    run_id: str | None = None
    run_page: str | None = None
    tracking_failure: TrackingError | None = None
    registered: Registered | None = None
    baseline: Path | None = None
    seconds: float | None = None
    gain: tuple[GainRecord, ...] = ()
    gain_skipped: str = field(default="", repr=False)
    bench: Report | None = field(default=None, repr=False)
    tuned: tuple[Outcome, ...] = field(default=(), repr=False)
    cache_hits: tuple[str, ...] = ()

    def with_tracking(self, tracker: Tracker) -> Self:
        """Returns the result with the outcome of its MLflow run."""
        return replace(
            self,
            run_id=tracker.run_id,
            run_page=tracker.page,
            tracking_failure=tracker.failure,
            registered=tracker.registered,
        )

    @property
    def passed(self) -> bool:
        """True if every target passes. Always true: a failed run raises `ParityError` instead."""
        return all(target.passed for target in self.parity)

    @property
    def failure(self) -> OptexportError | None:
        """The error of tracking or of the alias; the bundle is complete in both cases."""
        return self.tracking_failure or (None if self.registered is None else self.registered.failure)

    @property
    def files(self) -> dict[str, Path]:
        """The exported files by format."""
        return {artifact.format: self.output / artifact.path for artifact in self.manifest.artifacts}

    @property
    def transformed_nodes(self) -> dict[str, list[str]]:
        """The nodes that each rule changed."""
        nodes: dict[str, list[str]] = {}
        for transformation in self.manifest.transformations:
            nodes.setdefault(transformation.rule, []).extend(n for c in transformation.changes for n in c.nodes)
        return {rule: list(dict.fromkeys(names)) for rule, names in nodes.items()}  # several graphs may share nodes

    @property
    def removed_nodes(self) -> dict[str, list[str]]:
        """The nodes that each rule removed or replaced."""
        nodes: dict[str, list[str]] = {}
        for transformation in self.manifest.transformations:
            removed = (n for c in transformation.changes for n in c.replaced if n not in c.nodes)
            nodes.setdefault(transformation.rule, []).extend(removed)
        return {rule: list(dict.fromkeys(names)) for rule, names in nodes.items()}
