"""Outcomes of benchmarks and tuning, as ``measurements.json`` stores them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["faster", "slower", "inconclusive"]

# Rounds that a verdict needs.
LEAST_ROUNDS = 12
# Artifacts count as equal if the whole interval is within this share.
_EQUAL_WITHIN = 0.05

AS_CONFIGURED = "as configured"
PLAIN_EXPORT = "plain export"
PYTORCH = "PyTorch"  # the original model in benchmarks
PARITY_FAILED = "parity failed"


def name_file(change: str) -> str:
    """Names the file of a candidate, such as ``the configured file`` or ``the file without merge-linears``."""
    names = {AS_CONFIGURED: "the configured file", PLAIN_EXPORT: "the plain export"}
    return names.get(change, f"the file {change}" if change.startswith("with") else change)


@dataclass(frozen=True)
class Comparison:
    """Speed of a candidate relative to its baseline.

    Attributes:
        speedup: Time of the baseline over time of the candidate; above 1 the candidate is faster.
        low: Lower end of the 95 % interval of ``speedup``.
        high: Upper end.
        verdict: "faster" or "slower" if the interval excludes 1.
        more_rounds: Additional rounds that would probably give a verdict; None if there is one, or they are too many.
        rounds: Number of rounds that were compared.
    """

    speedup: float
    low: float
    high: float
    verdict: Verdict
    more_rounds: int | None = None
    rounds: int = LEAST_ROUNDS

    @property
    def verdict_text(self) -> str:
        """The verdict with its reason."""
        if self.verdict != "inconclusive":
            return self.verdict
        if self.rounds < LEAST_ROUNDS:
            return f"inconclusive: fewer than {LEAST_ROUNDS} rounds"
        width = max(1 / self.low, self.high) - 1
        if width <= _EQUAL_WITHIN:  # more useful than a number of rounds
            return f"equal within {math.ceil(round(width * 1000, 6)) / 10:g} %"
        if self.more_rounds is not None:
            return f"inconclusive: needs about {self.more_rounds} more rounds"
        return "inconclusive: timings are too noisy on this machine"


@dataclass(frozen=True)
class Trial:
    """A candidate that was tried.

    Attributes:
        change: Difference from the configured candidate, in words.
        rules: Positions of its rules in the config.
        passes: Its format passes.
        refused: Why its file cannot be shipped; None if it can.
        comparison: Speed relative to the outcome's measure; None if it was not measured.
        earlier: True if an earlier run tried it.
    """

    change: str
    rules: tuple[int, ...]
    passes: tuple[str, ...]
    refused: str | None = None
    comparison: Comparison | None = None
    earlier: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome of tuning one format.

    Attributes:
        format: The format.
        chosen: The candidate of the exported file.
        measure: Baseline of all comparisons, in words: the configured candidate, or the part of it that passes.
        over_plain: Speed of the chosen candidate relative to the plain export; None if the plain export was refused or
            chosen.
        trials: All trials, in order.
        untried: Candidates that were not tried for lack of time, in words.
        shapes: The shapes that candidates were measured at; empty if there was no time to compare any.
    """

    format: str
    chosen: Trial
    measure: str
    over_plain: Comparison | None
    trials: tuple[Trial, ...]
    untried: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()

    @property
    def measure_text(self) -> str:
        """The baseline of all comparisons, in words that follow a preposition."""
        return name_file(self.measure)

    @property
    def untried_text(self) -> str:
        """What the search left out, in words; empty if that is nothing."""
        if not self.untried:
            return ""
        tried = len([trial for trial in self.trials if trial.change not in (AS_CONFIGURED, PLAIN_EXPORT)])
        return f"{tried} of {tried + len(self.untried)} candidates tried; no time for: {'; '.join(self.untried)}"
