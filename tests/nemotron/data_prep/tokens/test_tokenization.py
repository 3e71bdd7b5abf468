"""Shards to token streams: the bytes of megatron-core's builder, whatever the engine; counts, caps, what is skipped."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.documents import split_of
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.planning import SourceInput, SourceWork, make_plan
from nemotron.data_prep.sources.reader import whole
from nemotron.data_prep.sources.reading import Reading, Row
from nemotron.data_prep.tokens import encoding, tokenization
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset, token_dtype
from nemotron.data_prep.tokens.tokenization import (
    SourceRules,
    SourceStreams,
    TokenizeCounts,
    TokenizeJob,
    link_streams,
    skipped_table,
    tokenize_shard,
    tokenize_sources,
)
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine
from nemotron.data_prep.work.shards import Receipt, Shard, ShardOutput, freeze, read_receipt

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "\n",
    "17",
    "é",
    "東京",
    "<|im_end|>",
]
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=i % 40)) + str(i) for i in range(600)]
SMALL = train_tokenizer(TEXTS[:50], 300)


def write(path: Path, texts: Iterable[str | None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(
    folder: Path,
    sources: Mapping[str, Path],
    *,
    rules: SourceRules | None = None,
    tokenizer: Tokenizer = SMALL,
    eos: int | None = 2,
    bos: int | None = None,
    caps: tuple[int | None, int | None] = (None, None),
    engine: Engine | None = None,
    num_shards: int | None = 3,
) -> tuple[dict[str, SourceStreams], list[Receipt[TokenizeCounts]]]:
    rules = rules or SourceRules(Reading())
    inputs = [SourceInput(name, list_files([str(path)]), *caps) for name, path in sources.items()]
    plan = make_plan({}, inputs, shard_bytes=2**20, num_shards=num_shards)
    freeze(plan, folder)
    dtype = token_dtype(tokenizer.get_vocab_size()).__name__
    job = TokenizeJob(tokenizer.to_str(), bos, eos, dtype, 7, dict.fromkeys(sources, rules))
    streams = tokenize_sources(plan, folder, job, engine or SerialEngine())
    receipts = [read_receipt(folder, shard.name, plan.digest, TokenizeCounts) for shard in plan.shards]
    return streams, [receipt for receipt in receipts if receipt]


def documents_of(folder: Path, prefixes: list[str]) -> list[list[int]]:
    return [document.tolist() for prefix in prefixes for document in IndexedDataset(folder / prefix)]


def reference(tokenizer: Tokenizer, text: str) -> list[int]:
    """One text after the other, with another method of the library."""
    tokenizer.encode_special_tokens = True
    return [*tokenizer.encode(text, add_special_tokens=False).ids, 2]


def test_counts_are_those_of_the_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", TEXTS)
    streams, _ = run(tmp_path / "work", {"web": source}, rules=SourceRules(Reading(), 0.2, 0.1), bos=1)
    files = streams["web"].files
    held = {"train": 0, "valid": 0, "test": 0}
    for split, key in (("train", ""), ("valid", "valid_"), ("test", "test_")):
        documents = documents_of(tmp_path / "work", files[split])  # type: ignore[literal-required]
        texts = [text for text in TEXTS if split_of(text, 0.2, 7, 0.1) == split]
        assert all(document[0] == 1 and document[-1] == 2 for document in documents)
        assert [SMALL.decode(document[1:-1], skip_special_tokens=False) for document in documents] == texts
        assert files[f"{key}documents"] == len(texts)  # type: ignore[literal-required]
        assert files[f"{key}tokens"] == sum(map(len, documents))  # type: ignore[literal-required]
        assert files[f"{key}bytes"] == sum(len(text.encode()) for text in texts)  # type: ignore[literal-required]
        histogram = streams["web"].lengths[split]
        for upper, count in histogram.items():
            assert count == sum(int(upper) // 2 < len(document) <= int(upper) for document in documents)
        assert sum(histogram.values()) == len(documents)
        held[split] = len(documents)
    assert 80 < held["valid"] < 160 and 30 < held["test"] < 90  # 120 and 60 expected


def test_engine_and_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path / "in" / f"{i}.jsonl", TEXTS[100 * i : 100 * i + 100])
    rules = SourceRules(Reading(), 0.1, 0.1)
    _, serial = run(tmp_path / "serial", {"a": tmp_path / "in"}, rules=rules, num_shards=6)
    with PoolEngine(3) as engine:
        _, pool = run(tmp_path / "pool", {"a": tmp_path / "in"}, rules=rules, num_shards=6, engine=engine)
    assert [(r.outputs, r.counts) for r in serial] == [(r.outputs, r.counts) for r in pool]
    assert len(serial) == 6 and all(receipt.outputs for receipt in serial)


def test_what_cannot_be_used_is_counted_with_its_place(tmp_path: Path) -> None:
    good = [json.dumps({"text": "fine"})] * 2
    bad = ['{"text": ""}', '{"text": "half \\ud83d of a pair"}', '{"body": "x"}', "not json"]
    (tmp_path / "in.jsonl").write_text("\n".join([good[0], *bad, good[1]]) + "\n")
    streams, _ = run(
        tmp_path / "work", {"web": tmp_path / "in.jsonl"}, rules=SourceRules(Reading("skip", columns={"text": "text"}))
    )
    source = streams["web"]
    assert (source.files["documents"], source.read.records) == (2, 2)
    assert sum(source.read.skipped.values()) == 4
    assert source.read.skipped[tokenization.EMPTY_TEXT] == 1
    places = {sample["where"].rpartition("/")[2] for sample in source.read.samples}
    assert places == {f"in.jsonl:{line}" for line in (2, 3, 4, 5)}
    table = skipped_table(streams)
    assert "1 empty text" in table and "in.jsonl:2: empty text" in table
    # Empty texts are no mistake; half a pair is one.
    (tmp_path / "stop.jsonl").write_text("\n".join([good[0], bad[0], bad[1]]) + "\n")
    with pytest.raises(UserError, match=r"stop\.jsonl:3: "):
        run(tmp_path / "stop", {"web": tmp_path / "stop.jsonl"})


def test_a_source_without_a_document_has_no_file(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", ["", ""])
    write(tmp_path / "in" / "b.jsonl", [])
    streams, receipts = run(tmp_path / "work", {"none": tmp_path / "in"})
    assert streams["none"].files["train"] == []
    assert streams["none"].files["documents"] == 0
    assert all(receipt.outputs == {} for receipt in receipts)


def test_without_eos_and_bos_nothing_stands_around_a_document_and_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path,
) -> None:
    large = Tokenizer.from_str(SMALL.to_str())  # the same merges, and ids that do not fit uint16
    large.add_tokens([f"never{i}" for i in range(65_500)])
    file = write(tmp_path / "in.jsonl", TEXTS[:5])
    for tokenizer, dtype in ((SMALL, np.uint16), (large, np.int32)):
        folder = tmp_path / dtype.__name__
        streams, _ = run(folder, {"a": file}, eos=None, tokenizer=tokenizer)
        [prefix] = streams["a"].files["train"]
        dataset = IndexedDataset(folder / prefix)
        assert dataset.dtype == dtype
        assert [ids.tolist() for ids in dataset] == [reference(tokenizer, text)[:-1] for text in TEXTS[:5]]


def test_caps_hold_and_come_from_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        write(tmp_path / "in" / f"{i}.jsonl", TEXTS[100 * i : 100 * i + 100])
    source = {"a": tmp_path / "in"}
    streams, receipts = run(tmp_path / "documents", source, caps=(50, None), num_shards=4)
    per_shard = [receipt.counts.splits["train"].documents for receipt in receipts]
    assert sum(per_shard) == streams["a"].files["documents"] == 50
    assert min(per_shard) >= 10 and streams["a"].capped == 4
    documents = documents_of(tmp_path / "documents", streams["a"].files["train"])
    expected = [reference(SMALL, t) for i in range(4) for t in TEXTS[100 * i : 100 * i + per_shard[i]]]
    assert documents == expected
    # Held-out documents do not count against a cap on training tokens.
    rules = SourceRules(Reading(), 0.3)
    streams, _ = run(tmp_path / "tokens", source, caps=(None, 1000), num_shards=1, rules=rules)
    longest = max(len(reference(SMALL, text)) for text in TEXTS)
    assert 1000 - longest < streams["a"].files["tokens"] <= 1000
    read = streams["a"].read
    used = streams["a"].files["documents"] + streams["a"].files["valid_documents"]
    assert read.records == used
    assert read.skipped[tokenization.BEYOND_CAP] > 0
    monkeypatch.setattr(tokenization, "_BATCH_DOCUMENTS", 7)  # each batch ends with a document of the next
    streams, _ = run(tmp_path / "batches", source, caps=(None, 1000), num_shards=1, rules=rules)
    assert streams["a"].read.records == streams["a"].files["documents"] + streams["a"].files["valid_documents"]


def test_a_sample_does_not_show_a_signed_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "read_piece", lambda *_: [Row(i, {"text": "alpha beta"}) for i in range(9)])
    file = SourceFile("https://h.example/x.jsonl?signature=s3cr3t", 1, "", "jsonl")
    job = TokenizeJob(SMALL.to_str(), None, None, "uint16", 0, {"a": SourceRules(Reading())})
    shard = Shard("a-00000", SourceWork("a", [whole(file)], None, 5))
    [sample] = tokenize_shard(shard, job, ShardOutput(tmp_path, tmp_path)).read.samples
    assert sample == {"where": "https://h.example/x.jsonl", "reason": tokenization.BEYOND_CAP}


def test_a_long_text_is_encoded_in_windows_to_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(random.Random(1).choices(WORDS, k=4000))
    file = write(tmp_path / "in.jsonl", ["short", long, "x" * 9000, "end"])
    whole, _ = run(tmp_path / "whole", {"a": file})
    monkeypatch.setattr(tokenization, "LONG_CHARS", 5000)
    monkeypatch.setattr(tokenization, "_BATCH_CHARS", 2500)
    monkeypatch.setattr(encoding.Encoder.encode_long, "__defaults__", (((2048, 512),),))
    with pytest.raises(UserError, match=r"in\.jsonl:3: a word of more than .* in a text of 9,000 characters,"):
        run(tmp_path / "stop", {"a": file})
    record = {"text": "x" * 9000, "id": "web:b.jsonl:7"}
    (tmp_path / "named.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"named\.jsonl:1: .* of 9,000 characters \(web:b\.jsonl:7\), which"):
        run(tmp_path / "named", {"a": tmp_path / "named.jsonl"})
    skipping = SourceRules(Reading("skip"))
    parts, _ = run(tmp_path / "parts", {"a": file}, rules=skipping)
    documents = documents_of(tmp_path / "whole", whole["a"].files["train"])
    assert documents_of(tmp_path / "parts", parts["a"].files["train"]) == [documents[i] for i in (0, 1, 3)]
    assert parts["a"].read.skipped == {tokenization.NO_WORDS: 1}


def test_linked_files_are_whole_and_stay_where_they_were(tmp_path: Path) -> None:
    streams, receipts = run(tmp_path / "work", {"a": write(tmp_path / "in.jsonl", TEXTS)})
    (tmp_path / "out").mkdir()
    link_streams(streams, tmp_path / "work", tmp_path / "out")
    for receipt in receipts:
        for name in receipt.outputs:
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "work" / name).read_bytes()


def test_the_table_tells_training_documents_from_held_out_ones() -> None:
    source = SourceStreams(shards=3, capped=2)
    source.files["documents"], source.files["valid_documents"], source.files["test_documents"] = 70, 20, 10
    head, line = skipped_table({"web": source}).splitlines()
    assert head.split()[3:6] == ["train", "valid", "test"] and line.split()[:4] == ["web", "70", "20", "10"]
    assert line.endswith("  2 of 3 shards end at their share of the cap")  # nothing was skipped, and nothing says so
