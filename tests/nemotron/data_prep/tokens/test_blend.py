"""The blend: weights and phases, the files, and the numbers that bits per byte needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.corpus import Corpus, curate
from nemotron.data_prep.sources.documents import Document
from nemotron.data_prep.tokens.blend import (
    Phase,
    add_shares,
    average_weights,
    resolve_phases,
    sample_texts,
    write_blend,
)
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset
from nemotron.data_prep.tokens.tokenizer import train_tokenizer


def phase(until: float, **weights: float) -> Phase:
    return {"name": f"to {until}", "until": until, "weights": weights}


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    documents = [Document("a", str(i), f"alpha é {i}", "task", "train") for i in range(5)]
    documents += [Document("a", f"v{i}", f"held out {i}", "task", "valid") for i in range(2)]
    documents += [Document("b", str(i), f"beta <|im_end|> {i}", "task", "train") for i in range(3)]
    return curate(documents, tmp_path / "work")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["alpha beta held out"], 280)


def test_streams_hold_the_documents_and_the_numbers_fit(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    phases = resolve_phases([phase(0.94, a=3, b=1), phase(1.0, b=1)], ["a", "b"])
    blend = write_blend(corpus, tokenizer, phases, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "blend.json").read_text()) == blend
    assert [p["weights"] for p in blend["phases"]] == [{"a": 0.75, "b": 0.25}, {"a": 0.0, "b": 1.0}]
    for name, split, prefix in (("a", "train", "a_train"), ("a", "valid", "a_valid"), ("b", "train", "b_train")):
        dataset = IndexedDataset(tmp_path / "out" / prefix)
        texts = [document.text for document in corpus.documents(name, split)]
        assert all(document[-1] == 2 and (document[:-1] >= 16).all() for document in dataset)  # eos, no forged control
        assert [tokenizer.decode(d[:-1].tolist(), skip_special_tokens=False) for d in dataset] == texts
        source = blend["sources"][name]
        numbers = [source[f"{'valid_' if split == 'valid' else ''}{key}"] for key in ("tokens", "bytes", "documents")]  # type: ignore[literal-required]
        assert numbers == [len(dataset.tokens), sum(len(t.encode()) for t in texts), len(texts)]
        assert source[split] == [prefix]  # type: ignore[literal-required]
    assert blend["sources"]["b"]["valid"] == []
    assert not (tmp_path / "out" / "b_valid.bin").exists()


def test_average_weights() -> None:
    phases = resolve_phases([phase(0.94, a=1, b=1), phase(1.0, b=1)], ["a", "b"])
    assert average_weights(phases) == pytest.approx({"a": 0.47, "b": 0.53})


def test_shares_of_added_sources() -> None:
    [first, second] = add_shares([phase(0.5, a=6, b=2), phase(1.0, a=1, c=1)], {"c": 0.2})
    assert first["weights"] == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2})
    assert second["weights"] == pytest.approx({"a": 0.5, "c": 0.5})  # a phase that names the source decides itself
    [only] = add_shares([phase(1.0)], {"c": 1.0})
    assert only["weights"] == {"c": 1.0}
    with pytest.raises(UserError, match=r"add up to 1\.2"):
        add_shares([phase(1.0, a=1)], {"c": 0.6, "d": 0.6})


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        ([phase(1.0, stdlib_cod=1)], "no source named 'stdlib_cod', did you mean 'stdlib_code'"),
        ([phase(1.0, stdlib_code=-1, b=1)], "weight of 'stdlib_code' is -1, must be 0 or more"),
        ([phase(1.0, stdlib_code=0, b=0)], "all weights are 0"),
        ([phase(0.9, stdlib_code=1, b=1)], "end at 1.0"),
        ([phase(1.0, stdlib_code=1, b=1)] * 2, "must rise"),
        ([phase(1.0, b=1)], "source 'stdlib_code' has no weight in any phase"),
        ([], "end at 1.0"),
    ],
)
def test_bad_phases_are_refused(phases: list[Phase], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        resolve_phases(phases, ["stdlib_code", "b"])


def test_a_weight_without_documents_is_refused(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    phases = resolve_phases([phase(1.0, a=1, b=1, empty=1)], ["a", "b", "empty"])
    with pytest.raises(UserError, match="source 'empty' has a weight in the blend but no training document"):
        write_blend(corpus, tokenizer, phases, tmp_path / "out")


def test_tokenizer_sample_follows_the_shares(corpus: Corpus) -> None:
    sample = list(sample_texts(corpus, {"a": 0.5, "b": 0.5}, 20))  # 10 bytes each: 2 of a (10 and 10), 1 of b
    assert len([text for text in sample if text.startswith("alpha")]) == 1
    assert len([text for text in sample if text.startswith("beta")]) == 1
    everything = list(sample_texts(corpus, {"a": 0.9, "b": 0.1}, 10_000))
    assert len(everything) == len(set(everything)) == 8  # no repetition, and nothing held out
