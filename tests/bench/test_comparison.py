"""The verdict on times: right as often as it says, the same from both sides, and silent where nothing can be told."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optexport.bench.comparison import Comparison, compare, interval, percentiles
from optexport.config.benchmarks import LEAST_ROUNDS

Times = npt.NDArray[np.float64]


def simulated(
    generator: np.random.Generator, ratio: float, launches: int = 10, rounds: int = 2, noise: float = 0.02
) -> tuple[Times, Times]:
    """Times of a baseline and of a candidate that is faster by a ratio, as machines give them: each process has a speed
    of its own, each turn is off by heavy-tailed noise, and both share what disturbs a whole round."""
    shared = 0.3 * generator.standard_normal((launches, rounds))

    def turns(seconds: float) -> Times:
        process = 0.7 * noise * generator.standard_normal((launches, 1))
        return np.asarray(seconds * np.exp(shared + process + noise * generator.standard_t(3, (launches, rounds))))

    return turns(1.0), turns(1.0 / ratio)


@pytest.mark.parametrize("launches", [6, 10, 30])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(launches: int) -> None:
    generator = np.random.default_rng(launches)
    found = [compare(*simulated(generator, 1.03, launches)) for _ in range(300)]
    inside = sum(c.low <= 1.03 <= c.high for c in found) / len(found)
    assert inside >= 0.95 - 0.025  # two standard deviations of a count of 300


def test_equal_artifacts_are_seldom_told_apart() -> None:
    generator = np.random.default_rng(0)
    verdicts = [compare(*simulated(generator, 1.0)).verdict for _ in range(300)]
    assert verdicts.count("cannot tell") >= (0.95 - 0.025) * len(verdicts)


def test_an_interval_over_rounds_alone_would_be_too_narrow() -> None:
    """Why artifacts are started afresh: as one launch, the same rounds claim more than they know."""
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        baseline, candidate = simulated(generator, 1.0, launches=1, rounds=40, noise=0.02)
        resampled = np.median(generator.choice(np.log(baseline / candidate)[0], (500, 40)), axis=1)
        missed += not np.quantile(resampled, 0.025) <= 0 <= np.quantile(resampled, 0.975)
    assert missed > 0.2 * 200


@given(st.integers(0, 2**32 - 1), st.floats(0.2, 5.0), st.integers(1, 12), st.integers(1, 4), st.floats(1e-4, 0.3))
def test_exchanging_the_two_inverts_everything(
    seed: int, ratio: float, launches: int, rounds: int, noise: float
) -> None:
    one, other = simulated(np.random.default_rng(seed), ratio, launches, rounds, noise)
    forwards, backwards = compare(one, other), compare(other, one)
    assert backwards.verdict == {"faster": "slower", "slower": "faster"}.get(forwards.verdict, "cannot tell")
    assert backwards.more_rounds == forwards.more_rounds
    np.testing.assert_allclose(
        [backwards.speedup, backwards.low, backwards.high],
        [1 / forwards.speedup, 1 / forwards.high, 1 / forwards.low],
        rtol=1e-12,
    )


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2.0), st.floats(1e-6, 1e3))
def test_the_unit_of_time_does_not_matter(seed: int, ratio: float, unit: float) -> None:
    one, other = simulated(np.random.default_rng(seed), ratio)
    np.testing.assert_allclose(compare(one, other).low, compare(one * unit, other * unit).low, rtol=1e-9)


@given(st.integers(0, 2**32 - 1))
def test_a_difference_far_beyond_the_noise_is_always_told(seed: int) -> None:
    generator = np.random.default_rng(seed)
    assert compare(*simulated(generator, 2.0)).verdict == "faster"
    assert compare(*simulated(generator, 0.5)).verdict == "slower"


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10.0))
def test_too_few_rounds_give_no_verdict_and_say_how_many_are_missing(seed: int, ratio: float) -> None:
    found = compare(*simulated(np.random.default_rng(seed), ratio, launches=3))
    assert (found.verdict, found.more_rounds) == ("cannot tell", LEAST_ROUNDS - 6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 20), st.integers(1, 4))
def test_the_interval_lies_within_what_was_seen_and_around_the_median(seed: int, launches: int, rounds: int) -> None:
    logs = np.random.default_rng(seed).standard_normal((launches, rounds))
    low, high = interval(logs)
    assert logs.min() <= low <= np.median(logs) <= high <= logs.max()


def test_the_rounds_that_it_asks_for_mostly_decide() -> None:
    generator = np.random.default_rng(1)
    decided = asked = 0
    for _ in range(60):
        found = compare(*simulated(generator, 1.01))
        if found.verdict == "cannot tell" and found.more_rounds is not None and found.speedup > 1:
            asked += 1
            more = compare(*simulated(generator, found.speedup, launches=10 + found.more_rounds))  # two rounds each
            decided += more.verdict == "faster"
    assert asked >= 10
    assert decided >= 0.8 * asked


def test_what_is_told_names_the_rounds_the_likeness_or_the_noise() -> None:
    assert Comparison(1.2, 1.1, 1.3, "faster").told == "faster"
    assert Comparison(1.01, 0.9, 1.1, "cannot tell", 80).told == "cannot tell; about 80 more rounds would"
    assert Comparison(1.005, 0.99, 1.02, "cannot tell", 127).told == "alike within 2 %"
    assert Comparison(1.01, 0.9, 1.1, "cannot tell", 8, 4).told == "cannot tell from fewer than 12 rounds"
    assert Comparison(1.0001, 0.991, 1.012, "cannot tell").told == "alike within 1.2 %"
    assert "vary too much" in Comparison(1.0001, 0.7, 1.4, "cannot tell").told


def test_the_same_times_are_alike() -> None:
    times = np.exp(np.random.default_rng(0).standard_normal((10, 2)))
    found = compare(times, times)
    assert (found.speedup, found.low, found.high, found.verdict, found.more_rounds) == (1, 1, 1, "cannot tell", None)
    assert found.told == "alike within 0 %"


def test_percentiles_are_those_of_all_calls() -> None:
    np.testing.assert_allclose(percentiles([float(i) for i in range(101)]), (50, 90, 99))
    assert all(math.isfinite(value) for value in percentiles([1.0]))
