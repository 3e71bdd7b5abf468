"""Tasks that turn a blend of RL prompts with placeholders into whole records: read, fetch, resolve.

`read_shard` brings a piece of the blend here and notes which rows of other collections it points to; `fetch_shard`
brings those rows of one collection; `resolve_shard` fills them in and checks every record. Between them lie files in
the work folder, so that nothing is asked of the Hub twice and a run that was killed goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.data_prep.rl.gym_records import agent_of, problem_of, prompt_key, question_key
from nemotron.data_prep.rl.placeholders import Reference, is_placeholder, pointer_of, resolve_placeholders
from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.pieces import pieces_of
from nemotron.data_prep.sources.reader import read_piece, row_id, where
from nemotron.data_prep.sources.reading import Reading, ReadReport, Row
from nemotron.data_prep.work.shards import Json, Shard, ShardOutput

RECORDS, KEYS = "{}.jsonl", "{}.keys.jsonl"
_COLUMNS = ("prompt", "reward_model")
_PIECE_BYTES = 64 << 20  # of a collection, read at a time


@dataclass(frozen=True, slots=True)
class BlendJob:
    """What every task knows. `read_dir`, `fetched_dir`: where the tasks before wrote."""

    references: Mapping[str, Reference]
    reading: Reading
    check_fields: bool
    read_dir: Path
    fetched_dir: Path


def read_shard(shard: Shard, job: BlendJob, output: ShardOutput) -> dict[str, Json]:
    """A piece of the blend -> lines `[index, record]`. Counts: what was read, and the rows that it points to.

    UserError: a record that cannot be read, or a placeholder that points nowhere, under `stop`.
    """
    piece = Piece.from_json(shard.work["piece"])
    report = ReadReport()
    rows: dict[str, set[int]] = {}
    with output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as file:
        for row in read_piece(piece, job.reading, report):
            if is_placeholder(row.value):
                pointer = pointer_of(row.value, job.references)
                if not isinstance(pointer, str):
                    rows.setdefault(job.references[pointer[0]].location, set()).add(pointer[1])
                elif job.reading.on_error == "stop":  # now, not when everything has been fetched
                    name = row.value.get("dataset")
                    hint = did_you_mean(str(name), job.references, "known") if name not in job.references else None
                    raise UserError(f"{where(piece, row.index)}: {pointer}", hint)
            file.write(json.dumps([row.index, row.value], ensure_ascii=False) + "\n")
    needed = {location: sorted(numbers) for location, numbers in sorted(rows.items())}
    return {"report": report.to_json(), "rows": needed, "input_bytes": piece.size}


def fetch_shard(shard: Shard, job: BlendJob, output: ShardOutput) -> dict[str, Json]:
    """The rows of a collection that are pointed to -> lines `ROW<tab>JSON`; it is read up to the last of them."""
    wanted = set(shard.work["rows"])
    files = [SourceFile.from_json(file) for file in shard.work["files"]]
    # Nothing is skipped: a row's number is its place.
    reading = Reading(columns={name: name for name in _COLUMNS}, required=())
    pieces = chain.from_iterable(pieces_of(file, _PIECE_BYTES) for file in files)
    rows = chain.from_iterable(read_piece(piece, reading, ReadReport()) for piece in pieces)
    found = 0
    with output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows):
            if number in wanted:
                file.write(f"{number}\t{json.dumps(row.value, ensure_ascii=False)}\n")
                found += 1
                if found == len(wanted):
                    break
    return {"found": found, "wanted": len(wanted)}


def resolve_shard(shard: Shard, job: BlendJob, output: ShardOutput) -> dict[str, Json]:
    """What `read_shard` wrote of a piece -> records, one a line, and beside each `[agent, prompt key, question key]`.

    UserError: a placeholder that cannot be filled in, or a record that lacks what Gym asks for, under `stop`.
    """
    piece = Piece.from_json(shard.work["piece"])
    stop = job.reading.on_error == "stop"
    report = ReadReport()
    environments: Counter[str] = Counter()

    def place(index: int) -> str:
        return where(piece, index) if stop else row_id(piece, index)

    def read(location: str) -> Iterable[Mapping[str, Any]]:
        return _fetched(job.fetched_dir / shard.work["fetched"][location], set(shard.work["rows"][location]))

    rows = resolve_placeholders(
        _SavedRows(job.read_dir / RECORDS.format(shard.name)),
        job.references,
        report=report,
        where=place,
        on_error=job.reading.on_error,
        read=read,
    )
    with (
        output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as records,
        output.path(KEYS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as keys,
    ):
        for row in rows:
            problem = problem_of(row.value, check_fields=job.check_fields)
            if problem is not None:
                reason, detail = problem
                if stop:
                    raise UserError(f"{place(row.index)}: {detail}", "on_error=skip leaves such records out")
                report.skip(reason, place(row.index), detail)
                continue
            agent = agent_of(row.value)
            assert agent is not None
            environments[agent] += 1
            records.write(json.dumps(row.value, ensure_ascii=False) + "\n")
            keys.write(json.dumps([agent, prompt_key(row.value), question_key(row.value)], ensure_ascii=False) + "\n")
    report.records = environments.total()
    return {"report": report.to_json(), "environments": dict(sorted(environments.items())), "input_bytes": piece.size}


class _SavedRows:
    """The rows that `read_shard` wrote, to be gone through any number of times."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Row]:
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                yield Row(*json.loads(line))


def _fetched(path: Path, wanted: set[int]) -> Iterator[Mapping[str, Any]]:
    """The rows of a collection from its first on; those that nobody asks for are empty."""
    position = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            number, _, text = line.partition("\t")
            if int(number) in wanted:
                yield from repeat({}, int(number) - position)
                yield json.loads(text)
                position = int(number) + 1
