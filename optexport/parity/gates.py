"""Gates: minimum values for metrics about a model's decisions.

Changes that rounding alone can cause are forgiven; `metrics` defines when. A gate without an ``output`` applies to
every floating point output that supports its metric. Gates count user data, or, without data, all cases but extreme
ones. The metrics:

- ``argmax_agreement``: share of positions (rows along the last axis) with the same largest element.
- ``top_k_agreement``: share of positions with the same set of k largest elements. A lost element and its replacement
  may differ by twice the slack. Rows of at most k elements are skipped.
- ``greedy_tokens``: for outputs [batch, sequence, vocabulary], share of sequences with the same largest element at
  every position. This is the next token after a given text; no text is generated.
- ``cosine``: cosine similarity of each row along the last axis with the original's row. The gate applies to the
  smallest, because a mean over many rows hides a broken row. Rows no longer than rounding are skipped, if the target's
  rows there are at most a tenth of the longest row.
- ``iou``: intersection of two masks over their union (the Jaccard index, 1901), as a mean over masks. An output [batch,
  channels, ...] with several channels assigns each position to its largest channel, and each class of each image is a
  mask. With ``classes = false`` each channel is a mask. Any other output is [batch, height, width] or [batch, 1, ...]
  and contains one mask per image. Masks without classes cover values above zero. Pairs of empty masks are skipped.
- ``python:module:function``: user function, called once per case with the outputs of the target and of the original,
  each a dict of tensors by name. It returns a finite number; the gate applies to the mean.

Padding does not count. If an output starts with the axes of an integer ``attention_mask`` of [batch, sequence], all
metrics except ``iou`` skip positions where the mask is 0. Models with decoder inputs use ``decoder_attention_mask``.

The gate applies to the measured value. A 95 % interval shows the value's uncertainty. Shares use Wilson's interval
(1927), which keeps its level for small counts and for shares near 1 (Newcombe, 1998). Means use the normal interval,
which is too narrow for fewer than about thirty values and undefined for one. Both assume independent samples of what
the model will see. Positions of one sequence are not independent, so the true interval is wider. Generated inputs
repeat each other and get no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from optexport._utils import imports
from optexport.config.metrics import CUSTOM_METRIC, DEFAULT_K, SHARES, MetricGateConfig, counted_unit, round_for_gate
from optexport.errors import ConfigError, describe_error, did_you_mean
from optexport.parity import distances
from optexport.parity.metrics import (
    Tally,
    agreement,
    cosines,
    greedy_tokens,
    intersections_over_unions,
    normal_interval,
    unpadded_positions,
    wilson_interval,
)
from optexport.parity.noise_floor import Tolerance, measure_slack
from optexport.parity.reference import Outputs, Reference

Metric = Callable[[Outputs, Outputs], Any]

# Range of the values.
_RANGES = {"cosine": (-1.0, 1.0), "iou": (0.0, 1.0)}


@dataclass(frozen=True)
class Gate:
    """Required minimum of one metric on one output.

    Attributes:
        measure: Name of the metric in the config.
        output: Name of the output; None if a user metric receives all outputs.
        min: Smallest value that passes.
        cases: Cases that count. A target without any of these cases uses all but extreme ones.
        is_user_data: True if these cases are user data.
        k: Number of largest elements to compare.
        classes: True if several channels of a mask are exclusive classes.
        slack: Largest change of a value by rounding alone.
        metric: User function.
    """

    measure: str
    output: str | None
    min: float
    cases: tuple[str, ...] = ()
    is_user_data: bool = False
    k: int = 1
    classes: bool = True
    slack: float = 0.0
    metric: Metric | None = None

    @property
    def name(self) -> str:
        """Returns the names of the output and the metric."""
        measure = f"{self.measure} (k = {self.k})" if self.measure == "top_k_agreement" else self.measure
        return measure if self.output is None else f"{self.output}, {measure}"


@dataclass(frozen=True)
class CaseMetric:
    """Metric of one case: sum (for a share, the number of agreements), minimum and count."""

    case: str
    total: float
    smallest: float
    count: int


@dataclass(frozen=True)
class GateResult:
    """Result of one gate for one target.

    Attributes:
        value: Value that the gate applies to: share, mean, or smallest cosine; NaN if the count is zero.
        mean: Mean of all values; equals the share for shares.
        low, high: 95 % interval; None for generated inputs and for too few values.
        count: Number of positions, sequences, rows, masks or cases.
        ties: Number of values that agree only because rounding alone can explain the change.
        failure: Reason for the failure; None if the gate passes.
    """

    gate: Gate
    value: float
    mean: float
    low: float | None
    high: float | None
    count: int
    ties: int
    cases: tuple[CaseMetric, ...]
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


def load_metrics(configs: Mapping[str, MetricGateConfig] | None, folder: Path) -> dict[str, Metric]:
    """Imports the user metrics of a config.

    Args:
        configs: The `parity.metrics` table.
        folder: Folder of the config, searched first.

    Raises:
        ConfigError: A metric cannot be imported or is not callable.
    """
    metrics: dict[str, Metric] = {}
    for name in (name for name in configs or () if name.startswith(CUSTOM_METRIC)):
        target = f"parity.metrics.{name}"
        metrics[name] = imports.import_from(name.removeprefix(CUSTOM_METRIC), folder, target)
        if not callable(metrics[name]):
            raise ConfigError(f"the metric is not a function (found {type(metrics[name]).__name__})", location=target)
    return metrics


def make_gates(
    metric_configs: Mapping[str, MetricGateConfig] | None,
    metrics: Mapping[str, Metric],
    reference: Reference,
    tolerances: Mapping[str, Tolerance],
    noise_multiple: float,
) -> tuple[Gate, ...]:
    """Returns the gates of a config, one per metric and output.

    A gate without an output applies to every output that supports its metric.

    Args:
        metric_configs: The `parity.metrics` table.
        metrics: User metrics by name.
        tolerances: Tolerance per output.
        noise_multiple: As in the config; it sets the slack.

    Raises:
        ConfigError: The output does not exist, or every output is unsuitable for the metric.
    """
    gates: list[Gate] = []
    ordinary = [case for case in reference.cases if not case.extreme]
    is_user_data = any(case.data for case in ordinary)
    cases = tuple(case.name for case in ordinary if case.data or not is_user_data)
    for measure, config in (metric_configs or {}).items():
        if measure in metrics:
            gates.append(Gate(measure, None, config.min, cases, is_user_data, metric=metrics[measure]))
            continue
        k = (config.k or DEFAULT_K) if measure == "top_k_agreement" else 1
        outputs, target = list(tolerances), f"parity.metrics.{measure}"
        if config.output is not None and config.output not in outputs:
            raise ConfigError(
                f'unknown output "{config.output}"',
                location=f"{target}.output",
                hint=f"{did_you_mean(config.output, outputs)} The outputs are {', '.join(outputs)}.",
            )
        suitable = [n for n in outputs if any(_is_defined(measure, o[n], k) for o in reference.outputs)]
        chosen = [name for name in suitable if config.output in (None, name)]
        if not chosen:
            shapes = {name: list(reference.outputs[0][name].shape) for name in outputs}
            raise ConfigError(
                f"the metric needs {_needs(measure, k)}",
                location=target,
                hint="Choose another metric or output. The outputs are "
                + "; ".join(f"{name} {shape}" for name, shape in shapes.items())
                + ".",
            )
        for name in chosen:
            slack = measure_slack(name, reference, tolerances[name], noise_multiple)
            gates.append(Gate(measure, name, config.min, cases, is_user_data, k, config.classes is not False, slack))
    return tuple(gates)


def _is_defined(measure: str, output: torch.Tensor, k: int) -> bool:
    if not output.is_floating_point():
        return False
    match measure:
        case "greedy_tokens":
            return output.dim() == 3 and output.shape[-1] > 1
        case "iou":
            return output.dim() >= 3
    return output.dim() >= 1 and output.shape[-1] > k


def _needs(measure: str, k: int) -> str:
    match measure:
        case "greedy_tokens":
            return "floating point outputs [batch, sequence, vocabulary]"
        case "iou":
            return "floating point outputs [batch, height, width] or [batch, channels, height, width]"
    return f"floating point outputs whose last axis is longer than {k}"


def check_usable(gate_results: Iterable[GateResult]) -> None:
    """Rejects gates that the original itself fails.

    Args:
        gate_results: Gate results of the original.

    Raises:
        ConfigError: A metric raises on the original, its value is below the gate, or nothing was counted.
    """
    for gate_result in gate_results:
        if gate_result.failure is not None:
            raise ConfigError(
                f"the original model does not pass the gate: {gate_result.failure}",
                location=f"parity.metrics.{gate_result.gate.measure}",
            )


def judge(gate: Gate, results: Sequence[Outputs | str], reference: Reference) -> GateResult:
    """Applies a gate to the results of a target.

    Args:
        results: Outputs, or the message of an error, per case of the reference.
    """
    ordinary = [index for index, case in enumerate(reference.cases) if not case.extreme]
    counted = [index for index in ordinary if reference.cases[index].name in gate.cases]
    cases: list[CaseMetric] = []
    tallies: list[Tally] = []
    failure: str | None = None
    for index in counted or ordinary:
        tally = _measure(gate, results[index], reference, index)
        if isinstance(tally, str):  # a case with an error agrees nowhere
            failure = failure or f"{gate.name}, at {reference.cases[index].name}: {tally}"
            original = _measure(gate, reference.outputs[index], reference, index) if gate.metric is None else None
            tally = Tally(torch.zeros(len(original.values) if isinstance(original, Tally) else 1, dtype=torch.float64))
        tallies.append(tally)
        smallest = float(tally.values.min()) if tally.values.numel() else math.inf
        total = math.fsum(tally.values.tolist())
        cases.append(CaseMetric(reference.cases[index].name, total, smallest, tally.values.numel()))
    values = torch.cat([tally.values for tally in tallies])
    low, high = (_interval(gate.measure, values) if gate.is_user_data and counted else None) or (None, None)
    gate_result = GateResult(
        gate,
        value=pool_cases(gate.measure, cases),
        mean=pool_cases("", cases),
        low=low,
        high=high,
        count=values.numel(),
        ties=sum(tally.ties for tally in tallies),
        cases=tuple(cases),
        failure=failure,
    )
    if failure is None and not gate_result.value >= gate.min:
        failure = f"{gate.name} is {describe_gate_result(gate_result)}; the gate is {str(gate.min).removesuffix('.0')}"
    return replace(gate_result, failure=failure)


def _interval(measure: str, values: torch.Tensor) -> tuple[float, float] | None:
    if measure in SHARES:
        return wilson_interval(int(values.sum()), values.numel())
    lowest, highest = _RANGES.get(measure, (-math.inf, math.inf))
    interval = normal_interval(values)
    return interval and (max(interval[0], lowest), min(interval[1], highest))


def pool_cases(measure: str, cases: Sequence[CaseMetric]) -> float:
    """Returns the value of a metric over several cases, or NaN if nothing was counted.

    Every position, row or mask has the same weight.

    Args:
        measure: Name of the metric. "cosine" returns the minimum, any other name the mean.
    """
    if not (count := sum(case.count for case in cases)):
        return math.nan
    if measure == "cosine":
        return min(case.smallest for case in cases)
    return math.fsum(case.total for case in cases) / count


def describe_gate_result(gate_result: GateResult) -> str:
    """Formats the value of a gate result with its count and interval."""
    measure, count = gate_result.gate.measure, gate_result.count
    if not count:
        return "not measured, because no value counts"
    counted = counted_unit(measure) + ("" if gate_result.gate.is_user_data else " of generated inputs")
    interval = "" if gate_result.low is None else f", 95 % interval {gate_result.low:.6g} to {gate_result.high:.6g}"
    shown = round_for_gate(gate_result.value, gate_result.gate.min, 6 if measure in SHARES else 9)
    if measure == "cosine":
        return f"{shown} (the smallest of {count} {counted}; their mean {gate_result.mean:.9g}{interval})"
    ties = f", {gate_result.ties} of them by ties" if measure in SHARES and gate_result.ties else ""
    ties = f"; {gate_result.ties} positions are ties" if measure == "iou" and gate_result.ties else ties
    if measure in SHARES:
        hits = round(math.fsum(case.total for case in gate_result.cases))
        return f"{shown} ({hits} of {count} {counted} agree{ties}{interval})"
    return f"{shown} (the mean of {count} {counted}{interval}{ties})"


def _measure(gate: Gate, result: Outputs | str, reference: Reference, index: int) -> Tally | str:
    """Measures the results of one case, or returns the reason why it cannot."""
    original, batch = reference.outputs[index], reference.cases[index].batch
    if isinstance(result, str):
        return result
    for name in original if gate.output is None else (gate.output,):
        if (problem := distances.find_comparison_problem(result.get(name), original[name])) is not None:
            return problem if gate.output is not None else f"{name}: {problem}"
    if gate.metric is not None:
        return _call_metric(gate.metric, result, original)
    assert gate.output is not None
    candidate, original_output = result[gate.output], original[gate.output]
    if not _is_defined(gate.measure, original_output, gate.k) or not original_output.numel():
        return Tally(torch.zeros(0, dtype=torch.float64))
    expected = distances.expected_values(reference.exact[index][gate.output], original_output)
    if gate.measure == "iou":
        return intersections_over_unions(candidate, original_output, expected, gate.slack, classes=gate.classes)
    unpadded = unpadded_positions(batch, original_output.shape[:-1])
    match gate.measure:
        case "cosine":
            return cosines(candidate, original_output, gate.slack, unpadded)
        case "greedy_tokens":
            return greedy_tokens(candidate, original_output, expected, gate.slack, unpadded)
    return agreement(candidate, original_output, expected, gate.slack, gate.k, unpadded)


def _call_metric(metric: Metric, result: Outputs, original: Outputs) -> Tally | str:
    """Calls a user metric on copies, or returns the error or an invalid value as text."""
    result_copies, original_copies = (
        {name: value.clone() for name, value in outputs.items()} for outputs in (result, original)
    )
    try:
        value = float(metric(result_copies, original_copies))
    except (Exception, SystemExit) as error:  # user code may raise anything
        return f"the metric raised {describe_error(error)[:200]}"
    if not math.isfinite(value):
        return f"expected a finite number from the metric, found {value}"
    return Tally(torch.tensor([value], dtype=torch.float64))
