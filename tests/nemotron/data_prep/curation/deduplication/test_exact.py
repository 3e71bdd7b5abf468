"""Exact deduplication against a dictionary, however documents are divided, ordered and worked on."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import RunFailed
from nemotron.data_prep.curation.deduplication import exact
from nemotron.data_prep.work.engines import SerialEngine

from ..shards import texts, write_shards


def test_keeps_one_document_of_every_text(tmp_path: Path) -> None:
    written = ["one  two\n", " one two", "One two", "e\u0301clair", "\u00e9clair", "", " ", "\ufeff"]
    documents = [{"id": f"d{i}", "text": written[i % len(written)]} for i in range(40)]
    files = write_shards(tmp_path / "in", documents, 3)
    for normalisation in ("none", "whitespace"):
        work = tmp_path / normalisation
        table = exact.deduplicate(files, normalisation, work, SerialEngine())  # type: ignore[arg-type]
        kept = texts(work)
        if normalisation == "none":
            assert sorted(kept.values()) == sorted(written)
        else:
            meant = {" ".join(unicodedata.normalize("NFC", text).split()) for text in written}
            assert {" ".join(unicodedata.normalize("NFC", text).split()) for text in kept.values()} == meant
            assert len(kept) == len(meant) == 5
        assert table.read.documents == 40
        assert table.dropped[exact.REASON].documents == 40 - len(kept) == 40 - table.kept.documents
        for sample in table.samples[exact.REASON]:
            stays = sample["detail"].removeprefix("stays: ").partition(":")[0]
            assert exact.normalise(kept[stays], normalisation) == exact.normalise(  # type: ignore[arg-type]
                next(d["text"] for d in documents if d["id"] == sample["id"]),
                normalisation,  # type: ignore[arg-type]
            )


@settings(max_examples=15)
@given(st.lists(st.integers(0, 9), max_size=40), st.randoms(), st.integers(1, 4))
def test_does_not_depend_on_division_or_order(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], random: object, shards: int
) -> None:
    documents = [{"id": f"d{i}", "text": f"text {number}"} for i, number in enumerate(numbers)]
    results = []
    for division in (1, shards):
        folder = tmp_path_factory.mktemp("exact")
        files = write_shards(folder / "in", documents, division)
        table = exact.deduplicate(files, "none", folder / "work", SerialEngine())
        results.append((texts(folder / "work"), table.to_json()))
        random.shuffle(documents)  # type: ignore[attr-defined]
    assert results[0] == results[1]
    assert sorted(results[0][0].values()) == sorted({document["text"] for document in documents})


def test_two_documents_that_nothing_tells_apart(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "in", [{"id": "same", "text": "a"}] * 2, 2)
    with pytest.raises(RunFailed, match="two documents have the id 'same'"):
        exact.deduplicate(files, "none", tmp_path / "work", SerialEngine())


def test_every_pass_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_shards(tmp_path / "in", [{"id": f"{i}", "text": f"text {i}"} for i in range(7)], 3)
    size = human_size(sum(path.stat().st_size for path in files))
    exact.deduplicate(files, "none", tmp_path / "work", SerialEngine())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["exact_dedup: hashes", "7 rows", size],
        ["exact_dedup", "7 documents", size],
    ]
