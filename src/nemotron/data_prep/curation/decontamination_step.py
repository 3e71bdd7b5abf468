"""The tasks of the decontamination step: look for protected n-grams in every shard; then, boilerplate known, drop.

An n-gram that many documents hold is boilerplate and says nothing (see `decontamination.py`), and how many hold it is
only known once all shards were read. So the first pass writes down the hits (`hits/SHARD.json`, document -> hashes),
and the second one drops.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nemotron.data_prep.curation.decontamination import Decontaminator, GramHasher, hits, words
from nemotron.data_prep.curation.step import DocumentWriter, StepTable, output_name, read_documents
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput

REASON = "overlaps evaluation text"


@dataclass(frozen=True, slots=True)
class Leaks:
    """What the second pass needs. `grams`: the hashes that are no boilerplate; `lengths`: of protected n-grams."""

    grams: frozenset[int]
    lengths: tuple[int, ...]
    folder: Path


def hit_shard(shard: Shard, protected: Mapping[int, np.ndarray], output: ShardOutput) -> dict[str, Any]:
    """A task of the first pass: the protected n-grams in each document of a shard that has any."""
    hasher = _hasher()
    found: dict[str, list[int]] = {}
    table = StepTable()
    for place, document in enumerate(read_documents(Path(shard.work["path"]))):
        table.read.add(document)
        if len(hit := hits(document["text"], protected, hasher)):
            found[str(place)] = [int(gram) for gram in hit]
    output.path(_hits_name(shard.name)).write_text(json.dumps(found) + "\n", encoding="utf-8")
    return {"table": table.to_json()}


def leaks_of(plan: Plan, folder: Path, decontaminator: Decontaminator) -> Leaks:
    """Tell leaks from boilerplate, over all shards."""
    seen: set[int] = set()
    for shard in plan.shards:
        for hit in _read_hits(folder, shard.name).values():
            decontaminator.count(np.array(hit, dtype=np.uint64))
            seen.update(hit)
    grams = {gram for gram in seen if decontaminator.is_leak(np.array([gram], dtype=np.uint64))}
    return Leaks(frozenset(grams), tuple(decontaminator.protected()), folder)


def drop_shard(shard: Shard, leaks: Leaks, output: ShardOutput) -> dict[str, Any]:
    """A task of the second pass: the documents that hold no protected n-gram, boilerplate aside."""
    suspects = _read_hits(leaks.folder, shard.name)
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for place, document in enumerate(read_documents(Path(shard.work["path"]))):
            table.read.add(document)
            guilty = leaks.grams.intersection(suspects.get(str(place), ()))
            if guilty:
                table.drop(document, REASON, _passage(document["text"], leaks.lengths, guilty))
            else:
                table.keep(document, ["only boilerplate in common"] if str(place) in suspects else ())
                writer.write(document)
    return {"table": table.to_json()}


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
