"""Confidence intervals and tests for scores of tasks, paired where two models answered the same tasks.

Sources: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927);
B. Efron, R. Tibshirani, "An Introduction to the Bootstrap" (1993), ch. 13, percentile intervals; R. A. Fisher, "The
Design of Experiments" (1935), the paired randomisation test; S. Holm, "A simple sequentially rejective multiple test
procedure", Scand. J. Statist. 6 (1979). Samples of one task are not independent, so the unit that is resampled is the
task (E. Miller, "Adding error bars to evals", arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference, its interval, its two-sided p-value, and that after correction for several tests."""

    estimate: float
    low: float
    high: float
    p_value: float
    p_adjusted: float


def wilson_interval(successes: int, trials: int) -> Interval:
    """Wilson score interval of a proportion, 95 %.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), with p = successes/trials and z the two-sided normal
    quantile. Unlike the normal approximation it stays inside [0, 1] and is not empty at 0 or n successes.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    p, z2n = successes / trials, z * z / trials
    centre = p + z2n / 2
    half = z * math.sqrt(p * (1 - p) / trials + z2n / (4 * trials))
    # At 0 and n successes one end is p itself, which rounding must not move past it.
    return Interval(p, min(p, max(0.0, (centre - half) / (1 + z2n))), max(p, min(1.0, (centre + half) / (1 + z2n))))


def bootstrap_interval(strata: Sequence[np.ndarray], seed: int = 0, resamples: int = _RESAMPLES) -> Interval:
    """Percentile bootstrap interval, 95 %, of the mean of the stratum means, tasks resampled within their stratum.

    Args:
        strata: one array of shape [num_tasks] a stratum (a family), each value the mean over the samples of one task;
            nan marks a task without a verdict and is left out. Strata weigh the same, whatever their sizes.
    """
    kept = [values[~np.isnan(values)] for values in strata]
    if not kept or any(len(values) == 0 for values in kept):
        return Interval(math.nan, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    means_R = np.zeros(resamples)
    for values in kept:
        # Drawing n tasks with replacement is drawing how often each occurs: one multinomial row a resample.
        times_RT = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=resamples)
        means_R += times_RT @ values / len(values)
    means_R /= len(kept)
    low, high = np.quantile(means_R, [0.5 - _CONFIDENCE / 2, 0.5 + _CONFIDENCE / 2])
    return Interval(float(np.mean([values.mean() for values in kept])), float(low), float(high))


def mean_interval(strata: Sequence[np.ndarray]) -> Interval:
    """Bootstrap interval of the mean of the stratum means; Wilson's over all tasks where every one scored 0, or 1.

    Resampling equal scores gives an interval of width 0, whatever their number. So where some strata scored 0 and the
    others 1, it is made of Wilson's of each (`_mean_of`).
    """
    kept = [scores[~np.isnan(scores)] for scores in strata]
    for score in (0.0, 1.0):
        if kept and all(len(scores) and np.all(scores == score) for scores in kept):
            trials = sum(len(scores) for scores in kept)
            return wilson_interval(int(score) * trials, trials)
    if kept and all(len(scores) and scores[0] in (0.0, 1.0) and np.all(scores == scores[0]) for scores in kept):
        return _mean_of([wilson_interval(int(scores.sum()), len(scores)) for scores in kept])
    return bootstrap_interval(strata)


def _mean_of(intervals: Sequence[Interval]) -> Interval:
    """Of the mean of independent estimates: their distances to each end add up as their squares do (G. Y. Zou, A.
    Donner, Statistics in Medicine 27 (2008))."""
    estimate = math.fsum(each.estimate for each in intervals) / len(intervals)
    below = math.hypot(*(each.estimate - each.low for each in intervals)) / len(intervals)
    above = math.hypot(*(each.high - each.estimate for each in intervals)) / len(intervals)
    return Interval(estimate, estimate - below, estimate + above)


def paired_difference(
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    resamples: int = _RESAMPLES,
) -> Difference:
    """Mean of the stratum means of `after - before` on the same tasks, with interval and p-value.

    The interval is the task bootstrap of the differences; where these are all equal, which resampling cannot widen, it
    is as wide as Wilson's for the share of tasks that differ from what was seen, none having done so; where they are
    equal within each stratum, it is made of such intervals (`_mean_of`). The p-value is
    that of the paired randomisation test: under the null hypothesis each task's difference has either sign with equal
    chance, p = (1 + #{|mean*| >= |mean|}) / (1 + resamples), so its smallest value is 1 / (1 + resamples). `p_adjusted`
    equals `p_value` until `holm` sets it.
    """
    if len(before) != len(after) or any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        raise ValueError("the two sides must hold the same tasks")
    strata = [b - a for a, b in zip(before, after, strict=True)]
    interval = bootstrap_interval(strata, resamples=resamples)
    if math.isnan(interval.estimate):
        return Difference(math.nan, math.nan, math.nan, 1.0, 1.0)
    kept = [values[~np.isnan(values)] for values in strata]
    all_T = np.concatenate(kept)
    equal = [all_T] if np.all(all_T == all_T[0]) else kept
    if all(np.all(values == values[0]) for values in equal):
        margins = ((float(values[0]), wilson_interval(0, len(values)).high) for values in equal)
        interval = _mean_of([Interval(value, max(-1.0, value - m), min(1.0, value + m)) for value, m in margins])
    rng = np.random.default_rng(1)
    means_R = np.zeros(resamples)
    for values in strata:
        values = values[~np.isnan(values)]
        signs_RT = rng.integers(0, 2, size=(resamples, len(values)), dtype=np.int8) * 2 - 1
        means_R += signs_RT @ values / len(values)
    means_R /= len(strata)
    # Half a ulp of slack: a resample that equals the observation must count, in whatever order it was summed.
    extreme = int(np.sum(np.abs(means_R) >= abs(interval.estimate) - 1e-12))
    p_value = (1 + extreme) / (1 + resamples)
    return Difference(interval.estimate, interval.low, interval.high, p_value, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given.

    The i-th smallest of m is multiplied by m - i + 1, then made non-decreasing and cut at 1; comparing the results
    with alpha controls the family-wise error at alpha under any dependence.
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
