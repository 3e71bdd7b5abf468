"""Exact deduplication: of documents with equal text one stays.

Two passes over the shards: tasks hash the texts, the driver sorts the hashes, tasks write what stays. Texts are equal
if their 128-bit BLAKE2b hashes are; that two different ones are taken for equal has, for a billion documents, a
probability of 2**-69. The one that stays is held out (`split: valid`), if one is; of several such, it has the smallest
64-bit hash of its id: a choice that favours no source and no date, and that does not depend on the order in which
documents come.

The driver needs 17 bytes of memory a document (half of its hash, twice, and a mark); once these are free again,
some 125 for every document that has a twin.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.errors import RunFailed
from nemotron.data_prep.curation.deduplication.columns import Columns, Names, Rows, save_array, write_columns
from nemotron.data_prep.curation.deduplication.removal import first_of_groups, remove_duplicates
from nemotron.data_prep.curation.step import DocumentShard, StepTable, plan_step, read_documents
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.shards import ShardOutput

Normalisation = Literal["none", "whitespace"]
REASON = "exact duplicate"
_CHUNK = 1 << 18  # documents looked up at once


def normalise(text: str, normalisation: Normalisation) -> str:
    """The text whose equality counts. `whitespace`: NFC, every run of whitespace one space, none at the ends."""
    if normalisation == "none":
        return text
    return " ".join(unicodedata.normalize("NFC", text).split())


def text_hash(text: str, normalisation: Normalisation) -> bytes:
    """16 bytes for a text."""
    data = normalise(text, normalisation).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def deduplicate(files: Sequence[Path], normalisation: Normalisation, work_dir: Path, engine: Engine) -> StepTable:
    """Write the documents of `files` without duplicates to `work_dir`; returns the table of what went.

    Raises:
        RunFailed: two documents with the same id have the same text.
        UserError: a file is no document shard, or has changed since the run began.
    """
    settings = {"step": "exact_dedup", "normalisation": normalisation}
    columns = hash_documents(files, settings, work_dir / "hashes", normalisation, engine)
    losers, keepers = find_duplicates(columns)
    return remove_duplicates(files, settings, work_dir, columns, losers, keepers, REASON, engine)


def hash_documents(
    files: Sequence[Path], settings: Mapping[str, Any], folder: Path, normalisation: Normalisation, engine: Engine
) -> Columns:
    """The first pass: columns `high` and `low`, halves of the text's hash, and those of `Names`."""
    plan = plan_step(files, {**settings, "pass": "hashes"})
    receipts = write_columns(plan, folder, _hash, normalisation, engine)
    return Columns(folder, {receipt.shard: receipt.counts.rows for receipt in receipts})


def _hash(shard: DocumentShard, normalisation: Normalisation, output: ShardOutput) -> Rows:
    names, hashes = Names(), bytearray()
    for document in read_documents(shard.work):
        names.add(document)
        hashes += text_hash(document["text"], normalisation)
    names.save(output, shard.name)
    halves = np.frombuffer(bytes(hashes), dtype="<u8").reshape(-1, 2)
    save_array(output, f"{shard.name}.high", np.ascontiguousarray(halves[:, 0]))
    save_array(output, f"{shard.name}.low", np.ascontiguousarray(halves[:, 1]))
    return Rows(len(halves))


def find_duplicates(columns: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the documents that go, and for each of them that of the one that stays."""
    high = columns.whole("high")
    ordered = np.sort(high)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(twice):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    suspects = []
    for begin in range(0, len(high), _CHUNK):
        chunk = high[begin : begin + _CHUNK]
        places = np.minimum(np.searchsorted(twice, chunk), len(twice) - 1)
        suspects.append(begin + np.flatnonzero(twice[places] == chunk))
    del high, chunk
    positions = np.concatenate(suspects)
    high, low, ranks, keys = (columns.gather(name, positions) for name in ("high", "low", "ranks", "keys"))
    groups = np.unique(np.stack([high, low], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    members, firsts = first_of_groups(groups, ranks, keys)
    goes = members != firsts
    same = goes & (keys[members] == keys[firsts])
    if same.any():
        check_ids(columns, positions[members[same][0]], positions[firsts[same][0]])
    return positions[members[goes]], positions[firsts[goes]]


def check_ids(columns: Columns, one: int, other: int) -> None:
    """Refuse two documents that nothing tells apart. RunFailed."""
    ids = columns.text("ids", one), columns.text("ids", other)
    if ids[0] == ids[1]:
        raise RunFailed(f"two documents have the id {ids[0]!r}", "ids tell which of two duplicates stays")
    raise RunFailed(f"the ids {ids[0]!r} and {ids[1]!r} have one hash", "rename one of the documents")
