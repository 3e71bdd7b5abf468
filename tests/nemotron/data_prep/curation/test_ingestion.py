"""Files of one's own and generated documents as document shards: the same ones whoever reads them; caps; skips."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation import decontamination, ingestion
from nemotron.data_prep.curation.deduplication import exact, minhash
from nemotron.data_prep.curation.ingestion import MORE, SKIP_HINT, DocumentSource, ingest_documents, ingest_files
from nemotron.data_prep.curation.step import (
    Document,
    StepTable,
    collect,
    list_documents,
    plan_step,
    read_documents,
    source_table,
    tables_by_source,
)
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reading import Reading
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine
from nemotron.kit.schemas.curation import MinHashSettings

from ..sources.written import every_format, json_lines, response, warc

PARAGRAPH = (
    "This page tells of the harbour, of the boats that leave it before the sun is up, and of the people who mend the "
    "nets on the quay while they wait for them to come back with the catch of the night. "
)
SERIAL = SerialEngine()


def ingest(
    work_dir: Path,
    *paths: Path,
    on_error: Any = "stop",
    column: str = "text",
    engine: Engine = SERIAL,
    **settings: Any,
) -> tuple[list[Document], StepTable]:
    source = DocumentSource("mine", Reading(on_error, columns={"text": column}), "prose", **settings)
    files = list_files([str(path) for path in paths], on_error=on_error)
    table = ingest_files(source, files, 0, work_dir, engine)
    return [document for path in list_documents(work_dir) for document in read_documents(path)], table


def two_files(folder: Path) -> Path:
    rows: list[Any] = [{"text": f"{i} {PARAGRAPH} {i * 7919} {PARAGRAPH[i:]}"} for i in range(60)]
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(json_lines(rows[:30]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(rows[30:])))
    return folder


def test_documents_have_names_of_their_own_and_are_split_by_their_text(tmp_path: Path) -> None:
    paths = every_format(tmp_path / "in", [{"body": f"text {i}"} for i in range(200)])
    documents, table = ingest(tmp_path / "work", *paths.values(), column="body", valid_fraction=0.2)
    assert len({document["id"] for document in documents}) == len(documents) == 200 * len(paths)
    assert table.read == table.kept and table.dropped == {}
    splits: dict[str, set[str]] = {}
    for document in documents:
        splits.setdefault(document["text"], set()).add(document["split"])
    assert all(len(split) == 1 for split in splits.values())
    assert 20 < sum(split == {"valid"} for split in splits.values()) < 60  # 40 expected, standard deviation 5.7


def test_main_text_is_taken_out_of_pages(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    menu = "<nav><ul><li><a href='/'>Home</a><li><a href='/a'>About us</a></ul></nav>"
    page = f"<html><body>{menu}<article><h1>Harbour</h1>{f'<p>{PARAGRAPH}</p>' * 4}</article></body></html>"
    records = [response("http://e.org/1", page.encode()), response("http://e.org/2", b"<html></html>")]
    (tmp_path / "a.warc.gz").write_bytes(warc([*records, ("conversion", "http://e.org/1", b"of a WET file", None)]))
    documents, table = ingest(tmp_path / "work", tmp_path / "a.warc.gz")
    assert [document["id"].rsplit("/", 1)[-1] for document in documents] == ["a.warc.gz:2", "a.warc.gz:4"]
    assert PARAGRAPH.strip() in documents[0]["text"]
    assert "About us" not in documents[0]["text"]
    assert documents[1]["text"] == "of a WET file"
    assert sorted(tally.documents for tally in table.dropped.values()) == [1, 1]  # warcinfo, the page without text


def test_bad_records_are_counted_or_stop_with_their_place(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "in")
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b"{\n")
    documents, table = ingest(tmp_path / "serial", folder, on_error="skip")
    assert (table.read.documents, table.dropped["not read: malformed JSON"].documents) == (60, 1)
    assert "a.jsonl:31" in table.samples["not read: malformed JSON"][0]["id"]
    with PoolEngine(2) as engine:
        assert ingest(tmp_path / "pool", folder, on_error="skip", engine=engine) == (documents, table)
    with pytest.raises(UserError, match=r"a\.jsonl:31: malformed JSON") as caught:
        ingest(tmp_path / "stop", folder)
    assert caught.value.hint == SKIP_HINT
    (folder / "a.jsonl").write_bytes(b'{"txt": "x"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:1: ") as caught:
        ingest(tmp_path / "again", folder)
    assert (
        caught.value.hint == "fields there: txt; a source's `columns: {text: txt}` takes another one"
    )  # and no skipping


@pytest.mark.parametrize("cap", [10, 30, 31, 59, 60])
def test_a_cap_takes_the_first_documents_and_says_if_there_are_more(tmp_path: Path, cap: int) -> None:
    whole, _ = ingest(tmp_path / "whole", two_files(tmp_path / "in"))
    documents, table = ingest(tmp_path / "work", tmp_path / "in", max_documents=cap)
    assert documents == whole[:cap]
    assert (MORE in table.noted) == (cap < 60)


def test_much_text_of_one_compressed_file_is_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = two_files(tmp_path / "in")
    whole, table = ingest(tmp_path / "whole", folder)
    monkeypatch.setattr(ingestion, "_TEXT_BYTES", 2000)
    work = tmp_path / "work"
    assert ingest(work, folder) == (whole, table)  # in their order
    shards = list_documents(work)
    assert [path.name for path in shards[:2]] == ["mine-00000.jsonl.zst", "mine-00000_00001.jsonl.zst"]
    for path in shards[:-1]:
        sizes = [len(document["text"].encode()) for document in read_documents(path)]
        assert sum(sizes[:-1]) < 2000 <= sum(sizes)
    before = {path: path.read_bytes() for path in shards}
    shards[3].unlink()  # as after a kill: what is not whole is made again
    assert ingest(work, folder) == (whole, table)
    assert {path: path.read_bytes() for path in list_documents(work)} == before
    assert ingest(tmp_path / "capped", folder, max_documents=37)[0] == whole[:37]


def test_a_bad_record_behind_the_cap_stops_nobody(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "in")
    (folder / "c.jsonl").write_bytes(b"{\n")
    _, table = ingest(tmp_path / "work", folder, max_documents=60)
    assert table.noted[MORE] == table.read and table.read.documents == 60
    with pytest.raises(UserError, match=r"c\.jsonl:1: malformed JSON"):
        ingest(tmp_path / "more", folder, max_documents=61)


# --- What is held out, in the steps that follow -----------------------------------------------------------------------


def document(number: int, text: str, split: str = "train") -> Document:
    return {"id": f"d{number}", "text": text, "source": "a", "kind": "prose", "split": split}


def prose(number: int, length: int = 80) -> str:
    return " ".join(f"word{(number * 7919 + i * i * 31) % 997}" for i in range(length))


@pytest.mark.parametrize("held_out", range(4))
def test_of_copies_the_held_out_one_stays(tmp_path: Path, held_out: int) -> None:
    splits = ["valid" if i == held_out else "train" for i in range(4)]
    for name, texts in (
        ("exact", [prose(1)] * 4),
        ("near", [prose(1) + " another" * i for i in range(4)]),  # the longest, else
    ):
        documents = [document(i, text, split) for i, (text, split) in enumerate(zip(texts, splits, strict=True))]
        ingest_documents("a", documents, tmp_path / name / "documents")
        files, work = list_documents(tmp_path / name / "documents"), tmp_path / name / "work"
        if name == "exact":
            table = exact.deduplicate(files, "whitespace", work, SERIAL)
        else:
            table, _ = minhash.deduplicate(
                files,
                MinHashSettings(unit="words", shingle_size=5, num_bands=16, rows_per_band=8, min_estimate=0.7),
                work,
                SERIAL,
            )
        [kept] = [document for path in list_documents(work) for document in read_documents(path)]
        assert kept["split"] == "valid" and table.kept.documents == 1


def test_training_loses_what_it_shares_with_the_held_out_and_the_books_balance(tmp_path: Path) -> None:
    held_out = prose(2)
    documents = [
        document(0, held_out, "valid"),
        document(1, f"{prose(3)} {' '.join(held_out.split()[20:40])} {prose(4)}"),
        document(2, prose(5)),
    ]
    ingest_documents("a", documents, tmp_path / "documents")
    protected = decontamination.protect([held_out])
    plan = plan_step(list_documents(tmp_path / "documents"), {})
    grams = decontamination.save_grams(protected, tmp_path / "hits" / "grams")
    collect(plan, tmp_path / "hits", decontamination.hit_shard, grams, SERIAL)
    leaks = decontamination.leaks_of(plan, tmp_path / "hits", protected)
    collect(plan, tmp_path / "curated", decontamination.drop_shard, leaks, SERIAL)
    ids = [d["id"] for path in list_documents(tmp_path / "curated") for d in read_documents(path)]
    assert ids == ["d0", "d2"]
    [(source, table)] = tables_by_source([tmp_path / "documents", tmp_path / "curated"]).items()
    assert source == "a" and table.read.documents == 3 and table.kept.documents == 2
    assert sum(tally.bytes for tally in table.dropped.values()) == table.read.bytes - table.kept.bytes
    assert "overlaps evaluation or held-out text" in source_table({source: table})
