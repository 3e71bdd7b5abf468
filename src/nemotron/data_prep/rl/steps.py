"""The three steps that turn RL prompts with placeholders into whole records: read, fetch, resolve.

`read_shard` brings a piece of the prompts here and notes which rows of other collections it points to; `fetch_shard`
brings those rows of one collection; `resolve_shard` fills them in and checks every record. Between them lie files in
the work folder, so that nothing is asked of the Hub twice and a run that was killed goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.data_prep.rl.gym_records import agent_of, problem_of, prompt_key, question_key
from nemotron.data_prep.rl.placeholders import UNRESOLVED, Reference, fill, is_placeholder, pointer_of
from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.reader import pieces_of, read_piece, reject, row_id, where
from nemotron.data_prep.sources.reading import Reading, ReadReport, Row
from nemotron.data_prep.work.shards import Shard, ShardOutput

RECORDS, KEYS = "{}.jsonl", "{}.keys.jsonl"
NO_JSON = "value that is no JSON"
_COLUMNS = ("prompt", "reward_model")
_PIECE_BYTES = 64 << 20  # of a collection, read at a time


@dataclass(frozen=True, slots=True)
class PromptsJob:
    """What every task knows. `read_dir`, `fetched_dir`: where the tasks before wrote."""

    references: Mapping[str, Reference]
    reading: Reading
    check_fields: bool
    read_dir: Path
    fetched_dir: Path


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What `read_shard` returns. `rows`: location of a collection -> the rows of it that are pointed to, sorted."""

    report: ReadReport
    rows: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class FetchWork:
    """A collection, and the rows of it that are pointed to, sorted."""

    files: Sequence[SourceFile]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """How many rows were asked for, and how many of them the collection has."""

    num_wanted: int
    num_present: int


@dataclass(frozen=True, slots=True)
class ResolveWork:
    """A piece of the prompts. `rows`: as in `ReadCounts`; `fetched`: location -> the file that holds them."""

    piece: Piece
    rows: Mapping[str, Sequence[int]]
    fetched: Mapping[str, str]


def read_shard(shard: Shard[Piece], job: PromptsJob, output: ShardOutput) -> ReadCounts:
    """A piece of the prompts -> lines `[index, record]`.

    UserError: a record that cannot be read, or a placeholder that points nowhere, under `stop`.
    """
    piece = shard.work
    report = ReadReport()
    rows: dict[str, set[int]] = {}
    with output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as file:
        for row in read_piece(piece, job.reading, report):
            if is_placeholder(row.value):
                try:
                    name, number = pointer_of(row.value, job.references)
                    rows.setdefault(job.references[name].location, set()).add(number)
                except UserError as error:
                    if job.reading.on_error == "stop":  # now, not when everything has been fetched
                        raise UserError(f"{where(piece, row.index)}: {error.message}", error.hint) from error
            try:
                line = json.dumps([row.index, row.value], ensure_ascii=False)
            except TypeError as error:  # bytes, as of an image
                if job.reading.on_error == "stop":
                    hint = "on_error=skip leaves such records out"
                    raise UserError(f"{where(piece, row.index)}: {NO_JSON}: {error}", hint) from None
                reject(piece, row.index, report, NO_JSON, str(error))
                continue
            file.write(f"{line}\n")
    needed = {location: sorted(numbers) for location, numbers in sorted(rows.items())}
    return ReadCounts(report, needed)


def fetch_shard(shard: Shard[FetchWork], job: PromptsJob, output: ShardOutput) -> FetchCounts:
    """The rows of a collection that are pointed to -> lines `ROW<tab>JSON`; it is read up to the last of them."""
    wanted = set(shard.work.rows)
    # Nothing is skipped: a row's number is its place.
    reading = Reading(columns={name: name for name in _COLUMNS}, required=())
    pieces = chain.from_iterable(pieces_of(file, _PIECE_BYTES) for file in shard.work.files)
    rows = chain.from_iterable(read_piece(piece, reading, ReadReport()) for piece in pieces)
    num_present = 0
    with output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows):
            if number in wanted:
                file.write(f"{number}\t{json.dumps(row.value, ensure_ascii=False)}\n")
                num_present += 1
                if num_present == len(wanted):
                    break
    return FetchCounts(len(wanted), num_present)


def resolve_shard(shard: Shard[ResolveWork], job: PromptsJob, output: ShardOutput) -> ReadReport:
    """What `read_shard` wrote of a piece -> records, one a line, and beside each `[agent, prompt key, question key]`.

    UserError: a placeholder that cannot be filled in, or a record that lacks what Gym asks for, under `stop`.
    """
    piece, stop = shard.work.piece, job.reading.on_error == "stop"
    report = ReadReport()
    fetched = {
        location: _fetched_rows(job.fetched_dir / shard.work.fetched[location], set(numbers))
        for location, numbers in shard.work.rows.items()
    }
    with (
        output.path(RECORDS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as records,
        output.path(KEYS.format(shard.name)).open("w", encoding="utf-8", newline="\n") as keys,
    ):
        for row in _read_rows(job.read_dir / RECORDS.format(shard.name)):
            record, problem = row.value, None
            hint: str | None = "on_error=skip leaves such records out"
            if is_placeholder(record):
                try:
                    record = fill(record, job.references, fetched)
                except UserError as error:
                    problem, hint = (UNRESOLVED, error.message), error.hint
            problem = problem or problem_of(record, check_fields=job.check_fields)
            if problem is None:
                agent = agent_of(record)
                assert agent is not None
                report.records += 1
                records.write(json.dumps(record, ensure_ascii=False) + "\n")
                keys.write(json.dumps([agent, prompt_key(record), question_key(record)], ensure_ascii=False) + "\n")
            elif stop:
                raise UserError(f"{where(piece, row.index)}: {problem[1]}", hint)
            else:
                report.skip(problem[0], row_id(piece, row.index), problem[1])
    return report


def _read_rows(path: Path) -> Iterator[Row]:
    """The rows that `read_shard` wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Row(*json.loads(line))


def _fetched_rows(path: Path, wanted: set[int]) -> dict[int, Mapping[str, Any]]:
    """Number -> row, of those that `fetch_shard` wrote, as far as this piece points to them."""
    rows = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            number, _, text = line.partition("\t")
            if int(number) in wanted:
                rows[int(number)] = json.loads(text)
    return rows
