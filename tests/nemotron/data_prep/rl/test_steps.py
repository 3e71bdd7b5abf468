"""The steps that fill in placeholders, one at a time: what a table's records become as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.rl.gym_records import problem_of
from nemotron.data_prep.rl.steps import PromptsJob, ReadCounts, read_shard
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import whole
from nemotron.data_prep.sources.reading import Reading
from nemotron.data_prep.work.shards import Shard, ShardOutput


def read(
    folder: Path, records: list[dict[str, Any]], on_error: Literal["stop", "skip"]
) -> tuple[ReadCounts, list[Any]]:
    """What `read_shard` returns and writes of records in Parquet."""
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    [file] = list_files([str(folder / "a.parquet")])
    job = PromptsJob({}, Reading(on_error, required=()), True, folder, folder)
    counts = read_shard(Shard("00000", whole(file)), job, ShardOutput(folder, folder))
    return counts, [json.loads(line) for line in (folder / "00000.jsonl").read_text().splitlines()]


def test_messages_and_calls_in_one_column_are_told_apart(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "1+1?"}, {"type": "function_call", "name": "add", "call_id": "1"}]
    record = {"responses_create_params": {"input": items}, "agent_ref": {"name": "x"}}
    _, [(_, written)] = read(tmp_path, [record], "stop")
    assert written == record and problem_of(written) is None


def test_a_record_with_bytes_in_it_is_left_out_or_stops(tmp_path: Path) -> None:
    records = [{"prompt": "What is it?", "images": [{"bytes": b"\x89PNG"}]}, {"prompt": "1+1?", "images": []}]
    counts, written = read(tmp_path, records, "skip")
    assert written == [[1, {"prompt": "1+1?", "images": []}]]
    assert counts.report.records == 1 and counts.report.skipped == {"value that is no JSON": 1}
    assert counts.report.samples[0]["where"] == f"{tmp_path}/a.parquet:1"
    with pytest.raises(UserError, match=r"a\.parquet:1: value that is no JSON: Object of type bytes is not JSON"):
        read(tmp_path, records, "stop")
