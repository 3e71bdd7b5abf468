"""Texts to token ids, exactly as one call of the tokenizer for each text would, fast and in bounded memory.

The tokenizer takes some 120 bytes of memory a character while it encodes. A long text is therefore encoded in windows
that overlap; where two of them agree, they are joined. See `Encoder.encode_long`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemotron.kit.tokenizer import read_tokenizer

LONG_CHARS = 2**19  # a text beyond this is encoded in windows
# Window and overlap in characters, and what is tried where the first two windows do not agree. The last one holds most
# texts whole, in some 500 MB; in a longer one no word may be longer than half its overlap.
WINDOWS = ((2**18, 2**14), (2**20, 2**18), (2**22, 2**20))
# Words whose merges the BPE model remembers. Its own limit, 10,000, is full after a few megabytes, and what is full
# takes in nothing more. Some 100 bytes a word.
_CACHED_WORDS = 250_000


@lru_cache(maxsize=1)
def plain_tokenizer(text: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` for running text; the last one is kept, also for workers that are forked.

    Special tokens that stand in a text are spelled out. UserError if it cannot be read.
    """
    tokenizer = read_tokenizer(text)
    tokenizer.encode_special_tokens = True
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(_CACHED_WORDS)
    return tokenizer


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included; ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


class Encoder:
    """Encodes texts with the ids that are to stand before and after each (None: nothing)."""

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None = None, eos_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._begin = np.array([] if bos_id is None else [bos_id], np.int32)
        self._end = np.array([] if eos_id is None else [eos_id], np.int32)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of all texts one after another, and how many are each text's."""
        arrays = []
        lengths = np.empty(len(texts), np.int64)
        around = len(self._begin) + len(self._end)
        for i, encoding in enumerate(self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)):
            ids = np.array(encoding.ids, np.int32)
            lengths[i] = len(ids) + around
            arrays += [self._begin, ids, self._end]
        return np.concatenate(arrays) if arrays else np.empty(0, np.int32), lengths

    def encode_long(
        self, text: str, windows: Sequence[tuple[int, int]] = WINDOWS
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
        """As `encode` of one text, in memory for one window.

        Two windows are joined at a word's beginning in the middle of their overlap, and only if both have the same
        tokens at the same places all through the middle half of it: so far from the windows' ends neither what was cut
        off nor what a tokenizer puts before a text has an influence. (A tokenizer that knows no words is joined between
        two tokens.) None where they do not agree: the text has a word about as long as the overlap, a run of one
        letter, say.

        Args:
            windows: (characters of a window, of the overlap), tried one after another.
        """
        for window, overlap in windows:
            ids = self._in_windows(text, window, overlap)
            if ids is not None:
                whole = np.concatenate([self._begin, ids, self._end])
                return whole, np.array([len(whole)])
        return None

    def _in_windows(self, text: str, window: int, overlap: int) -> NDArray[np.int32] | None:
        parts: list[NDArray[np.int32]] = []
        current = self._window(text, 0, window)
        first = 0  # token of `current` that has not been taken yet
        while current.end < len(text):
            following = self._window(text, current.end - overlap, window)
            low, high = current.end - overlap * 3 // 4, current.end - overlap // 4
            tail, head = current.between(low, high), following.between(low, high)
            joint = current.agrees(tail, following, head)
            if joint is None:
                return None
            parts.append(current.ids[first : tail.start + joint])
            current, first = following, head.start + joint
        parts.append(current.ids[first:])
        return np.concatenate(parts)

    def _window(self, text: str, begin: int, size: int) -> _Window:
        encoding = self._tokenizer.encode(text[begin : begin + size], add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        if self._tokenizer.pre_tokenizer is None:
            words = np.arange(len(words))
        ids = np.array(encoding.ids, np.int32)
        return _Window(min(begin + size, len(text)), ids, spans, words)


class _Window(NamedTuple):
    """The tokens of a stretch of text. `end`: where it ends; `spans`: characters of each token; `words`: its word."""

    end: int
    ids: NDArray[np.int32]
    spans: NDArray[np.int64]
    words: NDArray[np.int64]

    def between(self, low: int, high: int) -> slice:
        """The tokens that lie in the characters low to high."""
        begin = int(np.searchsorted(self.spans[:, 0], low, side="left"))
        return slice(begin, max(begin, int(np.searchsorted(self.spans[:, 1], high, side="right"))))

    def agrees(self, tail: slice, other: _Window, head: slice) -> int | None:
        """Where to join, as a number of tokens from `tail.start`; None where the two have not the same tokens."""
        if not np.array_equal(self.ids[tail], other.ids[head]) or not np.array_equal(
            self.spans[tail], other.spans[head]
        ):
            return None
        words, spans = self.words[tail], self.spans[tail]
        begins = (words[1:] != words[:-1]) & (other.words[head][1:] != other.words[head][:-1])
        # A character of several tokens, each with the whole of it for a span, is not to be cut.
        begins &= spans[1:, 0] >= spans[:-1, 1]
        places = np.flatnonzero(begins) + 1
        return int(places[np.argmin(np.abs(places - len(words) / 2))]) if len(places) else None
