"""Curation: what is dropped for which reason, which of two copies stays, and that order of arrival does not matter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nemotron.data_prep.curation.corpus import Corpus, CurationSettings, curate
from nemotron.data_prep.sources.documents import Document, split_of, stable_hash

_WORDS = "apple river stone cloud window garden letter music market winter candle bridge forest silver"
WORDS = _WORDS.split()


def prose(seed: int, length: int = 80) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(9)) * (rng.random() < 0.1) for _ in range(length))


def document(name: str, text: str, split: str = "train", source: str = "a", kind: str = "prose") -> Document:
    return Document(source, name, text, kind, split)  # type: ignore[arg-type]


def kept(corpus: Corpus) -> set[str]:
    return {
        d.id for source in corpus.sources() for split in ("train", "valid") for d in corpus.documents(source, split)
    }


def dropped(corpus: Corpus) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for row in corpus.table.rows():
        if row["outcome"] not in ("read", "kept"):
            reasons[str(row["outcome"])] = reasons.get(str(row["outcome"]), 0) + int(row["documents"])
    return reasons


def test_every_reason_and_the_books_balance(tmp_path: Path) -> None:
    base, held_out = prose(1), prose(2)
    almost = " ".join([*base.split()[:-2], "entirely", "different"])
    almost_held_out = " ".join([*held_out.split()[:-2], "entirely", "different"])
    documents = [
        document("1", base),
        document("2", base + "  \r\n"),  # equal after normalisation
        document("3", almost),
        document("4", "too short"),
        document("5", held_out, "valid"),
        document("6", almost_held_out),
        document("7", prose(3) + " " + " ".join(held_out.split()[20:40]) + " " + prose(4)),
        document("8", prose(5) + " how many apples are there in the blue basket on the table"),
        document("9", prose(6)),
    ]
    corpus = curate(documents, tmp_path, ["How many apples are there in the blue basket on the table?"])
    assert dropped(corpus) == {
        "exact duplicate": 1,
        "near duplicate": 1,
        "too short": 1,
        "near duplicate of held-out": 1,
        "overlaps held-out or evaluation text": 2,
    }
    assert {"5", "9"} < kept(corpus)
    assert len(kept(corpus) & {"1", "2", "3"}) == 1
    [read, alive, *reasons] = corpus.table.rows()
    assert read["documents"] == 9 == alive["documents"] + sum(int(row["documents"]) for row in reasons)
    assert read["bytes"] == alive["bytes"] + sum(int(row["bytes"]) for row in reasons)
    assert corpus.table.samples["too short"] == [{"source": "a", "id": "4", "text": "too short"}]
    assert "near duplicate" in str(corpus.table)


@pytest.mark.parametrize("reverse", [False, True])
def test_of_equal_texts_the_held_out_one_stays(tmp_path: Path, reverse: bool) -> None:
    documents = [document("train", prose(1)), document("valid", prose(1), "valid")]
    corpus = curate(documents[:: -1 if reverse else 1], tmp_path)
    assert kept(corpus) == {"valid"}


def test_order_of_arrival_does_not_matter(tmp_path: Path) -> None:
    documents = [document(str(i), prose(i % 40), "valid" if i % 40 < 4 else "train", "ab"[i % 2]) for i in range(60)]
    results = []
    for attempt in range(3):
        random.Random(attempt).shuffle(documents)
        corpus = curate(documents, tmp_path / str(attempt))
        streams = {(s, p): [d.id for d in corpus.documents(s, p)] for s in "ab" for p in ("train", "valid")}
        results.append((streams, corpus.table.rows(), corpus.table.samples))
    assert results[0] == results[1] == results[2]
    other = curate(documents, tmp_path / "other", settings=CurationSettings(seed=9))
    assert [d.id for d in other.documents("a", "train")] != results[0][0]["a", "train"]


def test_tasks_are_neither_judged_nor_near_deduplicated(tmp_path: Path) -> None:
    tasks = [document(str(i), f"What is {i} plus 7?\n{i + 7}", source="tasks", kind="task") for i in range(30)]
    corpus = curate([*tasks, document("again", tasks[0].text, source="tasks", kind="task")], tmp_path)
    assert len(kept(corpus)) == 30
    assert dropped(corpus) == {"exact duplicate": 1}


def test_near_duplicates_are_found_at_the_stated_similarity(tmp_path: Path) -> None:
    # Replacing the last k of n words leaves n-4-k of n-4+k different 5-grams in common: Jaccard (n-4-k)/(n-4+k).
    alphabet = "abcdefghijklmnop"
    base = ["".join(alphabet[i % k] for k in (7, 11, 13, 16)) for i in range(204)]
    assert len(set(base)) == 204
    for replaced, expected in ((4, 1), (60, 0)):  # Jaccard 0.96 and 0.54
        other = base[:-replaced] + [f"other{word}" for word in base[:replaced]]
        corpus = curate([document("1", " ".join(base)), document("2", " ".join(other))], tmp_path / str(replaced))
        assert dropped(corpus).get("near duplicate", 0) == expected


def test_split_of_is_stable_and_has_the_right_share() -> None:
    splits = [split_of(str(i), 0.1, 0) for i in range(20_000)]
    assert abs(splits.count("valid") / 20_000 - 0.1) < 4 * (0.09 / 20_000) ** 0.5  # four standard deviations
    assert stable_hash("a", "b") != stable_hash("ab")
