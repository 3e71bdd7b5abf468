"""The trigram baseline: counts by hand, normalisation, EM, and a source whose entropy is known."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from nemotron.stack.evaluation.trigram import InterpolatedTrigram


def test_frequencies_are_those_counted_by_hand() -> None:
    rng = np.random.default_rng(0)
    train, text = rng.integers(0, 4, 200), rng.integers(0, 5, 60)
    model = InterpolatedTrigram(train, vocab_size=5)
    model.weights = np.tile([0.5, 0.3, 0.2], (len(model.weights), 1))
    pairs, triples = Counter(itertools.pairwise(train)), Counter(zip(train, train[1:], train[2:], strict=False))
    expected = []
    for i in range(1, len(text)):
        w, v = text[i], text[i - 1]
        p = 0.2 * (np.sum(train == w) + 1) / (200 + 5)
        starts = sum(count for pair, count in pairs.items() if pair[0] == v)
        p += 0.3 * pairs[(v, w)] / starts if starts else 0.0
        if i >= 2:
            u = text[i - 2]
            starts = sum(count for triple, count in triples.items() if triple[:2] == (u, v))
            p += 0.5 * triples[(u, v, w)] / starts if starts else 0.0
        expected.append(-math.log(p))
    assert model.nll(text) == pytest.approx(expected)


def test_probabilities_sum_to_one_after_a_seen_context() -> None:
    rng = np.random.default_rng(1)
    train = rng.integers(0, 10, 2000)
    model = InterpolatedTrigram(train, vocab_size=12)
    model.fit(rng.integers(0, 10, 500))
    for u, v in set(itertools.pairwise(train.tolist())):
        total = sum(math.exp(-model.nll(np.array([u, v, w]))[1]) for w in range(12))
        assert total == pytest.approx(1.0)


def test_each_step_of_em_makes_the_fitted_text_more_likely() -> None:
    rng = np.random.default_rng(2)
    source = rng.dirichlet(np.full(20, 0.3), size=20)

    def text(n: int) -> np.ndarray:
        tokens = [0]
        for _ in range(n):
            tokens.append(int(rng.choice(20, p=source[tokens[-1]])))
        return np.array(tokens)

    train, held_out = text(4000), text(4000)
    losses = []
    for iterations in (0, 1, 3, 10, 30):
        model = InterpolatedTrigram(train, vocab_size=20)
        model.fit(held_out, iterations)
        losses.append(model.nll(held_out).mean())
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(losses))
    assert np.allclose(model.weights.sum(axis=1), 1.0)


def test_the_score_approaches_the_entropy_of_the_source() -> None:
    rng = np.random.default_rng(3)

    # The next token depends on the two before it: one of them with 0.9, else uniform over 8.
    def text(n: int) -> np.ndarray:
        tokens = [0, 1]
        for _ in range(n):
            tokens.append((3 * tokens[-2] + tokens[-1]) % 8 if rng.random() < 0.9 else int(rng.integers(8)))
        return np.array(tokens)

    p = 0.9 + 0.1 / 8
    entropy_bits = -(p * math.log2(p) + 7 * (0.1 / 8) * math.log2(0.1 / 8))
    model = InterpolatedTrigram(text(30_000), vocab_size=8)
    for _ in range(2):  # fitted anew
        model.fit(text(3000))
        assert model.nll(text(5000)).mean() / math.log(2) == pytest.approx(entropy_bits, rel=0.05)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 \.\. 4"):
        InterpolatedTrigram(np.array([0, 1, 5]), vocab_size=5)
    with pytest.raises(ValueError, match="too few"):
        InterpolatedTrigram(np.array([0, 1]), vocab_size=5)
