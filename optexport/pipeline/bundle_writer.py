"""Writes the results of a run to its bundle."""

from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optexport._utils.packages import versions
from optexport._utils.platform import machine, processor_flags
from optexport._version import __version__
from optexport.bench.report import Report
from optexport.bench.report import as_json as bench_as_json
from optexport.bundle import contents, digests, layout
from optexport.bundle.manifest import (
    ArtifactRecord,
    ChangeRecord,
    DimRecord,
    Manifest,
    ModelRecord,
    NearMissRecord,
    TensorRecord,
    TransformationRecord,
    ValuesRecord,
)
from optexport.bundle.measurements import GainRecord
from optexport.bundle.node_error_records import NodeErrorsRecord
from optexport.bundle.outcomes import Outcome
from optexport.bundle.parity_records import ParityRecord
from optexport.errors import printable
from optexport.exporters import registry
from optexport.inference.describe import describe
from optexport.job import Job, VariantResult
from optexport.parity.checker import ParityChecker
from optexport.parity.reference_file import write_reference
from optexport.pipeline import triton
from optexport.pipeline.portable_config import portable_config
from optexport.pipeline.steps import TracedJob
from optexport.report.result import Result
from optexport.report.tuning import as_json as tuning_as_json
from optexport.runtime import devices
from optexport.signature.arguments import Constant
from optexport.signature.signature import TensorSpec
from optexport.transformations.apply import Applied


@dataclass(frozen=True)
class RunResults:
    """The results of a run that its bundle records.

    Attributes:
        traced: The traced job.
        checker: The reference, and all comparisons with it.
        parity: These comparisons as a record of the manifest.
        node_errors: The error of each node along the graphs.
        variants: The files of all variants.
        outcomes: The results of tuning.
        cache_hits: The steps whose results are from the cache.
        gain: The times of the files and of the original model.
        gain_skipped: Why there are none; empty otherwise.
        bench: The benchmarks of the files, if any.
    """

    traced: TracedJob
    checker: ParityChecker
    parity: ParityRecord
    node_errors: NodeErrorsRecord
    variants: tuple[VariantResult, ...]
    outcomes: tuple[Outcome, ...]
    cache_hits: tuple[str, ...]
    gain: tuple[GainRecord, ...] = ()
    gain_skipped: str = ""
    bench: Report | None = None

    @property
    def artifacts(self) -> list[ArtifactRecord]:
        """The files of all variants."""
        return [artifact for variant in self.variants for artifact in variant.artifacts]

    def as_result(self, manifest: Manifest) -> Result:
        """Returns the result for the Python API."""
        return Result(
            self.traced.job.output,
            tuple(self.checker.targets),
            manifest,
            gain=self.gain,
            gain_skipped=self.gain_skipped,
            bench=self.bench,
            tuned=self.outcomes,
            cache_hits=self.cache_hits,
        )


def write_graph(path: Path, graph_module: fx.GraphModule) -> None:
    """Writes a graph as text that is safe for terminals."""
    path.write_text(printable(f"{graph_module.graph}\n"), encoding="utf-8")


def write_bundle(draft: Path, results: RunResults) -> Manifest:
    """Completes a bundle: reference, config, layout, tokenizer or processor, and manifest.

    Args:
        draft: The bundle's folder, with the exported files.
    """
    job, reference, artifacts = results.traced.job, results.checker.reference, results.artifacts
    reference_cases = write_reference(draft / layout.REFERENCE, reference)
    if job.config_text is not None:
        (draft / "config.toml").write_text(job.config_text, encoding="utf-8")
    if job.config.export.layout is not None:
        artifacts = triton.lay_out(draft, job.config.export.output, artifacts, results.traced.signature, reference)
    application = describe(job.config.model.task, job.loaded, results.traced.signature, draft)
    manifest = _manifest(results, reference_cases).model_copy(
        update={"application": application, "artifacts": artifacts, "files": digests.file_records(draft)}
    )
    contents.write_manifest(draft, manifest)
    return manifest


