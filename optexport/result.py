"""Result of a run, as the Python API returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from optexport.bench.measure import Report
from optexport.bundle.manifest import Manifest
from optexport.errors import OptexportError, TrackingError
from optexport.parity.checker import TargetParity
from optexport.tracking.registry import Registered
from optexport.tuning.outcome import Outcome


@dataclass(frozen=True)
class Result:
    """What came of a run that ended well.

    Attributes:
        output: The bundle's folder.
        parity: How near every place is to the original, in the order of the pipeline.
        manifest: What the bundle says of itself.
        run_id: The MLflow run, if there is one.
        run_page: The address of that run in MLflow's own page, after the command that serves it if one is needed.
        tracking_failure: Why the run could not be tracked, if it could not.
        registered: What became of the model in the registry, if the config names one.
        baseline: The folder of the untransformed export, if it was asked for.
        bench: What was measured of the files, if anything.
        tuned: What came of tuning, by format.
        kept: The stages whose results were taken from an earlier run.
    """

    output: Path
    parity: tuple[TargetParity, ...] = field(repr=False)  # a page by itself, and so are the others
    manifest: Manifest = field(repr=False)
    run_id: str | None = None
    run_page: str | None = None
    tracking_failure: TrackingError | None = None
    registered: Registered | None = None
    baseline: Path | None = None
    bench: Report | None = field(default=None, repr=False)
    tuned: tuple[Outcome, ...] = field(default=(), repr=False)
    kept: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every place passed; always so, since a run that did not raises `ParityError` instead."""
        return all(target.passed for target in self.parity)

    @property
    def failure(self) -> OptexportError | None:
        """What did not end well though the bundle is whole: its tracking, or that it was to be the champion."""
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
        return {rule: list(dict.fromkeys(changed)) for rule, changed in nodes.items()}  # several graphs may share them

    @property
    def removed_nodes(self) -> dict[str, list[str]]:
        """The nodes that each rule took away, also where it put others in their place."""
        nodes: dict[str, list[str]] = {}
        for transformation in self.manifest.transformations:
            gone = (n for c in transformation.changes for n in c.replaced if n not in c.nodes)
            nodes.setdefault(transformation.rule, []).extend(gone)
        return {rule: list(dict.fromkeys(removed)) for rule, removed in nodes.items()}
