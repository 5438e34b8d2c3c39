"""Tests of the verdict on times."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optexport.bench.comparison import compare, interval, percentiles
from optexport.bundle.outcomes import LEAST_ROUNDS, Comparison

Times = npt.NDArray[np.float64]


def simulated(
    generator: np.random.Generator, ratio: float, launches: int = 10, rounds: int = 2, noise: float = 0.02
) -> tuple[Times, Times]:
    """Simulates times of a baseline and of a candidate that is faster by a ratio.

    Each process has its own speed, each turn has heavy-tailed noise, and both share the disturbance of a round.
    """
    shared = 0.3 * generator.standard_normal((launches, rounds))

    def turns(seconds: float) -> Times:
        process = 0.7 * noise * generator.standard_normal((launches, 1))
        return np.asarray(seconds * np.exp(shared + process + noise * generator.standard_t(3, (launches, rounds))))

    return turns(1.0), turns(1.0 / ratio)


@pytest.mark.slow
@pytest.mark.parametrize("launches", [6, 10, 30])
def test_interval_covers_the_true_ratio_as_often_as_claimed(launches: int) -> None:
    generator = np.random.default_rng(launches)
    comparisons = [compare(*simulated(generator, 1.03, launches)) for _ in range(300)]
    inside = sum(c.low <= 1.03 <= c.high for c in comparisons) / len(comparisons)
    assert inside >= 0.95 - 0.025  # two standard deviations of a count of 300


@pytest.mark.slow
def test_equal_artifacts_seldom_differ() -> None:
    generator = np.random.default_rng(0)
    verdicts = [compare(*simulated(generator, 1.0)).verdict for _ in range(300)]
    assert verdicts.count("inconclusive") >= (0.95 - 0.025) * len(verdicts)


def test_interval_over_rounds_of_one_launch_is_too_narrow() -> None:
    """Shows why artifacts restart: rounds of one launch are not independent."""
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        baseline, candidate = simulated(generator, 1.0, launches=1, rounds=40, noise=0.02)
        resampled = np.median(generator.choice(np.log(baseline / candidate)[0], (500, 40)), axis=1)
        missed += not np.quantile(resampled, 0.025) <= 0 <= np.quantile(resampled, 0.975)
    assert missed > 0.2 * 200


@given(st.integers(0, 2**32 - 1), st.floats(0.2, 5.0), st.integers(1, 12), st.integers(1, 4), st.floats(1e-4, 0.3))
def test_swapping_the_two_inverts_every_figure(
    seed: int, ratio: float, launches: int, rounds: int, noise: float
) -> None:
    baseline, candidate = simulated(np.random.default_rng(seed), ratio, launches, rounds, noise)
    forwards, backwards = compare(baseline, candidate), compare(candidate, baseline)
    assert backwards.verdict == {"faster": "slower", "slower": "faster"}.get(forwards.verdict, "inconclusive")
    assert backwards.more_rounds == forwards.more_rounds
    np.testing.assert_allclose(
        [backwards.speedup, backwards.low, backwards.high],
        [1 / forwards.speedup, 1 / forwards.high, 1 / forwards.low],
        rtol=1e-12,
    )


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2.0), st.floats(1e-6, 1e3))
def test_unit_of_time_does_not_matter(seed: int, ratio: float, unit: float) -> None:
    baseline, candidate = simulated(np.random.default_rng(seed), ratio)
    np.testing.assert_allclose(
        compare(baseline, candidate).low, compare(baseline * unit, candidate * unit).low, rtol=1e-9
    )


@given(st.integers(0, 2**32 - 1))
def test_large_difference_always_has_a_verdict(seed: int) -> None:
    generator = np.random.default_rng(seed)
    assert compare(*simulated(generator, 2.0)).verdict == "faster"
    assert compare(*simulated(generator, 0.5)).verdict == "slower"


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10.0))
def test_too_few_rounds_are_inconclusive(seed: int, ratio: float) -> None:
    comparison = compare(*simulated(np.random.default_rng(seed), ratio, launches=3))
    assert (comparison.verdict, comparison.more_rounds) == ("inconclusive", LEAST_ROUNDS - 6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 20), st.integers(1, 4))
def test_interval_is_within_the_data_and_has_the_median(seed: int, launches: int, rounds: int) -> None:
    logs = np.random.default_rng(seed).standard_normal((launches, rounds))
    low, high = interval(logs)
    assert logs.min() <= low <= np.median(logs) <= high <= logs.max()


@pytest.mark.slow
def test_suggested_rounds_mostly_give_a_verdict() -> None:
    generator = np.random.default_rng(1)
    decided = suggested = 0
    for _ in range(60):
        comparison = compare(*simulated(generator, 1.01))
        if comparison.verdict == "inconclusive" and comparison.more_rounds is not None and comparison.speedup > 1:
            suggested += 1
            more = compare(
                *simulated(generator, comparison.speedup, launches=10 + comparison.more_rounds)
            )  # two rounds each
            decided += more.verdict == "faster"
    assert suggested >= 10
    assert decided >= 0.8 * suggested


def test_verdict_text_names_rounds_equality_or_noise() -> None:
    assert Comparison(1.2, 1.1, 1.3, "faster").verdict_text == "faster"
    assert Comparison(1.01, 0.9, 1.1, "inconclusive", 80).verdict_text == "inconclusive: needs about 80 more rounds"
    assert Comparison(1.005, 0.99, 1.02, "inconclusive", 127).verdict_text == "equal within 2 %"
    assert Comparison(1.01, 0.9, 1.1, "inconclusive", 8, 4).verdict_text == "inconclusive: fewer than 12 rounds"
    assert Comparison(1.0001, 0.991, 1.012, "inconclusive").verdict_text == "equal within 1.2 %"
    assert "too noisy" in Comparison(1.0001, 0.7, 1.4, "inconclusive").verdict_text


def test_equal_times_are_equal() -> None:
    times = np.exp(np.random.default_rng(0).standard_normal((10, 2)))
    comparison = compare(times, times)
    assert (comparison.speedup, comparison.low, comparison.high) == (1, 1, 1)
    assert (comparison.verdict, comparison.more_rounds) == ("inconclusive", None)
    assert comparison.verdict_text == "equal within 0 %"


def test_percentiles() -> None:
    np.testing.assert_allclose(percentiles([float(i) for i in range(101)]), (50, 90, 99))
    assert all(math.isfinite(value) for value in percentiles([1.0]))
