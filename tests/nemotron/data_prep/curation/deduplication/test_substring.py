"""Substring deduplication against an independent one that keeps every window of tokens in a dictionary."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.deduplication import substring
from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
from nemotron.kit.schemas.curation import SubstringSettings

from ..shards import texts, write_shards

TOKEN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff]|[^\\s\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff]+")


def slow(documents: list[dict[str, str]], size: int) -> dict[str, list[bool]]:
    """id -> for every token, whether it goes. Straight from the definition, one window after another."""
    first: dict[tuple[str, ...], tuple[str, int]] = {}
    gone: dict[str, list[bool]] = {}
    for document in sorted(documents, key=lambda d: xxhash.xxh3_64_intdigest(d["id"].encode())):
        tokens = TOKEN.findall(document["text"])
        goes = gone[document["id"]] = [False] * len(tokens)
        for begin in range(len(tokens) - size + 1):
            window = tuple(tokens[begin : begin + size])
            home, at = first.setdefault(window, (document["id"], begin))
            if (home, at) == (document["id"], begin):
                continue
            for place in range(begin, begin + size):
                if home != document["id"] or place not in range(at, at + size):
                    goes[place] = True
    return gone


def run(folder: Path, documents: list[dict[str, str]], shards: int, options: SubstringSettings, engine=None):  # type: ignore[no-untyped-def]
    files = write_shards(folder / "in", documents, shards)
    table, cuts = substring.deduplicate(files, options, folder / "work", engine or SerialEngine())
    return texts(folder / "work"), table, cuts


# Few different tokens, so that windows repeat, overlap themselves and each other; with and without whitespace.
PIECES = st.sampled_from(["a ", "a\n", "b ", "b\n\n", "\u4e2d", "\u6587 ", "\U0001f600 ", "e\u0301\u3000", " "])
TEXTS = st.lists(st.lists(PIECES, max_size=30).map("".join), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=60)
@given(TEXTS, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
@example(["a " * 9], 3, 1, 1)
@example(["a b " * 6, "b " * 4, "a b " * 3], 3, 2, 2)
@example(["\u4e2d\u6587" * 5, "\u4e2d \u6587\n\u4e2d\u6587"], 4, 2, 1)
def test_as_by_definition(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, shards: int, ranges: int
) -> None:
    documents = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("substring")
    options = SubstringSettings.model_construct(
        min_tokens=size, min_tokens_left=1, range_bytes=-(-60 * shards // ranges)
    )
    kept, table, cuts = run(folder, documents, shards, options)
    left: set[tuple[str, ...]] = set()
    expected_tokens = expected_documents = 0
    for document in documents:
        tokens, goes = TOKEN.findall(document["text"]), slow(documents, size)[document["id"]]
        stays = [token for token, gone in zip(tokens, goes, strict=True) if not gone]
        if any(goes) and not stays:
            assert document["id"] not in kept
            continue
        assert TOKEN.findall(kept[document["id"]]) == stays
        if not any(goes):
            assert kept[document["id"]] == document["text"]
        expected_documents += any(goes)
        expected_tokens += sum(goes)
        # The purpose: of what stood whole in the input, nothing is there twice.
        for begin in range(len(tokens) - size + 1):
            if not any(goes[begin : begin + size]):
                window = tuple(tokens[begin : begin + size])
                assert window not in left
                left.add(window)
    assert (cuts.documents, cuts.tokens) == (expected_documents, expected_tokens)
    assert table.kept.documents == len(kept)
    assert cuts.bytes == sum(
        len(d["text"].encode()) - len(kept[d["id"]].encode()) for d in documents if d["id"] in kept
    )


def passages(seed: int, documents: int) -> list[dict[str, str]]:
    """Texts of random words in which some passages of 30 to 80 words come again and again."""
    random = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(2000)]
    common = [" ".join(random.choice(words, random.integers(30, 80))) for _ in range(20)]
    result = []
    for number in range(documents):
        own = 4 if number % 5 else 1  # some have little beside what is common
        parts = [" ".join(random.choice(words, random.integers(5, 60))) for _ in range(own)]
        for place in range(3):
            if random.random() < 0.5:
                parts.insert(place, common[random.integers(len(common))])
        result.append({"id": f"doc-{number}", "text": "\n\n".join(parts)})
    return result


def test_long_passages_and_whatever_division(tmp_path: Path) -> None:
    documents = passages(0, 200)
    options = SubstringSettings(min_tokens_left=20)
    one, one_table, one_cuts = run(tmp_path / "one", documents, 1, options)
    gone = slow(documents, 50)
    short = 0
    for document in documents:
        tokens, goes = document["text"].split(), gone[document["id"]]
        if any(goes) and goes.count(False) < 20:
            short += 1
            assert document["id"] not in one
        else:
            assert one[document["id"]].split() == [t for t, g in zip(tokens, goes, strict=True) if not g]
            # Paragraphs that stood apart still do.
            assert one[document["id"]].count("\n\n\n") == 0
    assert short == one_table.dropped[substring.REASON].documents > 0
    assert one_table.noted[substring.NOTE].documents == one_cuts.documents > 50

    with PoolEngine(2) as engine:
        finer = SubstringSettings.model_construct(min_tokens=50, min_tokens_left=20, range_bytes=20_000)
        other, table, cuts = run(tmp_path / "many", documents[::-1], 7, finer, engine)
    assert len(list((tmp_path / "many/work/matches").glob("*.at.npy"))) > 2
    assert other == one
    assert table.to_json() == one_table.to_json()
    assert cuts == one_cuts


def test_passages_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that maps all windows to a few values, what is not equal is refused and not cut."""
    from nemo_runspec.errors import RunFailed

    monkeypatch.setattr(
        substring, "window_hashes", lambda values, size, base: np.zeros(len(values) - size + 1, np.uint64)
    )
    with pytest.raises(RunFailed, match="two different passages"):
        run(tmp_path, passages(1, 5), 2, SubstringSettings(min_tokens_left=20))


@pytest.mark.parametrize(
    ("text", "goes", "left"),
    [
        ("one two three", "010", "one three"),
        ("one two\n\nthree four", "0100", "one\n\nthree four"),
        ("one\n\ntwo three", "010", "one\n\nthree"),
        ("title\ncut here\nnext", "0110", "title\nnext"),
        ("  cut here  then", "110", "then"),
        ("then cut here \n", "011", "then"),
        ("a b c d e", "01010", "a c e"),
        ("\u4e2d\u6587\u5b57 x", "0100", "\u4e2d\u5b57 x"),
        (" all ", "1", ""),
        (" a ", "0", " a "),
    ],
)
def test_what_is_left_around_a_cut(text: str, goes: str, left: str) -> None:
    marks = np.array([mark == "1" for mark in goes])
    assert substring.cut_tokens(text, marks)[0] == left


def test_samples_name_the_document_in_which_the_passage_stays(tmp_path: Path) -> None:
    words = " ".join(f"w{i}" for i in range(60))
    documents = [{"id": f"d{i}", "text": f"{words} {' '.join(f'own{i}-{j}' for j in range(30))}"} for i in range(4)]
    kept, _, cuts = run(tmp_path, documents, 2, SubstringSettings(min_tokens_left=20))
    whole = [id for id, text in kept.items() if text.startswith(words)]
    assert len(whole) == 1 and len(kept) == 4
    assert {sample["stays_in"] for sample in cuts.samples} == set(whole)
    assert {sample["id"] for sample in cuts.samples} == set(kept) - set(whole)
    assert all(words.startswith(sample["text"]) for sample in cuts.samples)
