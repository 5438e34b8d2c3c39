"""Checks that a bundle's figures are consistent with a passed parity check."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel

from optexport.bundle import digest_json
from optexport.bundle.layout import MANIFEST
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord, FigureRecord
from optexport.bundle.parity_records import TargetRecord
from optexport.config.metrics import METRICS
from optexport.config.schema import ParityConfig
from optexport.errors import BundleError, short_line
from optexport.tracking.bundle_record import BundleRecord

# Figures in a manifest are rounded to three digits.
_ROUNDING = 1.01


class _ParitySettings(BaseModel):
    """Parity settings of a bundle's config."""

    parity: ParityConfig


def check_plausible(bundle: BundleRecord) -> None:
    """Checks that a bundle's figures can come from a passed parity check.

    The author of a bundle can write other figures into its files.

    Raises:
        BundleError: The figures contradict a passed check.
    """
    manifest = bundle.manifest
    digest_json.validated(_ParitySettings, manifest.config, bundle.folder / MANIFEST)
    bench = bundle.measurements.bench
    problems = [
        *(problem for target in manifest.parity.targets for problem in _parity_problems(manifest, target)),
        *(
            f"{row.artifact} at {row.shape}: the interval is {row.low_ms:g} to {row.high_ms:g} ms"
            for row in _invalid_intervals(bench)
        ),
    ]
    if problems:
        raise BundleError(
            f"the figures contradict a passed check: {short_line(problems[0])}",
            location=str(bundle.folder / MANIFEST),
        )


def _parity_problems(manifest: Manifest, target: TargetRecord) -> Iterator[str]:
    for output in target.outputs if target.precision is None else ():
        # Each case may have a different limit; the largest one applies here.
        limit = max((math.inf if case.limit is None else case.limit for case in output.cases), default=math.inf)
        floor = manifest.parity.bounds[output.output].floor if output.output in manifest.parity.bounds else math.inf
        if (output.floor_ratio or 0.0) * floor > _ROUNDING * limit or any(case.failure for case in output.cases):
            yield (
                f"{target.target}, {output.output}: {output.floor_ratio} times the noise floor of {floor:g}, "
                f"expected at most {limit:g}"
            )
    for gate_result in target.gate_results:
        # The interval is not checked, because it may exceed the range of the metric. The range of a custom metric is
        # unknown.
        minimum = METRICS[gate_result.measure][0] if gate_result.measure in METRICS else None
        if gate_result.failure is not None:
            yield f"{target.title}, {gate_result.measure}: {gate_result.failure}"
        elif minimum is not None and gate_result.mean is not None and not minimum <= gate_result.mean <= 1:
            yield f"{target.title}, {gate_result.measure}: {gate_result.mean:g} is not within {minimum:g} to 1"


def _invalid_intervals(bench: BenchRecord | None) -> Iterator[FigureRecord]:
    for row in [] if bench is None else bench.figures:
        if row.low_ms is not None and row.high_ms is not None and not 0 < row.low_ms <= row.high_ms:
            yield row
