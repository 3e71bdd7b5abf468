"""`inspect`: what it says of data of every kind, against what was written; what it refuses; how much it reads."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.curation.step import StepTable
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter
from nemotron.data_prep.tokens.mixture import SourceTokens, plan_mixture
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, freeze, run_shards
from nemotron.recipes.tools import inspection
from nemotron.recipes.tools.inspection import inspect, outcome, shown
from nemotron.recipes.tools.packed_rows import packed_files


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_stream(prefix: Path, lengths: list[int]) -> Path:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add_documents(np.full(length, 7), [length])
    return prefix


# --- Lengths ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200))
def test_a_histogram_counts_every_length_once(lengths: list[int]) -> None:
    found = inspection._lengths("x", "y", [np.asarray(lengths)])
    assert found is not None
    assert sum(count for _, _, count in found.bins) == len(lengths) == found.count
    for low, high, count in found.bins:
        assert count == sum(low <= length < high for length in lengths)
    assert (found.least, found.most) == (min(lengths), max(lengths))
    assert found.median == sorted(lengths)[len(lengths) // 2]
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


# --- Token streams and blends -----------------------------------------------------------------------------------------


def test_a_token_stream_by_prefix_bin_idx_or_folder(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "web_train", [1, 2, 3, 3])
    reports = [inspect(str(name)) for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path)]
    for report in reports:
        assert (report.counts["documents"], report.counts["tokens"], report.counts["bytes"]) == (4, 9, 18)
        assert report.counts["token_type"] == "uint16"
        assert report.lengths is not None
        assert report.lengths.bins == [(1, 2, 1), (2, 4, 3)]
        assert report.samples[0]["text"] == "7"
        assert "samples are token ids: no folder `tokenizer`" in report.notes[0]


def test_tokens_are_decoded_where_a_tokenizer_lies_beside(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the model reads words", "the words"] * 20, 300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", model_max_length=10, template="nano3")
    ids = tokenizer.encode("the model reads").ids
    with IndexedDatasetWriter(tmp_path / "web_train", np.uint16) as writer:
        writer.add_documents(np.array([*ids, 2]), [len(ids) + 1])
    decoded = inspect(str(tmp_path / "web_train"))
    assert (decoded.samples[0]["text"], decoded.notes) == ("the model reads</s>", [])
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")  # one that cannot be read: the ids, then
    assert inspect(str(tmp_path / "web_train")).samples[0]["text"] == " ".join(map(str, [*ids, 2]))


def test_a_blend_shows_sources_phases_and_mixture(tmp_path: Path) -> None:
    write_stream(tmp_path / "web_train", [100] * 10)
    write_stream(tmp_path / "web_valid", [50])
    write_stream(tmp_path / "books_train-00000", [200])
    write_stream(tmp_path / "books_train-00001", [100])
    none = {"valid": [], "test": []}
    sources = {
        "web": none
        | {"train": ["web_train"], "valid": ["web_valid"], "tokens": 1000, "documents": 10, "bytes": 4000}
        | {"valid_tokens": 50},
        "books": none
        | {"train": ["books_train-00000", "books_train-00001"], "tokens": 300, "documents": 2, "bytes": 900},
    }
    mixture = plan_mixture(
        {"web": SourceTokens(10, 1000), "books": SourceTokens(2, 300, repeats=4)},
        [{"name": "all", "until": 1.0, "weights": {"web": 1, "books": 1}}],
        seq_length=10,
        train_tokens=2000,
    )
    blend = {"phases": mixture.phases, "sources": sources, "vocab_size": 99, "eos_id": 2}
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    (tmp_path / "mixture.json").write_text(json.dumps(mixture.to_json()))
    report = inspect(str(tmp_path))
    assert report.kind == "blend"
    assert report.counts["train_tokens"] == 1300
    assert report.counts["train_documents"] == 12
    assert report.counts["valid_tokens"] == 50
    assert report.counts["budget"] == 2000
    assert report.counts["largest_train_tokens"] == 2400
    assert {row["source"]: row["epochs"] for row in report.tables["mixture"]} == {
        "web": 1.0,
        "books": pytest.approx(1000 / 300),
    }
    assert [(row["source"], row["weight"]) for row in report.tables["phases"]] == [("books", 0.5), ("web", 0.5)]
    assert report.lengths is not None and report.lengths.count == 13


def test_of_many_streams_all_are_counted_and_some_are_read(tmp_path: Path) -> None:
    for i in range(39):
        write_stream(tmp_path / f"web_train-{i:05}", [i + 1, 1])
    with IndexedDatasetWriter(tmp_path / "web_train-00039", np.int32) as writer:  # none of those that are read
        writer.add_documents(np.full(5, 7), [5, 0])
    report = inspect(str(tmp_path))
    assert report.read == "16 of 40 streams"
    assert report.lengths is not None and report.lengths.count == 32
    tokens = sum(range(1, 40)) + 39
    assert report.counts == {
        "streams": 40, "bytes": 2 * tokens + 4 * 5, "documents": 80, "tokens": tokens + 5,
        "token_type": "int32, uint16",
    }  # fmt: skip
    (tmp_path / "web_train-00039.idx").write_bytes(b"cut")
    with pytest.raises(UserError, match="web_train-00039: not a readable token stream"):
        inspect(str(tmp_path))


# --- Packed rows ------------------------------------------------------------------------------------------------------


def test_packed_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2, 3, 4, 5], [6, 7, 8]], pa.list_(pa.int32())),
            "loss_mask": pa.array([[0, 1, 0, 0, 1], [1, 1, 0]], pa.list_(pa.uint8())),
            "seq_start_id": pa.array([[0, 2], [0]], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=1)
    report = inspect(str(tmp_path))
    assert report.kind == "packed rows"
    assert (report.counts["rows"], report.counts["tokens_read"], report.counts["sequences_read"]) == (2, 8, 3)
    assert report.counts["share_in_loss"] == 4 / 8
    assert report.counts["filled"] == 8 / 10
    assert report.lengths is not None
    assert report.lengths.bins == [(2, 4, 3)]
    assert [sample["text"] for sample in report.samples] == ["1 2", "6 7 8"]
    damaged = tmp_path / "valid.parquet"
    damaged.write_bytes(b"PAR1 cut off")
    for place in (tmp_path, damaged):  # `data preview` asks for its files here, too
        with pytest.raises(UserError, match=r"valid\.parquet: damaged file: not a readable Parquet file"):
            packed_files(place)


# --- Documents and conversations --------------------------------------------------------------------------------------


def test_a_folder_of_mixed_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n, "n": n} for n in (1, 2, 4)])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zip", "n": null}\n'))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("# Title")
    pq.write_table(pa.table({"text": ["pq"], "tags": [["a"]]}), tmp_path / "d.parquet")
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    report = inspect(str(tmp_path))
    assert report.kind == "documents"
    assert (report.counts["files"], report.counts["records"]) == (4, 6)
    assert report.counts["formats"] == "1 jsonl, 1 jsonl (gzip), 1 parquet, 1 text"
    assert {row["field"]: (row["types"], row["in"]) for row in report.fields if row["field"] != "path"} == {
        "text": ("text", 1.0),
        "n": ("integer, null", 4 / 6),
        "tags": ("list of text", 1 / 6),
    }
    assert any("1 .png" in note for note in report.notes)
    assert report.lengths is not None and report.lengths.unit == "characters of text"


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi\x1b[31m"}, {"role": "assistant", "content": "Hello"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}, {"messages": [*turns, *turns]}])
    report = inspect(str(tmp_path / "chat.jsonl"))
    assert report.kind == "conversations"
    assert (report.counts["user_turns"], report.counts["assistant_turns"]) == (3, 3)
    assert report.lengths is not None and (report.lengths.least, report.lengths.most) == (12, 24)
    # Nothing in a document may speak to the terminal.
    assert report.samples[0]["text"] == "[user] Hi [31m [assistant] Hello"
    # Content in parts is the text of them, however it is written down.
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 500}}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": parts}, turns[1]]}])
    report = inspect(str(tmp_path / "chat.jsonl"))
    assert report.lengths is not None and report.lengths.most == len("Hi[image_url]Hello")
    assert report.samples[0]["text"] == "[user] Hi[image_url] [assistant] Hello"
    # What the assistant thinks and calls is a part of what a row has to hold.
    call = {"role": "assistant", "content": None, "reasoning": "So.", "tool_calls": [{"name": "f", "arguments": {}}]}
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Hi"}, call]}])
    report, said = inspect(str(tmp_path / "chat.jsonl")), 'So. [{"name": "f", "arguments": {}}]'
    assert report.lengths is not None and report.lengths.most == len(f"Hi{said}")
    assert report.samples[0]["text"] == f"[user] Hi [assistant] {said}"


def test_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "READ_ALL_BYTES", 1000)
    monkeypatch.setattr(inspection, "SAMPLE_RECORDS", 8)
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(500)])
    with file.open("ab") as stream:
        stream.write(b"what is beyond the sample is not looked at\n")
    report = inspect(str(tmp_path))
    assert report.read == "the first records of 1 of 1 files: 8 records"
    assert "records" not in report.counts
    assert "not read" not in report.tables
    pq.write_table(pa.table({"text": [str(i) * 99 for i in range(5000)]}), tmp_path / "b.parquet")
    assert inspect(str(tmp_path / "b.parquet")).counts["records"] == 5000  # the footer knows


def test_what_cannot_be_read_is_counted_and_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n["a list"]\n')
    report = inspect(str(tmp_path))
    assert report.counts["records"] == 1
    assert sum(row["records"] for row in report.tables["not read"]) == 2
    assert any("a.jsonl:2" in note for note in report.notes)


def test_samples_come_from_all_over_and_number_what_was_asked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {n}"} for n in range(1000)])
    for number in (0, 1, 7, 200):
        samples = inspect(str(tmp_path), number).samples
        assert len(samples) == number == len({sample["where"] for sample in samples})
    assert int(inspect(str(tmp_path), 7).samples[-1]["text"].split()[1]) > 500


# --- Plans ------------------------------------------------------------------------------------------------------------


def write_shard(shard: Shard[int], shared: str, output: ShardOutput) -> dict[str, int]:
    if shard.work >= 37:
        raise RuntimeError("killed")
    write_jsonl(output.path(f"{shard.name}.jsonl"), [{"text": shared}])
    return {"documents": 2}


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    plan = Plan({"a": 1}, [], [Shard(f"web-{i:05}", i) for i in range(128)])
    folder = tmp_path / "work"
    freeze(plan, folder)
    assert inspect(str(tmp_path)).notes[-1] == "work: 0 of 128 shards done"
    with pytest.raises(RuntimeError, match="killed"):
        list(run_shards(plan, folder, write_shard, "text", SerialEngine(), dict[str, int]))
    report = inspect(str(folder))
    assert ".: 37 of 128 shards done" in report.notes
    assert report.tables["plans"][0]["documents"] == 74
    assert report.counts["records"] == 37  # and what they wrote
    (folder / "web-00003.jsonl").unlink()  # a receipt without its file counts for nothing
    assert ".: 36 of 128 shards done" in inspect(str(folder)).notes


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "running"}')
    (tmp_path / "config.yaml").write_text("a: 1")
    assert inspect(str(tmp_path)).kind == "run"
    freeze(Plan({}, [], [Shard("s", 0)]), tmp_path / "work")
    killed = "run: not finished, and no process works on it; the same command goes on"
    assert inspect(str(tmp_path)).notes == [killed, ".: 0 of 1 shards done"]
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "run.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        assert inspect(str(tmp_path)).notes[0] == "run: running"
        holder.communicate(b"\n")
    assert inspect(str(tmp_path)).notes[0] == killed
    (tmp_path / "run.json").write_text('{"state": "finished"}')
    (tmp_path / "published.jsonl").write_text('{"name": "x", "version": "x:3", "digest": "d"}\n')
    assert inspect(str(tmp_path)).notes[:2] == ["run: finished", "published: x:3"]


def test_the_outcome_of_a_curation_adds_up() -> None:
    table = StepTable()
    for i in range(3):
        table.read.add({"text": "abc"})
        table.keep({"text": "abc"}, ["email"] if i else []) if i < 2 else table.drop(
            {"id": "x", "text": "abc"}, "short"
        )
    rows = {row["outcome"]: (row["documents"], row["bytes"]) for row in outcome([table.to_json(), table.to_json()])}
    assert rows == {"read": (6, 18), "kept": (4, 12), "  email": (2, 6), "dropped: short": (2, 6)}


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"nothing of the kind", "a.parquet: damaged file"),
        ("web.idx", b"MMIDIDX\x00\x00 cut off", "web: not a readable token stream"),
        ("blend.json", b"{}", "not a blend"),
        ("model.safetensors", b"", "no file that is read"),
    ],
)
def test_what_is_refused_names_the_file(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    if name == "web.idx":
        (tmp_path / "web.bin").write_bytes(b"")
    with pytest.raises(UserError, match=message) as error:
        inspect(str(tmp_path))
    assert "\n" not in error.value.message


@given(st.text())
def test_shown_is_one_printable_line(text: str) -> None:
    line = shown(text)
    assert len(line) <= inspection.SHOWN_CHARS + 2
    assert line.isprintable()
    whole = "".join(c if c.isprintable() else " " for c in text).split()
    assert line.endswith("…") or line.split() == whole


def test_a_folder_that_may_not_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        assert run_main(lambda: print(inspect(str(shut)))) == 2
    finally:
        os.seteuid(user)
    assert "shut" in (message := capsys.readouterr().err) and "Permission denied" in message
    assert message.count("\n") == 1
