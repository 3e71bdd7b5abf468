"""Find text that training must not see: word n-grams shared with the evaluation sets or with the held-out split.

The rule is that of Brown et al. 2020 (arXiv 2005.14165, appendix C): 13-grams of lower-cased words without punctuation;
an n-gram found in more than ten training documents is boilerplate (a licence header, the template of a generated task)
and says nothing about leakage. Protected texts shorter than 13 words are protected as one gram of their own length.

How many documents hold an n-gram is only known once all of them were read. So the step takes two passes: `hit_shard`
writes down the hits of every document (`hits/SHARD.json`, place in the shard -> hashes), `leaks_of` tells leaks from
boilerplate over all shards, and `drop_shard` writes the documents that hold no leak. The protected n-grams of a large
corpus are gigabytes: the tasks map the files that `save_grams` writes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from nemotron.data_prep.curation.deduplication.columns import load_array, save_whole
from nemotron.data_prep.curation.deduplication.text_hashes import NO_SPACES, window_polynomials
from nemotron.data_prep.curation.step import DocumentShard, DocumentWriter, StepTable, output_name, read_documents
from nemotron.data_prep.work.shards import Plan, ShardOutput

REASON = "overlaps evaluation or held-out text"
MIN_WORDS = 5
# Of a script without spaces each character, else a question in Chinese would be one or two words.
_SINGLE = "".join(f"{chr(first)}-{chr(last)}" for first, last in NO_SPACES)
# Vowel signs (हिन्दी, العَرَبِيَّة) are no letters by `\w`, and would cut words there.
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x10000)) if unicodedata.category(mark)[0] == "M")
WORD = re.compile(rf"(?=\w)[{_SINGLE}]|[^\W{_SINGLE}]+(?:[{_MARKS}]+[^\W{_SINGLE}]*)*")


def words(text: str) -> list[str]:
    """Lower-cased words and numbers; punctuation, layout and how accents are encoded do not count."""
    return WORD.findall((text if text.isascii() else unicodedata.normalize("NFC", text)).lower())


_word_hashes: dict[str, int] = {}  # lasts as long as the process
_MAX_CACHED_WORDS = 1_000_000


def word_hashes(text: str) -> np.ndarray:
    """uint64 hash of each word of `text`, in order."""
    if len(_word_hashes) > _MAX_CACHED_WORDS:
        _word_hashes.clear()
    hashes = []
    for word in words(text):
        value = _word_hashes.get(word)
        if value is None:
            value = _word_hashes[word] = xxhash.xxh3_64_intdigest(word.encode())
        hashes.append(value)
    return np.array(hashes, dtype=np.uint64)


def protect(texts: Iterable[str], n: int = 13) -> dict[int, np.ndarray]:
    """The protected grams of texts that training must not contain: gram length -> sorted unique uint64 hashes.

    Texts of fewer than `MIN_WORDS` words are too short to mean anything and are ignored.
    """
    grams: dict[int, list[np.ndarray]] = {}
    for text in texts:
        hashes = word_hashes(text)
        if len(hashes) >= MIN_WORDS:
            length = min(n, len(hashes))
            grams.setdefault(length, []).append(window_polynomials(hashes, length))
    return {length: np.unique(np.concatenate(arrays)) for length, arrays in grams.items()}


def hits(text: str, protected: Mapping[int, np.ndarray]) -> np.ndarray:
    """Hashes of the protected grams that a text holds. `protected`: as `protect` returns it."""
    hashes = word_hashes(text)
    shared = [np.empty(0, dtype=np.uint64)]
    for length, known in protected.items():
        grams = window_polynomials(hashes, length)
        places = np.searchsorted(known[:-1], grams)  # always a valid index: the last one has no successor
        shared.append(np.unique(grams[known[places] == grams]))
    return np.concatenate(shared)


def save_grams(protected: Mapping[int, np.ndarray], folder: Path) -> dict[int, Path]:
    """Write what `protect` returned to `folder`: gram length -> its file, which the tasks of `hit_shard` map."""
    files = {length: folder / f"{length}.npy" for length in protected}
    folder.mkdir(parents=True, exist_ok=True)
    for length, grams in protected.items():
        save_whole(files[length], grams)
    return files


# --- The step's two passes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaks:
    """What the second pass needs. `grams`: the hashes that are no boilerplate; `lengths`: of protected n-grams."""

    grams: frozenset[int]
    lengths: tuple[int, ...]
    folder: Path


def hit_shard(shard: DocumentShard, grams: Mapping[int, Path], output: ShardOutput) -> StepTable:
    """A task of the first pass: the protected n-grams (`grams`, of `save_grams`) in each document that has any.

    What is held out (`split: valid`) is not trained on and may have them.
    """
    protected = {length: load_array(path) for length, path in grams.items()}
    hits_by_place: dict[str, list[int]] = {}
    table = StepTable()
    for place, document in enumerate(read_documents(shard.work)):
        table.read.add(document)
        if document.get("split") == "valid":
            continue
        if len(hit := hits(document["text"], protected)):
            hits_by_place[str(place)] = [int(gram) for gram in hit]
    output.path(_hits_name(shard.name)).write_text(json.dumps(hits_by_place) + "\n", encoding="utf-8")
    return table


def leaks_of(
    plan: Plan[Path],
    folder: Path,
    protected: Mapping[int, np.ndarray],
    boilerplate_documents: int = 10,
    never_boilerplate: Iterable[str] = (),
) -> Leaks:
    """Tell leaks from boilerplate, which more than `boilerplate_documents` documents hold, over all shards.

    never_boilerplate: protected texts whose grams are leaks however many documents hold them.
    """
    documents_with: Counter[int] = Counter()
    for shard in plan.shards:
        for hit in _read_hits(folder, shard.name).values():
            documents_with.update(hit)
    grams = {gram for gram, count in documents_with.items() if count <= boilerplate_documents}
    for text in never_boilerplate:
        grams.update(hits(text, protected).tolist())
    return Leaks(frozenset(grams), tuple(protected), folder)


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
    tokens, hashes = words(text), word_hashes(text)
    for length in lengths:
        for place, gram in enumerate(window_polynomials(hashes, length).tolist()):
            if gram in guilty:
                return " ".join(tokens[place : place + length])
    return ""


def _read_hits(folder: Path, shard: str) -> dict[str, list[int]]:
    hits_by_place: dict[str, list[int]] = json.loads((folder / _hits_name(shard)).read_text(encoding="utf-8"))
    return hits_by_place


def _hits_name(shard: str) -> str:
    return f"hits/{shard}.json"
