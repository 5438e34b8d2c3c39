"""Compares the times of two artifacts: speedup, interval, and verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optexport.bundle.outcomes import LEAST_ROUNDS, Comparison, Verdict

_RESAMPLES = 4000
_LEVEL = 0.95
# Do not suggest more rounds than this.
_MAX_ROUNDS = 2000


def compare(baseline: npt.ArrayLike, candidate: npt.ArrayLike) -> Comparison:
    """Compares two artifacts by the times of their turns.

    Divides the times of two turns in the same round, so that slow phases of the machine cancel out. Uses logarithms, so
    that swapping the two inverts every figure.

    Args:
        baseline: Seconds of one call, of shape [launches, rounds]; each launch is a separate process.
        candidate: The same, in the same rounds.
    """
    logs = np.log(np.asarray(baseline, dtype=np.float64)) - np.log(np.asarray(candidate, dtype=np.float64))
    median = float(np.median(logs))
    low, high = interval(logs)
    verdict: Verdict = "faster" if low > 0 else "slower" if high < 0 else "inconclusive"
    more_rounds = None
    if logs.size < LEAST_ROUNDS:
        verdict, more_rounds = "inconclusive", LEAST_ROUNDS - logs.size
    elif verdict == "inconclusive":
        more_rounds = _estimate_more_rounds(median, low, high, logs.size)
    return Comparison(math.exp(median), math.exp(low), math.exp(high), verdict, more_rounds, logs.size)


def interval(logs: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Returns the 95 % interval of the median by a two-level bootstrap.

    Rounds of one launch are not independent, because they share the process and its memory layout. A bootstrap over
    rounds alone would be too narrow (Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8).
    With few launches the bootstrap is still too narrow, so that its percentiles follow Student's distribution
    (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3, "expanded percentile interval").

    Args:
        logs: Logarithms of ratios, of shape [launches, rounds].
    """
    generator = np.random.default_rng(0)
    launches, rounds = logs.shape
    launch = generator.integers(launches, size=(_RESAMPLES, launches, 1))
    resampled = logs[launch, generator.integers(rounds, size=(_RESAMPLES, launches, rounds))]
    medians = np.sort(np.median(resampled.reshape(_RESAMPLES, -1), axis=1))
    outside = int(_RESAMPLES * _tail_share(launches))
    return float(medians[outside]), float(medians[-1 - outside])


def _tail_share(launches: int) -> float:
    """Returns the share of resamples on either side of the interval.

    Student's quantile is approximated by Abramowitz and Stegun (1964), 26.7.5.
    """
    normal = statistics.NormalDist()
    z, df = normal.inv_cdf(1 - (1 - _LEVEL) / 2), max(1, launches - 1)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return normal.cdf(-t * math.sqrt((df + 1) / df))


def _estimate_more_rounds(median: float, low: float, high: float, rounds: int) -> int | None:
    """Estimates the rounds until the interval excludes 0; None if they are too many."""
    reach = median - low if median > 0 else high - median
    if not reach <= abs(median) * math.sqrt(_MAX_ROUNDS / rounds):
        return None
    return max(1, math.ceil(rounds * (reach / abs(median)) ** 2) - rounds) if median else None


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Returns the 50th, 90th and 99th percentile."""
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return float(p50), float(p90), float(p99)
