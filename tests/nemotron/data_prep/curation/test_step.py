"""What all steps of a curation share: shards of documents, the table of drops, filters that go on after a kill."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.curation.step import (
    Document,
    DocumentWriter,
    Drop,
    Keep,
    StepRun,
    StepTable,
    filter_shards,
    list_documents,
    plan_step,
    read_documents,
    source_table,
    write_documents,
)
from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
from nemotron.data_prep.work.shards import restore

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
documents = st.lists(
    st.builds(
        lambda more, name, text: more | {"id": name, "text": text},
        st.dictionaries(st.text(), values, max_size=3),
        st.text(),
        st.text(),
    ),
    max_size=20,
)


@given(documents)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, some: list[Document]) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.jsonl.zst"
    tally = write_documents(path, some)
    assert list(read_documents(path)) == some
    assert tally.documents == len(some)
    assert tally.bytes == sum(len(document["text"].encode("utf-8", "surrogatepass")) for document in some)


def make(number: int, text: str = "") -> Document:
    return {"id": f"d:{number}", "text": text or f"document number {number}", "url": f"https://a.example/{number}"}


def test_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    document = {"id": "a", "text": json.loads(r'"before \ud83d after"')}
    tally = write_documents(tmp_path / "a.jsonl.zst", [document, {"id": "b", "text": "é"}])
    assert list(read_documents(tmp_path / "a.jsonl.zst")) == [document, {"id": "b", "text": "é"}]
    assert tally.documents == 2


def test_lines_are_found_across_the_borders_of_chunks(tmp_path: Path) -> None:
    some = [make(n, "x" * (n * 997 % 400_000)) for n in range(40)]
    write_documents(tmp_path / "a.jsonl.zst", some)
    assert list(read_documents(tmp_path / "a.jsonl.zst")) == some


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    rng = random.Random(3)
    write_documents(path, (make(n, rng.randbytes(100).hex()) for n in range(3000)))
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-1], b"plain text"):  # flipped bytes: the artifact's digests see them
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.jsonl\.zst"):
            list(read_documents(path))


@pytest.mark.parametrize("line", ["[1]", "{", '{"id": "a"}', '{"id": 3, "text": ""}', '{"text": ""}'])
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str) -> None:
    import pyarrow as pa

    path = tmp_path / "a.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write((json.dumps(make(0)) + "\n" + line + "\n").encode())
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: "):
        list(read_documents(path))


def test_an_error_while_writing_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), DocumentWriter(tmp_path / "a.jsonl.zst") as writer:
        writer.write(make(1))
        raise ZeroDivisionError


# --- The table ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["keep", "short", "spam"])), max_size=40), st.randoms())
def test_tables_add_up_in_any_order_and_division(verdicts: list[tuple[int, str]], rng: random.Random) -> None:
    def table_of(some: list[tuple[int, str]]) -> StepTable:
        table = StepTable()
        for number, verdict in some:
            table.read.add(make(number))
            if verdict == "keep":
                table.keep(make(number), ("even",) if number % 2 == 0 else ())
            else:
                table.drop(make(number), verdict)
        return table

    whole = table_of(verdicts)
    shuffled = verdicts[:]
    rng.shuffle(shuffled)
    parts = [shuffled[begin::3] for begin in range(3)]
    total = StepTable()
    for part in parts:
        total.merge(restore(StepTable, json.loads(json.dumps(table_of(part).to_json()))))
    assert total.to_json() == whole.to_json()
    dropped = sum(tally.documents for tally in total.dropped.values())
    assert total.read.documents == total.kept.documents + dropped == len(verdicts)


def test_the_table_for_people_names_reasons_and_samples() -> None:
    table = StepTable()
    table.read.add(make(1))
    table.drop(make(1, "Buy  now\n" * 100), "spam", "three calls")
    assert table.samples["spam"][0]["detail"] == "three calls"
    assert "dropped: spam" in str(table)
    assert "d:1: Buy now Buy now" in str(table)
    assert max(map(len, str(table).split("\n"))) < 120


def test_a_table_by_source_tells_remarks_about_what_was_kept_from_drops() -> None:
    table = StepTable()
    for number in range(3):
        table.read.add(make(number))
    table.keep(make(0))
    table.keep(make(1), ["boilerplate"])
    table.drop(make(2), "spam")
    outcomes = [line[17:55].strip() for line in source_table({"web": table}).splitlines()]
    assert outcomes == ["outcome", "read", "kept", "note: boilerplate", "spam"]


# --- Filters --------------------------------------------------------------------------------------------------------


def judge(document: Document, least: int) -> Keep | Drop:
    number = int(document["id"].partition(":")[2])
    document["text"] += " (seen)"
    return Drop("too small", str(number)) if number < least else Keep(document | {"size": number}, ("large",))


def shards(folder: Path, count: int = 4) -> list[Path]:
    folder.mkdir()
    for number in range(count):
        write_documents(folder / f"s{number}.jsonl.zst", (make(n) for n in range(number * 10, number * 10 + 10)))
    return list_documents(folder)


def contents(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in list_documents(work)}


def test_a_filter_keeps_and_drops_what_its_judge_says(tmp_path: Path) -> None:
    plan = plan_step(shards(tmp_path / "in"), {"least": 15})
    table = filter_shards(plan, tmp_path / "work", judge, 15, SerialEngine())
    kept = [document for path in list_documents(tmp_path / "work") for document in read_documents(path)]
    assert [document["size"] for document in kept] == list(range(15, 40))
    assert kept[0]["text"] == "document number 15 (seen)"
    assert (table.read.documents, table.kept.documents) == (40, 25)
    assert (table.dropped["too small"].documents, table.noted["large"].documents) == (15, 25)
    # What was dropped is counted as it came, not as the judge left it.
    assert table.dropped["too small"].bytes == sum(len(f"document number {n}") for n in range(15))
    assert len(list_documents(tmp_path / "work")) == 4  # an empty shard is a shard


def test_workers_change_nothing(tmp_path: Path) -> None:
    plan = plan_step(shards(tmp_path / "in"), {"least": 15})
    tables = [filter_shards(plan, tmp_path / "serial", judge, 15, SerialEngine())]
    with PoolEngine(2) as engine:
        tables.append(filter_shards(plan, tmp_path / "pool", judge, 15, engine))
    assert tables[0].to_json() == tables[1].to_json()
    assert contents(tmp_path / "serial") == contents(tmp_path / "pool")


def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / folder / "a.jsonl.zst" for folder in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.touch()
    with pytest.raises(UserError, match="another input file is called a, too"):
        plan_step(files, {})


def test_a_dot_in_a_name_is_part_of_it(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("crawl.2023.jsonl.zst", "crawl.2024.jsonl.zst")]
    for file in files:
        file.touch()
    assert [shard.name for shard in plan_step(files, {}).shards] == ["crawl.2023", "crawl.2024"]


# --- Publishing -----------------------------------------------------------------------------------------------------


def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int) -> Any:
    from nemotron.kit import Dataset

    save, registry = Dataset.save, Registry(tmp_path / "artifacts")
    monkeypatch.setattr(Dataset, "save", lambda self, move: save(self, "nemotron_cc-x-data-tiny", move=move))
    monkeypatch.setattr(Registry, "default", classmethod(lambda _: registry))
    plan = plan_step(shards(tmp_path / "in"), {"least": least})
    table = filter_shards(plan, tmp_path / "work", judge, least, SerialEngine())
    step = StepRun(SimpleNamespace(dir=tmp_path, output_dir=tmp_path / "out"), SerialEngine())  # type: ignore[arg-type]
    step.publish(table, {"extra": 1})
    return Dataset.load("nemotron_cc-x-data-tiny")


def test_a_step_publishes_its_shards_with_table_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = published(tmp_path, monkeypatch, 15)
    assert dataset.num_examples == 25
    urls = {document["url"] for path in list_documents(dataset.path) for document in read_documents(path)}
    assert urls == {f"https://a.example/{n}" for n in range(15, 40)}
    metrics = dataset.version.record["metrics"]
    assert metrics["extra"] == 1
    assert metrics["table"]["dropped"]["too small"]["documents"] == 15
    assert len(metrics["table"]["samples"]["too small"]) == 5
    assert not (tmp_path / "work").exists()


def test_a_step_that_keeps_nothing_fails_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="none of 40 documents is left") as failed:
        published(tmp_path, monkeypatch, 100)
    assert failed.value.hint == "most frequent reason: too small"
    assert (tmp_path / "work").exists()
