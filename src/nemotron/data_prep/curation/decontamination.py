"""Find text that training must not see: word n-grams shared with the evaluation sets or with the held-out split.

The rule is that of Brown et al. 2020 (arXiv 2005.14165, appendix C): 13-grams of lower-cased words without punctuation;
an n-gram found in more than ten training documents is boilerplate (a licence header, the template of a generated task)
and says nothing about leakage. Protected texts shorter than 13 words are protected as one gram of their own length.

How many documents hold an n-gram is only known once all of them were read. So the step takes two passes: `hit_shard`
writes down the hits of every document (`hits/SHARD.json`, place in the shard -> hashes), `leaks_of` tells leaks from
boilerplate over all shards, and `drop_shard` writes the documents that hold no leak.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from nemotron.data_prep.curation.step import DocumentShard, DocumentWriter, StepTable, output_name, read_documents
from nemotron.data_prep.work.shards import Plan, ShardOutput

REASON = "overlaps evaluation text"
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
    shared = [np.empty(0, dtype=np.uint64)]
    for length, known in protected.items():
        grams = hasher.grams(hashes, length)
        places = np.searchsorted(known[:-1], grams)  # always a valid index: the last one has no successor
        shared.append(np.unique(grams[known[places] == grams]))
    return np.concatenate(shared)


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

    def count(self, hashes: np.ndarray) -> None:
        """Count the `hits` of one training document."""
        self._documents_with.update(hashes.tolist())

    def is_leak(self, hashes: np.ndarray) -> bool:
        """Whether one of these hits is shared by at most `boilerplate_documents` of the counted documents."""
        return any(self._documents_with[gram] <= self.boilerplate_documents for gram in hashes.tolist())

    def observe(self, text: str) -> bool:
        """Count this training document's protected n-grams. True if it has any, boilerplate or not."""
        hashes = hits(text, self.protected(), self._hasher)
        self.count(hashes)
        return bool(len(hashes))


# --- The step's two passes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaks:
    """What the second pass needs. `grams`: the hashes that are no boilerplate; `lengths`: of protected n-grams."""

    grams: frozenset[int]
    lengths: tuple[int, ...]
    folder: Path


def hit_shard(shard: DocumentShard, protected: Mapping[int, np.ndarray], output: ShardOutput) -> StepTable:
    """A task of the first pass: the protected n-grams in each document of a shard that has any.

    What is held out (`split: valid`) is not trained on and may have them.
    """
    hasher = _hasher()
    hits_by_place: dict[str, list[int]] = {}
    table = StepTable()
    for place, document in enumerate(read_documents(shard.work)):
        table.read.add(document)
        if document.get("split") == "valid":
            continue
        if len(hit := hits(document["text"], protected, hasher)):
            hits_by_place[str(place)] = [int(gram) for gram in hit]
    output.path(_hits_name(shard.name)).write_text(json.dumps(hits_by_place) + "\n", encoding="utf-8")
    return table


def leaks_of(plan: Plan[Path], folder: Path, decontaminator: Decontaminator) -> Leaks:
    """Tell leaks from boilerplate, over all shards."""
    seen: set[int] = set()
    for shard in plan.shards:
        for hit in _read_hits(folder, shard.name).values():
            decontaminator.count(np.array(hit, dtype=np.uint64))
            seen.update(hit)
    grams = {gram for gram in seen if decontaminator.is_leak(np.array([gram], dtype=np.uint64))}
    return Leaks(frozenset(grams), tuple(decontaminator.protected()), folder)


def drop_shard(shard: DocumentShard, leaks: Leaks, output: ShardOutput) -> StepTable:
    """A task of the second pass: the documents that hold no protected n-gram, boilerplate aside."""
    suspects = _read_hits(leaks.folder, shard.name)
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for place, document in enumerate(read_documents(shard.work)):
            table.read.add(document)
            guilty = leaks.grams.intersection(suspects.get(str(place), ()))
            if guilty:
                table.drop(document, REASON, _passage(document["text"], leaks.lengths, guilty))
            else:
                table.keep(document, ["only boilerplate in common"] if str(place) in suspects else ())
                writer.write(document)
    return table


def _passage(text: str, lengths: tuple[int, ...], guilty: frozenset[int]) -> str:
    """The first run of words that is shared with a protected text."""
    tokens, hashes = words(text), _hasher().word_hashes(text)
    for length in lengths:
        for place, gram in enumerate(GramHasher.grams(hashes, length).tolist()):
            if gram in guilty:
                return " ".join(tokens[place : place + length])
    return ""


def _read_hits(folder: Path, shard: str) -> dict[str, list[int]]:
    hits_by_place: dict[str, list[int]] = json.loads((folder / _hits_name(shard)).read_text(encoding="utf-8"))
    return hits_by_place


def _hits_name(shard: str) -> str:
    return f"hits/{shard}.json"


@cache
def _hasher() -> GramHasher:
    return GramHasher()  # its cache of word hashes lasts as long as the process
