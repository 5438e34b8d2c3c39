"""Writes the results of a run as records of the bundle."""

from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optexport._utils.packages import versions
from optexport._utils.platform import machine
from optexport._version import __version__
from optexport.bundle.manifest import (
    ChangeRecord,
    DimRecord,
    Manifest,
    ModelRecord,
    NearMissRecord,
    TensorRecord,
    TransformationRecord,
)
from optexport.bundle.parity_records import ParityRecord
from optexport.config.schema import Config
from optexport.errors import printable
from optexport.job import VariantResult
from optexport.loading.loader import Loaded
from optexport.redaction import redact
from optexport.signature.arguments import Constant
from optexport.signature.signature import TensorSpec
from optexport.tracing.trace import Traced
from optexport.transformations.apply import Applied


def write_graph(path: Path, graph_module: fx.GraphModule) -> int:
    """Writes a graph as text that is safe for terminals; returns its number of nodes."""
    path.write_text(printable(f"{graph_module.graph}\n"), encoding="utf-8")
    return len(graph_module.graph.nodes)


def measurements(seconds: Mapping[str, float], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data that may differ between two equal runs: times, machine, and benchmarks.

    Args:
        seconds: The seconds of each step.
        measured: Other measurements, as JSON.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        **machine(),
        "threads": torch.get_num_threads(),
        "seconds": {stage: round(spent, 3) for stage, spent in seconds.items()},
        **measured,
    }


def manifest(
    config: Config,
    loaded: Loaded,
    traced: Traced,
    made: Sequence[VariantResult],
    nodes_before: int,
    parity: ParityRecord,
    reference_cases: Sequence[str],
) -> Manifest:
    """Returns the manifest without the list of files, because some are still missing.

    Args:
        made: The results of the variants.
        nodes_before: The number of nodes of the traced graph.
        reference_cases: The names of the cases in the reference file.
    """
    return Manifest(
        optexport_version=__version__,
        config=portable(config),
        versions=versions(),
        model=ModelRecord(
            source=portable(config)["model"]["source"],
            revision=loaded.revision,
            class_name=f"{type(loaded.model).__module__}.{type(loaded.model).__qualname__}",
            weights_sha256=loaded.weights_sha256,
        ),
        inputs=[_tensor(spec) for spec in traced.signature.inputs],
        constants={name: _constant(value) for name, value in loaded.constants.items()},
        outputs=[_tensor(spec) for spec in traced.signature.outputs],
        dims={name: DimRecord(min=dim.min, max=dim.max) for name, dim in traced.signature.dims.items()},
        fixed_axes=list(traced.fixed),
        nodes_before=nodes_before,
        nodes_after=applied[-1].nodes_after if (applied := made[0].transformed.applied) else nodes_before,
        transformations=[
            _transformation(a, each.branch.formats if len(made) > 1 else ())
            for each in made
            for a in each.transformed.applied
        ],
        undone=list(dict.fromkeys(rule.name for each in made for rule in each.transformed.undoable)),
        parity=parity,
        reference_cases=list(reference_cases),
        artifacts=[artifact for each in made for artifact in each.artifacts],
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


def portable(config: Config) -> dict[str, Any]:
    """Returns the resolved config as JSON, without secrets and without absolute paths."""
    document = config.model_dump(mode="json", exclude_none=True)
    document["transformations"] = [rule.model_dump(mode="json") for rule in config.rules()]
    for table in ("model", "tracking"):
        document[table] = _redacted(document[table])
    for table, key in (("model", "source"), ("export", "output"), ("inputs", "data")):
        value = document[table].get(key)
        if value is not None and Path(value).is_absolute():
            document[table][key] = Path(value).name
    if document["tracking"]["uri"].startswith("sqlite:////"):
        document["tracking"]["uri"] = f"sqlite:///{Path(document['tracking']['uri']).name}"
    return document


def _redacted(value: Any) -> Any:
    """Removes the secrets of URIs from a nested value."""
    if isinstance(value, dict):
        return {key: _redacted(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_redacted(each) for each in value]
    return redact(value) if isinstance(value, str) else value
