"""Intervals and tests against published values, exact enumeration and coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nemotron.stack.evaluation.intervals import (
    bootstrap_interval,
    holm,
    mean_interval,
    paired_difference,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, trials)
    assert interval.estimate == successes / trials
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_wilson_at_the_edges() -> None:
    assert wilson_interval(20, 20).high == 1.0 and wilson_interval(20, 20).low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert math.isnan(wilson_interval(0, 0).estimate)
    with pytest.raises(ValueError, match="3 successes in 2"):
        wilson_interval(3, 2)


def test_strata_weigh_the_same_whatever_their_size_and_nan_is_left_out() -> None:
    interval = bootstrap_interval([np.array([1.0, 1.0, np.nan]), np.zeros(100)])
    assert (interval.estimate, interval.low, interval.high) == (0.5, 0.5, 0.5)
    assert math.isnan(bootstrap_interval([np.array([np.nan])]).estimate)


def test_the_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        task_rate = rng.beta(2, 1, size=100)  # mean 2/3; samples of one task share its rate
        means = rng.binomial(4, task_rate) / 4
        interval = bootstrap_interval([means], seed=trial, resamples=200)
        covered += interval.low <= 2 / 3 <= interval.high
    assert 0.91 < covered / 300 < 0.985


def test_the_randomisation_test_is_that_of_all_sign_flips() -> None:
    differences = np.array([0.5, 0.25, 0.75, -0.25, 1.0, 0.5, 0.0, 0.25])
    flips = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=len(differences))]
    exact = np.mean([flip >= abs(differences.sum()) for flip in flips])
    found = paired_difference([np.zeros(8)], [differences], resamples=40_000)
    assert found.estimate == differences.mean()
    assert found.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 40_000))


def test_a_real_difference_is_found_and_none_is_not() -> None:
    rng = np.random.default_rng(2)
    before = rng.binomial(4, 0.6, size=200) / 4
    same, better = rng.binomial(4, 0.6, size=200) / 4, rng.binomial(4, 0.75, size=200) / 4
    assert paired_difference([before], [better]).low > 0 and paired_difference([before], [better]).p_value < 0.01
    assert paired_difference([before], [same]).p_value > 0.05
    assert paired_difference([before], [before]).p_value == 1.0


def test_equal_differences_say_something_about_so_many_tasks_only() -> None:
    none, all_four = [np.zeros(50)], [np.ones(4)]
    found = paired_difference(none, none)
    assert (found.estimate, found.low, found.high) == (0, -found.high, wilson_interval(0, 50).high)
    found = paired_difference([np.zeros(4)], all_four)
    assert (found.estimate, found.high) == (1, 1) and 0 < found.low < 0.6


def test_scores_that_are_equal_within_each_stratum_have_an_interval() -> None:
    none, all_right, wilson = np.zeros(20), np.ones(20), 0.1611  # of 0 in 20, as above
    found = mean_interval([none, all_right])
    assert (found.estimate, found.high - 0.5, 0.5 - found.low) == pytest.approx((0.5, wilson / 2, wilson / 2), abs=1e-4)
    assert mean_interval([none]) == wilson_interval(0, 20) and mean_interval([none, none]) == wilson_interval(0, 40)
    found = paired_difference([none, all_right], [all_right, all_right])
    assert found.estimate == 0.5 and found.low == pytest.approx(0.5 - wilson / math.sqrt(2), abs=1e-4)
    assert found.high == pytest.approx(0.5 + wilson / 2, abs=1e-4)  # no task can gain more than 1


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        paired_difference([np.zeros(3)], [np.zeros(4)])


def test_holm_on_a_worked_example() -> None:
    # sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04, made non-decreasing
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
