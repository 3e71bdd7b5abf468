"""Find text that training must not see: word n-grams shared with the evaluation sets or with the held-out split.

The rule is that of Brown et al. 2020 (arXiv 2005.14165, appendix C): 13-grams of lower-cased words without punctuation;
an n-gram found in more than ten training documents is boilerplate (a licence header, the template of a generated task)
and says nothing about leakage. Protected texts shorter than 13 words are protected as one gram of their own length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication is a bijection on 64 bits


def words(text: str) -> list[str]:
    """Lower-cased words and numbers; punctuation and layout do not count."""
    return WORD.findall(text.lower())


class GramHasher:
    """64-bit hashes of word n-grams, vectorised. Holds a bounded cache of word hashes."""

    def __init__(self, max_cached_words: int = 1_000_000) -> None:
        self._cache: dict[str, int] = {}
        self._max_cached_words = max_cached_words

    def word_hashes(self, text: str) -> np.ndarray:
        """uint64 hash of each word of `text`, in order."""
        cache = self._cache
        if len(cache) > self._max_cached_words:
            cache.clear()
        hashes = []
        for word in words(text):
            value = cache.get(word)
            if value is None:
                value = cache[word] = xxhash.xxh3_64_intdigest(word.encode())
            hashes.append(value)
        return np.array(hashes, dtype=np.uint64)

    @staticmethod
    def grams(word_hashes: np.ndarray, n: int) -> np.ndarray:
        """uint64 hash of every run of `n` words; empty when there are fewer."""
        count = len(word_hashes) - n + 1
        if count <= 0:
            return np.empty(0, dtype=np.uint64)
        total = np.zeros(count, dtype=np.uint64)
        for offset in range(n):  # polynomial hash, modulo 2**64
            total = total * _BASE + word_hashes[offset : offset + count]
        return total


def hits(text: str, protected: Mapping[int, np.ndarray], hasher: GramHasher) -> np.ndarray:
    """Hashes of the protected grams that a text holds. `protected`: gram length -> sorted unique uint64 hashes."""
    hashes = hasher.word_hashes(text)
    found = [np.empty(0, dtype=np.uint64)]
    for length, known in protected.items():
        grams = hasher.grams(hashes, length)
        places = np.searchsorted(known[:-1], grams)  # always a valid index: the last one has no successor
        found.append(np.unique(grams[known[places] == grams]))
    return np.concatenate(found)


class Decontaminator:
    """Says which training documents overlap with protected texts.

    `protect` every held-out text. Look for the `hits` of every training document in `protected()`, in other processes
    if you like, and `count` them; then ask `is_leak` about each: what is boilerplate is only known once all training
    documents were seen. Where nothing is boilerplate, `observe` answers at once.
    `min_words`: protected texts with fewer words are too short to mean anything and are ignored.
    """

    def __init__(self, n: int = 13, min_words: int = 5, boilerplate_documents: int = 10) -> None:
        self.n = n
        self.min_words = min_words
        self.boilerplate_documents = boilerplate_documents
        self._hasher = GramHasher()
        self._protected: dict[int, np.ndarray] = {}  # gram length -> sorted unique hashes, built on first use
        self._pending: dict[int, list[np.ndarray]] = {}
        self._documents_with: Counter[int] = Counter()

    def protect(self, texts: Iterable[str]) -> None:
        """Add texts that training must not contain."""
        for text in texts:
            hashes = self._hasher.word_hashes(text)
            if len(hashes) < self.min_words:
                continue
            length = min(self.n, len(hashes))
            self._pending.setdefault(length, []).append(self._hasher.grams(hashes, length))

    def protected(self) -> dict[int, np.ndarray]:
        """All protected grams so far: length -> sorted unique uint64 hashes."""
        for length, arrays in self._pending.items():
            known = self._protected.get(length, np.empty(0, dtype=np.uint64))
            self._protected[length] = np.unique(np.concatenate([known, *arrays]))
        self._pending.clear()
        return self._protected

    def count(self, found: np.ndarray) -> None:
        """Count what `hits` found in one training document."""
        self._documents_with.update(found.tolist())

    def is_leak(self, found: np.ndarray) -> bool:
        """Whether one of these hits is shared by at most `boilerplate_documents` of the counted documents."""
        return any(self._documents_with[gram] <= self.boilerplate_documents for gram in found.tolist())

    def observe(self, text: str) -> bool:
        """Count this training document's protected n-grams. True if it has any, boilerplate or not."""
        found = hits(text, self.protected(), self._hasher)
        self.count(found)
        return bool(len(found))
