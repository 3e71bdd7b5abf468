"""Overlap of word n-grams with protected texts."""

from __future__ import annotations

import json
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.decontamination import (
    drop_shard,
    hit_shard,
    hits,
    leaks_of,
    protect,
    save_grams,
    words,
)
from nemotron.data_prep.curation.step import collect, plan_step, write_documents
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.recipes.data.curation.nemotron_cc import decontaminate
from nemotron.recipes.data.curation.nemotron_cc.decontaminate import _texts_of

SECRET = " ".join(f"word{i}" for i in range(20))


def overlaps(protected: list[str], text: str, n: int = 13) -> bool:
    return bool(len(hits(text, protect(protected, n))))


def test_thirteen_shared_words_are_an_overlap_twelve_are_not() -> None:
    thirteen = "before " + " ".join(SECRET.split()[3:16]) + " after"
    twelve = "before " + " ".join(SECRET.split()[3:15]) + " after"
    assert overlaps([SECRET], thirteen)
    assert not overlaps([SECRET], twelve)
    assert overlaps([SECRET], twelve, n=12)


def test_case_punctuation_and_layout_do_not_hide_it() -> None:
    assert overlaps([SECRET], SECRET.upper().replace(" ", ",\n  "))


def test_short_protected_texts_count_as_a_whole() -> None:
    assert overlaps(["What is 17 plus 5?"], "Q: what is 17 plus 5? A: 22")
    assert not overlaps(["What is 17 plus 5?"], "Q: what is 17 plus 6? A: 23")
    assert not overlaps(["17 plus 5"], "17 plus 5")  # under five words: says nothing


def test_neither_a_script_without_spaces_nor_the_encoding_of_accents_hides_it() -> None:
    question = "北京故宫是在哪一个朝代开始修建的，又花了多少年？"
    assert words("1-é, の。") == ["1", "é", "の"]
    assert overlaps([question], f"请回答下面的问题：{question}答案在后面。")
    assert not overlaps([question], "请回答下面的问题：长城是在哪一个朝代修建的？")
    # Vowel signs belong to their words: four words of Tamil are no thirteen.
    assert words("हिन्दी में लिखो, العَرَبِيَّة தமிழ் மொழி") == ["हिन्दी", "में", "लिखो", "العَرَبِيَّة", "தமிழ்", "மொழி"]
    accents = "où était l'élève après la dernière leçon du matin à l'école"
    assert overlaps([unicodedata.normalize("NFD", accents)], unicodedata.normalize("NFC", accents))


@pytest.mark.parametrize(("documents", "kept", "never"), [(3, 0, ()), (4, 4, ()), (4, 0, (SECRET,))])
def test_boilerplate_is_no_overlap(tmp_path: Path, documents: int, kept: int, never: tuple[str, ...]) -> None:
    write_documents(
        tmp_path / "in.jsonl.zst", ({"id": str(i), "text": f"{SECRET} number {i}"} for i in range(documents))
    )
    plan, protected = plan_step([tmp_path / "in.jsonl.zst"], {}), protect([SECRET])
    grams = save_grams(protected, tmp_path / "hits" / "grams")
    collect(plan, tmp_path / "hits", hit_shard, grams, SerialEngine())
    leaks = leaks_of(plan, tmp_path / "hits", protected, boilerplate_documents=3, never_boilerplate=never)
    table = collect(plan, tmp_path / "work", drop_shard, leaks, SerialEngine())
    assert (table.read.documents, table.kept.documents) == (documents, kept)


def test_what_a_worker_gets_of_the_protected_grams_is_small(tmp_path: Path) -> None:
    protected = {13: np.arange(100_000, dtype=np.uint64), 5: np.array([7], dtype=np.uint64)}
    files = save_grams(protected, tmp_path / "grams")
    assert len(pickle.dumps(files)) < 1000
    assert {length: np.load(path).tolist() for length, path in files.items()} == {
        length: grams.tolist() for length, grams in protected.items()
    }
    assert sorted(files.values()) == sorted((tmp_path / "grams").iterdir())


@given(st.text("ab c", max_size=60), st.text("ab c", max_size=60))
def test_agrees_with_a_search_for_word_runs(protected: str, text: str) -> None:
    n = 5
    runs = {tuple(protected.split()[i : i + n]) for i in range(len(protected.split()) - n + 1)}
    expected = any(tuple(text.split()[i : i + n]) in runs for i in range(len(text.split()) - n + 1))
    assert overlaps([protected], text, n=n) == expected


def test_a_question_is_protected_without_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question, answer = "which of these animals lays eggs in spring", "the small brown garden spider does it"
    file = tmp_path / "quiz.jsonl"
    file.write_text(json.dumps({"question": question, "answer": answer, "id": "q1"}))
    texts = [*_texts_of(list_files([str(file)])[0], ["question", "answer"])]
    assert texts == [question, answer, f"{question} {answer}"]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    file.write_text(json.dumps({"prompt": turns, "answer": {"text": [answer], "label": ["A"]}}))
    texts_within = [*_texts_of(list_files([str(file)])[0], ["prompt", "answer"])]
    assert texts_within == ["be brief", question, answer, "A", f"be brief {question} {answer} A"]
    file.write_text(json.dumps({"question": question}) + '\n{"question": null}\n{"query": "x"}\n')
    assert [*_texts_of(list_files([str(file)])[0], ["question", "answer"])] == [question]
    assert capsys.readouterr().err == f"{file}: 2 of 3 records have no text in question, answer\n"
    signed = SourceFile("https://h.example/quiz.jsonl?signature=s3cr3t", 1, "", "jsonl")
    monkeypatch.setattr(decontaminate, "read_piece", lambda *_: [])
    with pytest.raises(UserError, match=r"https://h\.example/quiz\.jsonl: none of the columns question"):
        list(_texts_of(signed, ["question"]))
    for leak in (f"Question: {question}? Answer: {answer}", f"A quiz: {question}?", f"{question} {answer}"):
        assert overlaps(texts, leak), leak