def measured_values(results: RunResults) -> dict[str, Any]:
    """Returns what a run measured and chose, for `write_measurements`."""
    measured: dict[str, Any] = {"device": devices.describe(results.traced.job.config.model.device)}
    measured |= {"gain": [record.model_dump() for record in results.gain]} if results.gain else {}
    measured |= {"gain_skipped": results.gain_skipped} if results.gain_skipped else {}
    measured |= {} if results.bench is None else {"bench": bench_as_json(results.bench)}
    measured |= {"tune": tuning_as_json(results.outcomes)} if results.outcomes else {}
    measured |= {"cache_hits": list(results.cache_hits)} if results.cache_hits else {}
    return measured


def write_measurements(draft: Path, job: Job, seconds: Mapping[str, float], measured: Mapping[str, Any]) -> None:
    """Writes the data that may differ between two equal runs: times, machine, benchmarks and origin.

    Args:
        draft: The bundle's folder.
        seconds: The seconds of each step.
        measured: The result of `measured_values`.
    """
    contents.write_measurements(
        draft,
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            **machine(),
            "threads": torch.get_num_threads(),
            "seconds": {step: round(elapsed, 3) for step, elapsed in seconds.items()},
            **measured,
            "origin": job.origin.model_dump(exclude_none=True),
        },
    )


def _manifest(results: RunResults, reference_cases: Sequence[str]) -> Manifest:
    """Returns the manifest without the list of files, because some are still missing.

    Args:
        reference_cases: The names of the cases in the reference file.
    """
    traced, signature, variants = results.traced, results.traced.signature, results.variants
    loaded, config = traced.job.loaded, portable_config(traced.job.config)
    formats = traced.job.config.export.formats
    applied = variants[0].transformed.applied
    return Manifest(
        optexport_version=__version__,
        config=config,
        versions=versions() | registry.versions(formats),
        processor_flags=sorted(processor_flags() & registry.default_flags(formats)),
        model=ModelRecord(
            source=config["model"]["source"],
            revision=loaded.revision,
            class_name=f"{type(loaded.model).__module__}.{type(loaded.model).__qualname__}",
            weights_sha256=loaded.weights_sha256,
        ),
        inputs=[_tensor(spec) for spec in signature.inputs],
        constants={name: _constant(value) for name, value in loaded.constants.items()},
        outputs=[_tensor(spec) for spec in signature.outputs],
        dims={
            name: DimRecord(min=dim.min, max=dim.max, multiple_of=dim.multiple_of)
            for name, dim in signature.dims.items()
        },
        values={
            name: ValuesRecord(indexes=list(index.dims), low=index.low, high=index.high, adds_up=index.adds_up)
            for name, index in signature.indexes.items()
        },
        fixed_axes=list(traced.trace.fixed),
        skipped_checks=list(traced.trace.skipped_checks),
        branches=list(traced.trace.branches),
        is_strict_trace=traced.trace.is_strict,
        nodes_before=traced.nodes,
        nodes_after=applied[-1].nodes_after if applied else traced.nodes,
        transformations=[
            _transformation(applied_rule, result.variant.formats if len(variants) > 1 else ())
            for result in variants
            for applied_rule in result.transformed.applied
        ],
        undone=list(dict.fromkeys(rule.name for result in variants for rule in result.transformed.undoable)),
        parity=results.parity,
        node_errors=results.node_errors,
        reference_cases=list(reference_cases),
        artifacts=results.artifacts,
        files=[],
    )


def _transformation(applied: Applied, formats: Sequence[str]) -> TransformationRecord:
    return TransformationRecord(
        formats=list(formats),
        rule=applied.rule.name,
        options=dict(applied.rule.options),
        signature=applied.rule.transformation.signature,
        preserves_computation=applied.rule.transformation.preserves_computation,
        reversible=applied.reversible,
        nodes_before=applied.nodes_before,
        nodes_after=applied.nodes_after,
        changes=[
            ChangeRecord(nodes=list(c.nodes), target=c.target, replaced=list(c.replaced))
            for c in applied.report.changes
        ],
        near_misses=[NearMissRecord(node=m.node, reason=m.reason) for m in applied.report.near_misses],
    )


def _tensor(spec: TensorSpec) -> TensorRecord:
    return TensorRecord(name=spec.name, dtype=spec.dtype, shape=list(spec.shape))


def _constant(value: Constant) -> Any:
    """Returns a constant as JSON: NaN and infinity as texts, a tensor as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
