"""An interpolated trigram model: the score that a trained model must beat, counted on the same training tokens.

p(w | u v) = l3 c(uvw)/c(uv.) + l2 c(vw)/c(v.) + l1 (c(w)+1)/(N+V), the weights l fitted by EM on tokens that were not
counted (F. Jelinek, R. L. Mercer, "Interpolated estimation of Markov source parameters from sparse data", 1980). As
there, weights are tied by how often the context was seen, here by powers of two: a context seen often may trust its
trigrams, one never seen must not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

COUNTS = ("bigrams", "contexts", "trigrams")
"""What is counted one after another, each in one pass over all tokens."""
_ORDERS = 3
_BUCKETS = 24  # a power of two each, for c(uv) > 0; as many again by c(v) where c(uv) = 0


class InterpolatedTrigram:
    """A trigram model over token ids, interpolated with bigrams and unigrams.

    Args:
        train_tokens: [N] the token stream to count, exactly the one that the compared model was trained on.
        vocab_size: V; every id is below it.
        counting: called with how many of `COUNTS` are done, from 0 on; raises to stop.
    """

    def __init__(
        self, train_tokens: np.ndarray, vocab_size: int, counting: Callable[[int], None] = lambda step: None
    ) -> None:
        tokens = _checked(train_tokens, vocab_size)
        if len(tokens) < _ORDERS:
            raise ValueError(f"{len(tokens)} tokens are too few to count trigrams")
        self._vocab_size = vocab_size
        self._unigram = (np.bincount(tokens, minlength=vocab_size) + 1) / (len(tokens) + vocab_size)
        self._followed = np.bincount(tokens[:-1], minlength=vocab_size)
        pairs = tokens[:-1] * vocab_size + tokens[1:]
        counting(0)
        self._bigrams, self._bigram_counts = np.unique(pairs, return_counts=True)
        counting(1)
        self._contexts, self._context_counts = np.unique(pairs[:-1], return_counts=True)
        counting(2)
        triples = pairs[:-1] * vocab_size + tokens[2:]  # below V^3, which fits into 64 bits for V up to 2 million
        self._trigrams, self._trigram_counts = np.unique(triples, return_counts=True)
        counting(3)
        self.weights = np.full((2 * _BUCKETS, _ORDERS), 1 / _ORDERS)

    def fit(self, tokens: np.ndarray, iterations: int = 30, poll: Callable[[], None] = lambda: None) -> None:
        """Fit the weights anew, by EM, to maximise the likelihood of `tokens`, which must not have been counted.

        Each bucket has one pseudo-count an order, so that a bucket met rarely or never keeps all its weights above 0.
        `poll` is called before each iteration; it raises to stop.
        """
        orders_NK, bucket_N = self._orders(_checked(tokens, self._vocab_size))
        self.weights = np.full((2 * _BUCKETS, _ORDERS), 1 / _ORDERS)
        for _ in range(iterations):
            poll()
            joint_NK = self.weights[bucket_N] * orders_NK
            posterior_NK = joint_NK / joint_NK.sum(axis=1, keepdims=True)
            mass = np.stack(
                [np.bincount(bucket_N, posterior_NK[:, k], minlength=2 * _BUCKETS) for k in range(_ORDERS)], axis=1
            )
            self.weights = (mass + 1) / (mass + 1).sum(axis=1, keepdims=True)

    def nll(self, tokens: np.ndarray) -> np.ndarray:
        """[N-1] negative log-likelihood in nats of every token but the first, each given the two before it."""
        orders_NK, bucket_N = self._orders(_checked(tokens, self._vocab_size))
        nll: np.ndarray = -np.log((self.weights[bucket_N] * orders_NK).sum(axis=1))
        return nll

    def _orders(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[N-1, 3] relative frequency of each token but the first as trigram, bigram, unigram; [N-1] its bucket."""
        size = self._vocab_size
        word, before = tokens[1:], tokens[:-1]
        pair = before * size + word
        context = np.concatenate([[-1], pair[:-1]])  # the first has one token before it: no such trigram context
        context_count = _lookup(self._contexts, self._context_counts, context)
        followed = self._followed[before]
        trigram_count = _lookup(self._trigrams, self._trigram_counts, context * size + word)
        bigram_count = _lookup(self._bigrams, self._bigram_counts, pair)
        orders = np.stack(
            [
                trigram_count / np.maximum(context_count, 1),
                bigram_count / np.maximum(followed, 1),
                self._unigram[word],
            ],
            axis=1,
        )
        bucket = np.where(context_count > 0, _power(context_count), _BUCKETS + _power(followed))
        return orders, bucket


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids as int64, all inside the vocabulary."""
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and (ids.min() < 0 or ids.max() >= vocab_size)):
        raise ValueError(f"token ids must be a vector of values in 0 .. {vocab_size - 1}")
    return ids


def _lookup(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Counts of `wanted` in a table with sorted keys, 0 where absent."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)


def _power(counts: np.ndarray) -> np.ndarray:
    """Bucket of a count: 0 for 0, else 1 + floor(log2(count)), at most the last bucket."""
    exponent = np.floor(np.log2(np.maximum(counts, 1))).astype(np.int64)
    return np.minimum(np.where(counts > 0, 1 + exponent, 0), _BUCKETS - 1)
