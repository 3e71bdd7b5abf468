"""Which prompts of a family a step draws, by pass rate: easy ones first, hard ones last.

Llama-Nemotron (arXiv 2505.00949, section 5.1) and Nemotron 3 Nano (arXiv 2512.20848, section 3.2): the pass rates of a
batch follow a Gaussian whose mean falls linearly over the run. Each pass rate gets its share of the batch, as far as it
has prompts left that were not drawn yet; the rest comes from the pass rates with most prompts left. Not published are
the two means and the standard deviation. The papers shuffle each batch; here one update takes a batch as a whole.
Legend: L levels of the pass rate, those that have prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemotron.kit.schemas.rl import CurriculumConfig

# Pass rates of 8 rollouts are eighths; any other is counted among the nearest.
LEVELS = 8


class Curriculum:
    """The draws of one family in a run of `num_steps` batches with `count` of its prompts each.

    A pure function of its arguments, so that a resumed run draws what it would have drawn. No prompt is drawn again
    before fewer than `count` are left; then all of them are there once more.

    members: per level the positions of its prompts. rates_L: their pass rates. draws: per step what each level gives,
    as (how many it gave before, how many it gives).
    """

    def __init__(self, pass_rates: Sequence[float], count: int, num_steps: int, settings: CurriculumConfig) -> None:
        by_level: dict[int, list[int]] = {}
        for position, rate in enumerate(pass_rates):
            if rate < settings.drop_pass_rate:
                by_level.setdefault(round(rate * LEVELS), []).append(position)
        levels = sorted(by_level)
        self.members = [by_level[level] for level in levels]
        self.rates_L = np.array(levels) / LEVELS
        self.draws: list[list[tuple[int, int]]] = []
        sizes_L = np.array([len(positions) for positions in self.members])
        left_L, given_L = sizes_L.copy(), np.zeros_like(sizes_L)
        for mean in np.linspace(settings.start_mean, settings.end_mean, num_steps) if levels else ():
            while left_L.sum() < count:
                left_L += sizes_L
            taken_L = allocate(gaussian_shares(self.rates_L, float(mean), settings.std), left_L, count)
            self.draws.append(list(zip(given_L.tolist(), taken_L.tolist(), strict=True)))
            left_L, given_L = left_L - taken_L, given_L + taken_L

    @property
    def num_prompts(self) -> int:
        """How many prompts are not dropped."""
        return sum(map(len, self.members))

    def pass_rate(self, step: int) -> float:
        """The sum of the pass rates, to the nearest eighth, of the prompts that a step draws."""
        return float(self.rates_L @ [taken for _, taken in self.draws[step]])


def gaussian_shares(rates_L: np.ndarray, mean: float, std: float) -> np.ndarray:
    """[L]: the share of a batch for each pass rate, proportional to the density of the Gaussian there."""
    exponents_L = -((rates_L - mean) ** 2) / (2 * std**2)
    weights_L = np.exp(exponents_L - exponents_L.max())  # the nearest level has weight 1, however far away it is
    shares_L: np.ndarray = weights_L / weights_L.sum()
    return shares_L


def allocate(shares_L: np.ndarray, left_L: np.ndarray, count: int) -> np.ndarray:
    """[L], int: `count` prompts over the levels by their shares, rounded by largest remainder, none beyond `left_L`.

    What a level lacks comes one by one from the level that then has most left.
    """
    exact_L = shares_L * count
    taken_L = np.floor(exact_L).astype(int)
    by_remainder = np.argsort(taken_L - exact_L, kind="stable")
    taken_L[by_remainder[: count - int(taken_L.sum())]] += 1
    taken_L = np.minimum(taken_L, left_L)
    for _ in range(count - int(taken_L.sum())):
        taken_L[np.argmax(left_L - taken_L)] += 1
    return taken_L
