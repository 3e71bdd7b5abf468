"""What several samples of a task are worth together: the best of k of them, and the answer that most of k agree on.

Both are exact expectations over which k of a task's n samples are drawn: no sample is left out, and no order counts.
pass@k is the unbiased estimator of M. Chen et al., "Evaluating Large Language Models Trained on Code" (equation 1 of
arXiv 2107.03374); majority@k is self-consistency (X. Wang et al., arXiv 2203.11171). Votes that tie share, as in
NeMo-Skills; in lm-eval the one that came first wins, which is the same in the mean over orders. No answer is no vote.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction


def ks_of(samples: int) -> list[int]:
    """The k that are reported of so many samples: 2, 4, 8, … below it, and all; none of one sample."""
    return [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples] * (samples > 1)


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected largest score among k of the samples; nan with fewer than k that have a verdict (are not nan).

    With c right of n, scored 0 and 1, that is 1 - C(n-c, k) / C(n, k). In general the i-th smallest score is the
    largest of C(i-1, k-1) of the C(n, k) choices.
    """
    known = sorted(score for score in scores if not math.isnan(score))
    if len(known) < k:
        return math.nan
    # The choices of 1,024 of 2,048 are more than a float holds.
    total = sum(Fraction(score) * math.comb(i, k - 1) for i, score in enumerate(known))
    return float(total / math.comb(len(known), k))


def majority_at_k(votes: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Expected score of the answer that most of k samples give; nan as in `pass_at_k`.

    Of answers that tie it is their mean score, and where none of the k has an answer it is 0.

    Args:
        votes: the answer of each sample in the form that answers are compared in; None: it has none.
        scores: of the same samples. Equal answers have equal scores, or count as their mean.
    """
    known = [(vote, Fraction(score)) for vote, score in zip(votes, scores, strict=True) if not math.isnan(score)]
    if len(known) < k:
        return math.nan
    by_answer: dict[str, list[Fraction]] = defaultdict(list)
    for vote, score in known:
        if vote is not None:
            by_answer[vote].append(score)
    silent = sum(vote is None for vote, _ in known)
    sizes = [len(given) for given in by_answer.values()]
    expected = Fraction()
    for size in set(sizes):  # answers given equally often win equally often
        scores_of_size = (score for given in by_answer.values() if len(given) == size for score in given)
        mean_scores = sum(scores_of_size, Fraction()) / size
        others = sizes.copy()
        others.remove(size)
        wins = sum(
            math.comb(size, count) * _ways(others, silent, k - count, count) for count in range(1, min(size, k) + 1)
        )
        expected += mean_scores * wins
    return float(expected / math.comb(len(known), k))


def _ways(others: Sequence[int], silent: int, drawn: int, most: int) -> Fraction:
    """In how many ways `drawn` samples are of other answers, none more than `most` times, or of none; each divided by
    how many answers then tie at `most`, the winner included.

    others: how often each other answer was given.
    """
    ways = Counter({(0, 0): 1})  # of other answers so far: samples, answers that tie
    for size in others:
        longer: Counter[tuple[int, int]] = Counter()
        for (taken, ties), number in ways.items():
            for count in range(min(size, most, drawn - taken) + 1):
                longer[taken + count, ties + (count == most)] += number * math.comb(size, count)
        ways = longer
    return sum(
        (Fraction(number * math.comb(silent, drawn - taken), ties + 1) for (taken, ties), number in ways.items()),
        Fraction(),
    )
