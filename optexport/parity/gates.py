"""What a model decides: whether a candidate chooses as the original does, and gates on how often it must.

What rounding alone could have changed is forgiven; ``measures`` says when. Without an ``output`` a gate is on
each floating point output that its measure is defined on. It counts over the user's data, or, where there are none,
over all cases but extreme ones. The measures:

- ``argmax_agreement``: the share of positions, that is of rows along the last axis, whose largest element is the same.
- ``top_k_agreement``: the share of positions whose set of k largest elements is the same. One that is lost and one that
  came in its stead may be twice the slack apart. Rows of k elements or fewer are left out.
- ``greedy_tokens``: of an output [batch, sequence, vocabulary], the share of sequences whose largest element is the
  same at every position. It is the choice of the next token after a given text; nothing is generated.
- ``cosine``: the cosine similarity of each row along the last axis with the original's; the gate is on the smallest, as
  a mean over many rows hides a broken one. Rows that are no longer than rounding are left out, as long as the
  candidate's are no more than a tenth of the longest.
- ``iou``: the intersection of two masks over their union (the Jaccard index, 1901), as a mean over masks. In an output
  [batch, channels, ...] of several channels each position is of the class of its largest channel, and each class of
  each image is a mask; with ``classes = false`` each channel is a mask of its own. Any other output is
  [batch, height, width] or [batch, 1, ...], and holds one mask for each image. Where there are no classes, a mask is
  where the value is above zero. Masks that are empty in both are left out.
- ``python:module:function``: a function of the user's, called once for each case with the candidate's outputs and the
  original's, each a dict of tensors by name; it gives a finite number, and the gate is on the mean.

Padding does not count: where an output begins with the axes of an integer ``attention_mask`` of [batch, sequence]
(``decoder_attention_mask`` where the model has decoder inputs), positions where the mask is 0 are left out of all but
``iou``.

The gate is on the measured value. The interval, of 95 %, says how far to trust it: Wilson's for shares (1927), which
keeps its level for small counts and for shares near 1 (Newcombe, 1998); for means the normal one, which is too narrow
for fewer than some thirty values, and is not given for one alone. Both take what was counted for independent samples of
what the model will see. Positions of one sequence are not independent, so the true interval is wider. Of inputs that
were made up, which repeat each other, nothing of the kind can be said, so there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from optexport.config.metrics import DEFAULT_K, METRIC, DecisionConfig, beside_gate
from optexport.errors import ConfigError, did_you_mean, first_line
from optexport.parity import distances
from optexport.parity.metrics import (
    Tally,
    agreement,
    cosines,
    greedy_tokens,
    intersections_over_unions,
    normal,
    real_positions,
    wilson,
)
from optexport.parity.noise_floor import Tolerance, rounding
from optexport.parity.reference import Outputs, Reference
from optexport.transformations import registry

Metric = Callable[[Outputs, Outputs], Any]

# What is counted, and what the values of a measure are between.
_COUNTED = {
    "argmax_agreement": "positions",
    "top_k_agreement": "positions",
    "greedy_tokens": "sequences",
    "cosine": "rows",
    "iou": "masks",
}
_SHARES = ("argmax_agreement", "top_k_agreement", "greedy_tokens")
_RANGES = {"cosine": (-1.0, 1.0), "iou": (0.0, 1.0)}


@dataclass(frozen=True)
class Gate:
    """What a config demands of one measure on one output.

    Attributes:
        measure: Its name in the config.
        output: The output that is measured; None where a user's metric gets all.
        min: The least value that passes.
        cases: The cases that count; at a place that was asked for none of them, all but extreme ones do.
        real: Whether these are the user's data.
        k: How many of the largest elements are compared.
        classes: Whether several channels of masks are classes that exclude each other.
        slack: How far rounding alone may move a value.
        metric: The user's function.
    """

    measure: str
    output: str | None
    min: float
    cases: tuple[str, ...] = ()
    real: bool = False
    k: int = 1
    classes: bool = True
    slack: float = 0.0
    metric: Metric | None = None

    @property
    def name(self) -> str:
        """The output and the measure."""
        measure = f"{self.measure} (k = {self.k})" if self.measure == "top_k_agreement" else self.measure
        return measure if self.output is None else f"{self.output}, {measure}"


@dataclass(frozen=True)
class CaseDecision:
    """What one case gives: the sum of its values (of a share, how many agree), their smallest, and how many."""

    case: str
    total: float
    smallest: float
    count: int


@dataclass(frozen=True)
class Decision:
    """How a candidate decides, against one gate.

    Attributes:
        value: What the gate is on: the share or the mean, of cosines the smallest; NaN of nothing.
        mean: The mean of all values; of a share, the share.
        low, high: Its 95 % interval; None of made-up inputs, and where there is too little for one.
        count: How many positions, sequences, rows, masks or cases were counted.
        ties: How many of them agree only because a change that rounding alone can make is forgiven.
        failure: Why the gate fails; None where it passes.
    """

    gate: Gate
    value: float
    mean: float
    low: float | None
    high: float | None
    count: int
    ties: int
    cases: tuple[CaseDecision, ...]
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


def load_metrics(gates: Mapping[str, DecisionConfig] | None, folder: Path) -> dict[str, Metric]:
    """Imports the user's own metrics that a config names, looking beside it first.

    Raises:
        ConfigError: One of them cannot be imported, or is no function.
    """
    metrics: dict[str, Metric] = {}
    for name in (name for name in gates or () if name.startswith(METRIC)):
        target = f"parity.metrics.{name}"
        metrics[name] = registry.import_from(name.removeprefix(METRIC), folder, target)
        if not callable(metrics[name]):
            raise ConfigError(f"it is a {type(metrics[name]).__name__}, not a function", location=target)
    return metrics


def make_gates(
    demanded: Mapping[str, DecisionConfig] | None,
    metrics: Mapping[str, Metric],
    reference: Reference,
    bounds: Mapping[str, Tolerance],
    multiple: float,
) -> tuple[Gate, ...]:
    """The gates that a config demands; without an output named, of every output that a measure is defined on.

    Raises:
        ConfigError: There is no such output, or the measure is not defined on it, or on any.
    """
    gates: list[Gate] = []
    ordinary = [case for case in reference.cases if not case.extreme]
    real = any(case.data for case in ordinary)
    cases = tuple(case.name for case in ordinary if case.data or not real)
    for measure, config in (demanded or {}).items():
        if measure in metrics:
            gates.append(Gate(measure, None, config.min, cases, real, metric=metrics[measure]))
            continue
        k = (config.k or DEFAULT_K) if measure == "top_k_agreement" else 1
        known, target = list(bounds), f"parity.metrics.{measure}"
        if config.output is not None and config.output not in known:
            raise ConfigError(
                f'there is no output "{config.output}"',
                location=f"{target}.output",
                hint=f"{did_you_mean(config.output, known)} The outputs are {', '.join(known)}.",
            )
        fitting = [n for n in known if any(_is_defined(measure, o[n], k) for o in reference.outputs)]
        chosen = [name for name in fitting if config.output in (None, name)]
        if not chosen:
            shapes = {name: list(reference.outputs[0][name].shape) for name in known}
            raise ConfigError(
                f"it is defined on {_needs(measure, k)}",
                location=target,
                hint="The outputs are " + "; ".join(f"{name} {shape}" for name, shape in shapes.items()) + ".",
            )
        for name in chosen:
            slack = rounding(name, reference, bounds[name], multiple)
            gates.append(Gate(measure, name, config.min, cases, real, k, config.classes is not False, slack))
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


def check_usable(decisions: Iterable[Decision]) -> None:
    """Refuses a gate that the original itself does not pass.

    Raises:
        ConfigError: A metric fails on the original, gives it less than the gate, or there is nothing to count.
    """
    for decision in decisions:
        if decision.failure is not None:
            raise ConfigError(
                f"the original itself does not pass: {decision.failure}",
                location=f"parity.metrics.{decision.gate.measure}",
            )


def judge(gate: Gate, results: Sequence[Outputs | str], reference: Reference) -> Decision:
    """Holds what a candidate gives, a result or an error for each case of the reference, against a gate."""
    ordinary = [index for index, case in enumerate(reference.cases) if not case.extreme]
    counted = [index for index in ordinary if reference.cases[index].name in gate.cases]
    cases: list[CaseDecision] = []
    tallies: list[Tally] = []
    failure: str | None = None
    for index in counted or ordinary:
        tally = _measure(gate, results[index], reference, index)
        if isinstance(tally, str):  # whatever it would have decided, it agrees nowhere
            failure = failure or f"{gate.name}, at {reference.cases[index].name}: {tally}"
            itself = _measure(gate, reference.outputs[index], reference, index) if gate.metric is None else None
            tally = Tally(torch.zeros(len(itself.values) if isinstance(itself, Tally) else 1, dtype=torch.float64))
        tallies.append(tally)
        least = float(tally.values.min()) if tally.values.numel() else math.inf
        total = math.fsum(tally.values.tolist())
        cases.append(CaseDecision(reference.cases[index].name, total, least, tally.values.numel()))
    values = torch.cat([tally.values for tally in tallies])
    low, high = (_interval(gate.measure, values) if gate.real and counted else None) or (None, None)
    decision = Decision(
        gate,
        value=pooled(gate.measure, cases),
        mean=pooled("", cases),
        low=low,
        high=high,
        count=values.numel(),
        ties=sum(tally.ties for tally in tallies),
        cases=tuple(cases),
        failure=failure,
    )
    if failure is None and not decision.value >= gate.min:
        failure = f"{gate.name} is {described(decision)}, and the gate {str(gate.min).removesuffix('.0')}"
    return replace(decision, failure=failure)


def _interval(measure: str, values: torch.Tensor) -> tuple[float, float] | None:
    if measure in _SHARES:
        return wilson(int(values.sum()), values.numel())
    least, most = _RANGES.get(measure, (-math.inf, math.inf))
    interval = normal(values)
    return interval and (max(interval[0], least), min(interval[1], most))


def pooled(measure: str, cases: Sequence[CaseDecision]) -> float:
    """The value of a measure over several cases, each position, row or mask having the same weight; NaN of none."""
    if not (count := sum(case.count for case in cases)):
        return math.nan
    if measure == "cosine":
        return min(case.smallest for case in cases)
    return math.fsum(case.total for case in cases) / count


def described(decision: Decision) -> str:
    """The value with what it was counted over, and its interval."""
    measure, count = decision.gate.measure, decision.count
    if not count:
        return "measured nowhere, since there is nothing to count"
    counted = _COUNTED.get(measure, "batches") + ("" if decision.gate.real else " of made-up inputs")
    interval = "" if decision.low is None else f", 95 % interval {decision.low:.6g} to {decision.high:.6g}"
    shown = beside_gate(decision.value, decision.gate.min, 6 if measure in _SHARES else 9)
    if measure == "cosine":
        return f"{shown} (the smallest of {count} {counted}; their mean {decision.mean:.9g}{interval})"
    ties = f", {decision.ties} of them by ties" if measure in _SHARES and decision.ties else ""
    ties = f"; {decision.ties} positions are ties" if measure == "iou" and decision.ties else ties
    if measure in _SHARES:
        hits = round(math.fsum(case.total for case in decision.cases))
        return f"{shown} ({hits} of {count} {counted} agree{ties}{interval})"
    return f"{shown} (the mean of {count} {counted}{interval}{ties})"


def _measure(gate: Gate, result: Outputs | str, reference: Reference, index: int) -> Tally | str:
    """Measures a candidate's result at a case; gives why it cannot be measured, where it cannot."""
    original, batch = reference.outputs[index], reference.cases[index].batch
    if isinstance(result, str):
        return result
    for name in original if gate.output is None else (gate.output,):
        if (problem := distances.why_incomparable(result.get(name), original[name])) is not None:
            return problem if gate.output is not None else f"{name}: {problem}"
    if gate.metric is not None:
        return _call(gate.metric, result, original)
    assert gate.output is not None
    candidate, own = result[gate.output], original[gate.output]
    if not _is_defined(gate.measure, own, gate.k) or not own.numel():
        return Tally(torch.zeros(0, dtype=torch.float64))
    known = distances.known(reference.exact[index][gate.output], own)
    match gate.measure:
        case "iou":
            return intersections_over_unions(candidate, own, known, gate.slack, classes=gate.classes)
        case "cosine":
            return cosines(candidate, own, gate.slack, real_positions(batch, own.shape[:-1]))
        case "greedy_tokens":
            return greedy_tokens(candidate, own, known, gate.slack, real_positions(batch, own.shape[:-1]))
    return agreement(candidate, own, known, gate.slack, gate.k, real_positions(batch, own.shape[:-1]))


def _call(metric: Metric, result: Outputs, original: Outputs) -> Tally | str:
    """Calls a user's metric on copies; gives what it raised, or why its value is none, as text."""
    own, others = ({name: value.clone() for name, value in outputs.items()} for outputs in (result, original))
    try:
        value = float(metric(own, others))
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        return f"it raised {type(error).__name__}: {first_line(error)[:200]}"
    if not math.isfinite(value):
        return f"it gave {value}, where a finite number is wanted"
    return Tally(torch.tensor([value], dtype=torch.float64))
