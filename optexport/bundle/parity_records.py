"""Records of a parity check in the manifest: cases, outputs, targets, gates and tolerances."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# The name of the target for the original model itself.
ORIGINAL = "original"
# Sizes and counts of up to 64 bits, so that a reader's arithmetic does not overflow.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
# Distance between two values.
Distance = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaseRecord(_Record):
    """Parity of one output in one case.

    Attributes:
        case: The name of the case.
        distance: The distance; null if it could not be measured.
        limit: The limit; null if only NaN, shape and dtype are checked.
        failure: The reason of a failure; null if the output passes.
    """

    case: str
    distance: Distance | None
    limit: float | None
    failure: str | None

    @property
    def used_share(self) -> float | None:
        """Returns the distance as a share of the limit, or None without a limit."""
        if self.limit is None or self.distance is None:
            return None
        return self.distance / self.limit if self.limit > 0 else 0.0 if self.distance == 0 else math.inf


class OutputRecord(_Record):
    """Parity of one output of a target.

    Distances are from float64, unless atol or rtol is set. A distance is null if it could not be measured.

    Attributes:
        output: The name of the output.
        max_abs: The largest absolute distance in ordinary cases.
        max_rel: The largest relative distance in ordinary cases. The divisor is the reference's element, or a millionth
            of the largest one if that is more.
        cosine: The smallest cosine similarity in a case.
        floor_ratio: The distance divided by the noise floor; null if the noise floor is zero.
        step: The distance from the target that this one was made from.
        argmax_agreement: The share of positions with the same largest element along the last axis.
        passing_atol: The smallest absolute tolerance against the original itself that would pass.
        worst_case: The case with the largest absolute distance.
        cases: The result of each case, including extreme cases.
    """

    output: str
    max_abs: Distance | None
    max_rel: Distance | None
    cosine: float
    floor_ratio: Distance | None
    step: Distance | None
    argmax_agreement: float
    passing_atol: Distance | None
    worst_case: str
    cases: list[CaseRecord]

    @property
    def used_share(self) -> float | None:
        """Returns the largest share of a limit that a case uses, or None without limits."""
        return max((share for case in self.cases if (share := case.used_share) is not None), default=None)


class GateRecord(_Record):
    """A gate: the minimum of a metric that the config requires.

    Attributes:
        measure: The name of the metric.
        output: The output; null if the metric receives all outputs.
        min: The minimum.
        k: The number of largest elements that the metric compares.
        classes: True if the channels of a mask are classes that exclude each other.
        slack: The largest change of a value by rounding alone. Differences that it can explain are ignored.
        cases: The cases that count.
        is_user_data: True if these cases are the user's data.
    """

    measure: str
    output: str | None
    min: float
    k: int = Field(ge=1, le=2**63 - 1)
    classes: bool
    slack: float
    cases: list[str]
    is_user_data: bool


class CaseMetricRecord(_Record):
    """Values of a metric in one case.

    Attributes:
        case: The name of the case.
        total: The sum of the values; for a share, the number that agree.
        smallest: The smallest value; null if the case has none.
        count: The number of values.
    """

    case: str
    total: float
    smallest: float | None
    count: Count


class GateResultRecord(_Record):
    """Result of a gate on a metric, at a target.

    Attributes:
        measure: The name of the metric.
        output: The output; null if the metric receives all outputs.
        value: The value that the gate compares: a share, a mean, or the smallest cosine. It is null without data.
        mean: The mean of all values; null without data.
        low: The lower end of the 95 % interval of the mean; null without an interval.
        high: The upper end of the 95 % interval of the mean; null without an interval.
        count: The number of positions, sequences, rows, masks or cases.
        ties: The number of those that agree only because rounding alone can explain their change.
        min: The minimum of the gate.
        failure: The reason of a failure; null if the gate passes.
        cases: The values of each case.
    """

    measure: str
    output: str | None
    value: float | None
    mean: float | None
    low: float | None
    high: float | None
    count: Count
    ties: Count
    min: float
    failure: str | None
    cases: list[CaseMetricRecord]


class TargetRecord(_Record):
    """Parity of a target: the original, the transformed graph, or a file in its runtime.

    Attributes:
        target: The name of the target.
        made_from: The name of the target that this one was made from.
        outputs: The result of each output.
        gate_results: The result of each gate.
        precision: The lower precision of the target, or null. Gates on metrics then replace limits on distances.
    """

    target: str
    made_from: str
    outputs: list[OutputRecord]
    gate_results: list[GateResultRecord]
    precision: str | None = None

    @property
    def title(self) -> str:
        """Returns the target's name, with its precision if that is lower than the original's."""
        return self.target if self.precision is None else f"{self.target} ({self.precision})"

    @property
    def used_share(self) -> float | None:
        """Returns the largest share of a limit that an output uses, or None without limits."""
        return max((share for output in self.outputs if (share := output.used_share) is not None), default=None)

    @property
    def passed(self) -> bool:
        """Returns True if every output and every gate passes."""
        failures = [case.failure for output in self.outputs for case in output.cases]
        return all(failure is None for failure in [*failures, *(result.failure for result in self.gate_results)])


def atol_above_rounding(floor: float) -> float:
    """Returns an absolute tolerance that rounding alone does not exceed, for an output with this noise floor."""
    return 4 * floor


class ToleranceRecord(_Record):
    """Noise floor and tolerance of an output.

    Attributes:
        floor: The noise floor.
        limit: The largest distance from the reference that passes.
        atol: The absolute tolerance in the config.
        rtol: The relative tolerance in the config.
        extremes: The limits of cases that have their own; null if only NaN, shape and dtype are checked.
        largest: The largest magnitude of the original's finite values in the other cases; null in older bundles.
    """

    floor: float
    limit: float
    atol: float | None
    rtol: float | None
    extremes: dict[str, float | None]
    largest: float | None = None

    @property
    def fixed(self) -> bool:
        """Returns True if the config sets a tolerance.

        Distances are then from the original in its own precision.
        """
        return self.atol is not None or self.rtol is not None


class ParityRecord(_Record):
    """Result of the parity check. All reports are made from it.

    Attributes:
        cases: The names of the cases.
        bounds: The noise floor and tolerance of each output.
        ways: The other ways of running the original that contribute to the noise floor.
        fallback: The reason for a missing float64 reference, or null.
        unguided: The outputs and cases that are compared with the original itself, because float64 is unsuitable.
        left_out: The cases that were not checked, with the reason, or the share of the data that was checked.
        gates: The gates on metrics.
        targets: The result of each target.
        extreme_cases: The cases with values unlike real data, which gates ignore.
    """

    cases: list[str]
    bounds: dict[str, ToleranceRecord]
    ways: list[str]
    fallback: str | None
    unguided: list[str]
    left_out: list[str]
    gates: list[GateRecord]
    targets: list[TargetRecord]
    extreme_cases: list[str] = []

    @property
    def compared(self) -> list[TargetRecord]:
        """Returns the targets that are compared with the original."""
        return [target for target in self.targets if target.target != ORIGINAL]

    @property
    def passed(self) -> bool:
        """Returns True if every target passes."""
        return all(target.passed for target in self.targets)

    @property
    def used_share(self) -> float | None:
        """Returns the largest share of a limit that a compared target uses, or None without limits.

        A result that has no distance, for example one of another shape, counts as infinitely far.
        """
        outputs = [output for target in self.compared for output in target.outputs]
        if any(case.failure is not None and case.distance is None for output in outputs for case in output.cases):
            return math.inf
        return max((share for target in self.compared if (share := target.used_share) is not None), default=None)

    @property
    def compared_with(self) -> str:
        """Returns a description of the reference.

        The reference is in float64, except for outputs with a tolerance in the config.
        """
        fixed = [name for name, bound in self.bounds.items() if bound.fixed]
        if self.fallback is not None or len(fixed) == len(self.bounds):
            return "the original in its own precision"
        return ", ".join(["the original in float64", *fixed]) + (" in its own precision" if fixed else "")
