"""Params, metrics and tags of a run, with names and values that MLflow accepts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord, Origin
from optexport.redaction import redact
from optexport.tracking.bundle_record import BundleRecord

T = TypeVar("T")

_LONGEST_PARAM = 500
# MLflow's limits for the names of params. Metric names here also exclude spaces and colons.
_LONGEST_NAME = 250
_PARAM_CHARACTERS, _METRIC_CHARACTERS = r"\w.\-/: ", r"\w.\-/"
_GIT_TAGS = {
    "commit": "mlflow.source.git.commit",
    "branch": "mlflow.source.git.branch",
    "repository": "mlflow.source.git.repoURL",
}
_BENCH_FIELDS = {"p50_ms", "p90_ms", "p99_ms", "rows_per_second", "load_seconds", "peak_memory_bytes"}


def tags(source: str, versions: Mapping[str, str], origin: Origin) -> dict[str, str]:
    """Returns the tags that describe the origin of a bundle."""
    named = {"mlflow.source.name": "optexport", "mlflow.source.type": "LOCAL", "source": source}
    part = {} if origin.part is None else {"part": origin.part}
    commit = {tag: origin.git[key] for key, tag in _GIT_TAGS.items() if key in origin.git}
    return {**named, **versions, **part, **commit}


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Flattens nested settings into params.

    Long values are cut, because the full config is an artifact of the run.
    """
    return _valid_names(dict(_flatten(values)), _PARAM_CHARACTERS)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            text = redact(value if isinstance(value, str) else json.dumps(value))
            yield f"{prefix}{key}", text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 3]}..."


def metrics(bundle: BundleRecord) -> dict[str, float]:
    """Returns all numbers of a bundle as metrics."""
    manifest, measurements = bundle.manifest, bundle.measurements
    values: dict[str, float] = {"nodes.before": manifest.nodes_before, "nodes.after": manifest.nodes_after}
    for transformation in manifest.transformations:
        rule = ".".join([*transformation.formats, transformation.rule])
        values[f"{rule}.changes"] = len(transformation.changes)
        values[f"{rule}.near_misses"] = len(transformation.near_misses)
        values[f"{rule}.nodes_before"] = transformation.nodes_before
        values[f"{rule}.nodes_after"] = transformation.nodes_after
    values |= dict(_parity_metrics(manifest))
    for artifact in manifest.artifacts:
        if artifact.precision is not None:
            kept_layers = [layer for layer in artifact.precision.layers if layer.kept is not None]
            values[f"precision.{artifact.format}.layers"] = len(artifact.precision.layers)
            values[f"precision.{artifact.format}.layers_kept"] = len(kept_layers)
    for file in manifest.files:
        values[f"bytes.{file.path}"] = file.size
    for step, seconds in measurements.seconds.items():
        values[f"seconds.{step}"] = seconds
    for record in measurements.gain:
        values[f"gain.{record.format}.speedup"] = record.speedup
    if measurements.bench is not None:
        values |= dict(_bench_metrics(measurements.bench))
    for outcome in measurements.tune:
        if (over := outcome.over_plain) is not None:
            prefix = f"tune.{outcome.format}.speedup"
            values |= {prefix: over.speedup, f"{prefix}_low": over.low, f"{prefix}_high": over.high}
    return _valid_names(values, _METRIC_CHARACTERS)


def steps(manifest: Manifest) -> Iterator[tuple[str, float, int]]:
    """Yields the graph size and the changes per rule as name, value and step.

    The step is the position of the rule. If variants apply different rules, a name starts with the formats of its
    variant.
    """
    position: dict[str, int] = {}
    for transformation in manifest.transformations:
        prefix = "".join(f"{name}." for name in transformation.formats)
        if prefix not in position:
            yield f"{prefix}rules.nodes", transformation.nodes_before, 0
        step = position[prefix] = position.get(prefix, 0) + 1
        yield f"{prefix}rules.nodes", transformation.nodes_after, step
        yield f"{prefix}rules.changes", len(transformation.changes), step
        yield f"{prefix}rules.near_misses", len(transformation.near_misses), step


def _parity_metrics(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for target in manifest.parity.targets:
        for output in target.outputs:
            prefix = f"parity.{target.target}.{output.output}"
            values = output.model_dump(include={"max_abs", "floor_ratio", "step", "cosine", "argmax_agreement"})
            yield from ((f"{prefix}.{key}", value) for key, value in values.items() if value is not None)
        for gate_result in target.gate_results:
            parts = ("metrics", target.target, gate_result.output, gate_result.measure)
            prefix = ".".join(part for part in parts if part)
            values = gate_result.model_dump(include={"value", "mean", "low", "high", "count", "ties"})
            yield from ((f"{prefix}.{key}", value) for key, value in values.items() if value is not None)


def _bench_metrics(bench: BenchRecord) -> Iterator[tuple[str, float]]:
    for figure in bench.figures:
        prefix = f"bench.{figure.artifact}.{figure.shape}"
        values = figure.model_dump(include=_BENCH_FIELDS, exclude_none=True)
        yield from ((f"{prefix}.{key}", value) for key, value in values.items())
    for row in bench.comparisons:
        prefix = f"bench.{row.artifact}.{row.shape}.speedup"
        yield from ((prefix, row.speedup), (f"{prefix}_low", row.low), (f"{prefix}_high", row.high))


def _valid_names(values: Mapping[str, T], characters: str) -> dict[str, T]:
    """Replaces invalid characters in the names of values and keeps the names unique."""

    def replaced(name: str) -> str:
        return "/".join(part for part in re.sub(f"[^{characters}]+", "_", name).split("/") if part.strip("."))

    shared = Counter(map(replaced, values))

    def final(name: str) -> str:
        text = replaced(name)
        if len(text) <= _LONGEST_NAME and (text == name or shared[text] == 1):
            return text
        digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
        return f"{text[: _LONGEST_NAME - 9]}-{digest}"

    return {final(name): value for name, value in values.items()}
