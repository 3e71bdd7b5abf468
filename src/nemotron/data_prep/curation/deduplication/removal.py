"""The last pass of exact and fuzzy deduplication: write the documents that stay, and say beside what they stayed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemotron.data_prep.curation.deduplication.columns import Columns, load_array, save_whole
from nemotron.data_prep.curation.step import (
    DocumentShard,
    DocumentWriter,
    StepTable,
    collect,
    output_name,
    plan_step,
    read_documents,
)
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.shards import ShardOutput

DUPLICATES = "duplicates.npy"


@dataclass(frozen=True)
class _Removal:
    """What a task knows besides its shard."""

    columns: Columns
    reason: str


def first_of_groups(groups: NDArray[Any], *ranks: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every member of every group the group's first one: (members, first of each), as indices.

    `groups`: equal values, one group. `ranks`: the smallest is first, by the first array, then the next, and so on.
    """
    order = np.lexsort((*reversed(ranks), groups))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = groups[order][1:] != groups[order][:-1]
    firsts = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return order, firsts


def remove_duplicates(
    files: Sequence[Path],
    settings: Mapping[str, Any],
    work_dir: Path,
    columns: Columns,
    losers: NDArray[np.int64],
    keepers: NDArray[np.int64],
    reason: str,
    engine: Engine,
) -> StepTable:
    """Write all documents but the losers to `work_dir`, a task a shard; returns the table of the step.

    Args:
        losers: positions of the documents that go; keepers: of each of them, the position of the one that stays.
        reason: of the drop, in the table. The details of the samples name the one that stayed, and how it begins.
    """
    order = np.argsort(losers)
    pairs = np.stack([losers[order], keepers[order]]).astype(np.int64)
    save_whole(columns.folder / DUPLICATES, pairs)
    digest = hashlib.sha256(pairs.tobytes()).hexdigest()
    plan = plan_step(files, {**settings, "duplicates": digest})
    return collect(plan, work_dir, _remove, _Removal(columns, reason), engine)


def _remove(shard: DocumentShard, job: _Removal, output: ShardOutput) -> StepTable:
    columns = job.columns
    pairs = load_array(columns.folder / DUPLICATES)
    first = int(columns.bounds[columns.shards.index(shard.name)])
    begin, end = np.searchsorted(pairs[0], [first, first + columns.counts[shard.name]])
    twin_of = dict(zip((pairs[0, begin:end] - first).tolist(), pairs[1, begin:end].tolist(), strict=True))
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for row, document in enumerate(read_documents(shard.work)):
            table.read.add(document)
            twin = twin_of.get(row)
            if twin is None:
                table.keep(document)
                writer.write(document)
            else:
                table.drop(document, job.reason, f"stays: {columns.text('ids', twin)}: {columns.text('heads', twin)}")
    return table
