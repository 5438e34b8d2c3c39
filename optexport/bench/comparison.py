"""Whether one artifact is faster than another: the ratio of their times, how sure it is, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from optexport.config.benchmarks import LEAST_ROUNDS

Verdict = Literal["faster", "slower", "cannot tell"]

_DRAWS = 4000
_LEVEL = 0.95
# More rounds than this in all, nobody waits for.
_MOST_ROUNDS = 2000
# Two artifacts may be called alike where they differ by no more.
_ALIKE = 0.05


@dataclass(frozen=True)
class Comparison:
    """How fast a candidate is, with its baseline as the measure.

    Attributes:
        speedup: The baseline's time over the candidate's: above 1 the candidate is faster.
        low: The lower end of the 95 % interval of ``speedup``.
        high: Its upper end.
        more_rounds: How many more rounds would probably decide, where they have not and a sensible number would.
        rounds: Those that it is drawn from.
    """

    speedup: float
    low: float
    high: float
    verdict: Verdict
    more_rounds: int | None = None
    rounds: int = LEAST_ROUNDS

    @property
    def told(self) -> str:
        """The verdict as a sentence's part."""
        if self.verdict != "cannot tell":
            return self.verdict
        if self.rounds < LEAST_ROUNDS:
            return f"cannot tell from fewer than {LEAST_ROUNDS} rounds"
        apart = max(1 / self.low, self.high) - 1
        if apart <= _ALIKE:  # which says more than rounds would of a difference that nobody minds
            return f"alike within {math.ceil(round(apart * 1000, 6)) / 10:g} %"
        if self.more_rounds is not None:
            return f"cannot tell; about {self.more_rounds} more rounds would"
        return f"cannot tell, nor would {_MOST_ROUNDS} rounds: times vary too much here"


def compare(baseline: npt.ArrayLike, candidate: npt.ArrayLike) -> Comparison:
    """Compares two artifacts by the times of their turns.

    The ratios are of the two turns in one round, so that what slows the machine for longer than a round cancels. Their
    logarithms are counted, so that exchanging the two gives the inverse of everything. Without enough rounds for an
    interval there is no verdict.

    Args:
        baseline: Seconds of one call, of shape [launches, rounds]; each launch is a process of its own.
        candidate: The same, in the same rounds.
    """
    logs = np.log(np.asarray(baseline, dtype=np.float64)) - np.log(np.asarray(candidate, dtype=np.float64))
    median = float(np.median(logs))
    low, high = interval(logs)
    verdict: Verdict = "faster" if low > 0 else "slower" if high < 0 else "cannot tell"
    more = None
    if logs.size < LEAST_ROUNDS:
        verdict, more = "cannot tell", LEAST_ROUNDS - logs.size
    elif verdict == "cannot tell":
        more = _more_rounds(median, low, high, logs.size)
    return Comparison(math.exp(median), math.exp(low), math.exp(high), verdict, more, logs.size)


def interval(logs: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the median, by a bootstrap of two levels: over launches, and over the rounds of each.

    The rounds of one launch share what its processes happened to get, such as where their memory lies, so they are no
    independent draws, and over rounds alone the interval would be too narrow (Davison and Hinkley, Bootstrap Methods
    and their Application, 1997, section 3.8). Of few launches a bootstrap is too narrow still, so its percentiles are
    those that Student's distribution would ask for (Hesterberg, What Teachers Should Know About the Bootstrap, 2015,
    section 5.3, "expanded percentile interval").

    Args:
        logs: Of shape [launches, rounds].
    """
    generator = np.random.default_rng(0)
    launches, rounds = logs.shape
    launch = generator.integers(launches, size=(_DRAWS, launches, 1))
    drawn = logs[launch, generator.integers(rounds, size=(_DRAWS, launches, rounds))]
    medians = np.sort(np.median(drawn.reshape(_DRAWS, -1), axis=1))
    outside = int(_DRAWS * _outside(launches))
    return float(medians[outside]), float(medians[-1 - outside])


def _outside(launches: int) -> float:
    """How much of the bootstrap's draws lie below the interval, and as much above it.

    Student's quantile by the expansion of Abramowitz and Stegun (1964), 26.7.5.
    """
    normal = statistics.NormalDist()
    z, df = normal.inv_cdf(1 - (1 - _LEVEL) / 2), max(1, launches - 1)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return normal.cdf(-t * math.sqrt((df + 1) / df))


def _more_rounds(median: float, low: float, high: float, rounds: int) -> int | None:
    """Rounds until the interval leaves 0 behind, its width shrinking with their square root; None for too many."""
    reach = median - low if median > 0 else high - median
    if not reach <= abs(median) * math.sqrt(_MOST_ROUNDS / rounds):
        return None
    return max(1, math.ceil(rounds * (reach / abs(median)) ** 2) - rounds) if median else None


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile."""
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return float(p50), float(p90), float(p99)
