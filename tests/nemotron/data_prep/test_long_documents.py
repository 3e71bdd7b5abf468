"""Long documents with questions: what is asked, where the answer stands, and the blend that they are mixed into."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.long_documents import LongPhase, by_hash, long_document, questions_about, write_long_phase
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.tokens.blend import Blend, write_source
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset
from nemotron.data_prep.tokens.tokenizer import EOS_ID, train_tokenizer
from nemotron.stack.training.loaders import BlendLoader


def module(seed: int, functions: int = 120) -> str:
    """Python code whose names and docstrings nothing else has."""
    draw = random.Random(seed)
    words = [f"{draw.choice('bdfgklmnprst')}{draw.choice('aeiou')}{seed}{i}" for i in range(functions)]
    return "\n\n".join(
        f'def {word}(x, y={i}):\n    """Return what {word} makes of {words[-i]}."""\n    return x * {i} + len(str(x))\n'
        for i, word in enumerate(words)
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([module(seed) for seed in range(8)], 300, template="nano2")


def test_texts_come_by_their_hashes_with_a_batch_of_them_in_memory() -> None:
    texts, readings = [f"text {i}" for i in range(30)], []

    def read() -> list[str]:
        readings.append(len(readings))
        return texts

    ordered = sorted(texts, key=lambda text: stable_hash("7", text))
    given = by_hash(read, 7, 4)
    assert [next(given) for _ in range(4)] == ordered[:4] and len(readings) == 1
    assert list(given) == ordered[4:] and len(readings) == 4  # 4, 8 and 16 of them, the rest
    assert list(by_hash(read, 7, 30)) == list(by_hash(read, 7, 31)) == ordered
    assert list(by_hash(list, 7, 4)) == []


def test_a_question_has_one_answer() -> None:
    text = (
        'def first(x):\n    """Return the first one of x."""\n\n\n'
        'class Second:\n    r"""Hold the second one,\n\n    and more."""\n\n'
        '    def __init__(self):\n        """Begin with nothing at all."""\n\n'
        '    def again(self):\n        """Do what was done before."""\n\n'
        '    def again(self):\n        """Do what was done behind."""\n\n'
        '    async def third(self):\n        """Short."""\n'
    )
    asked = {question.name: question.answer for question in questions_about(text)}
    assert asked == {"first": "Return the first one of x.", "Second": "Hold the second one,"}


def test_answers_stand_in_the_document_far_before_the_question(tokenizer: Tokenizer) -> None:
    text = module(1)
    document = long_document(text, tokenizer, EOS_ID)
    assert document is not None
    ids, mask = document
    assert ids.shape == mask.shape == (1024,) and ids[-1] == EOS_ID
    labels = np.flatnonzero(mask) + 1  # the mask is one place earlier than the tokens
    answers = tokenizer.decode(ids[labels]).splitlines()
    for answer in answers:
        assert answer in tokenizer.decode(ids[:769]) and answer not in tokenizer.decode(ids[768 : labels[0]])
    assert 1 <= len(set(answers)) == len(answers) == tokenizer.decode(ids[768:]).count("Question: what does ")
    body = tokenizer.decode(ids).partition("\n\nQuestion")[0]
    assert text.startswith(body[:-4])  # its last character may be cut
    assert long_document(text[:500], tokenizer, EOS_ID) is None


def test_what_looks_like_the_end_of_a_document_is_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = {"train": ["old <s>wrong</s> price"]}
    write_source(tmp_path, "code", texts, tokenizer, EOS_ID)
    ids = IndexedDataset(tmp_path / "code-train").tokens
    assert list(ids).count(EOS_ID) == 1 and ids[-1] == EOS_ID
    assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == texts["train"][0]


def test_a_fifth_is_long_documents_and_the_rest_as_the_last_phase_had_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = {"train": [module(seed) for seed in range(6)], "valid": [module(seed) for seed in (6, 7)]}
    code, tasks = (write_source(tmp_path, name, texts, tokenizer, EOS_ID) for name in ("code", "tasks"))
    blend: Blend = {
        "phases": [
            {"name": "first", "until": 0.5, "weights": {"code": 1.0}},
            {"name": "last", "until": 1.0, "weights": {"code": 0.25, "tasks": 0.75}},
        ],
        "sources": {"code": code, "tasks": tasks},
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_id": EOS_ID,
    }
    assert write_long_phase(tmp_path, blend, texts, tokenizer) == 6
    loader = BlendLoader(tmp_path / "long", 1024, 100, seed=0)
    batch = loader.next_batch(100)
    assert {row.source: row.sequences for row in loader.mixture()} == {"code": 20, "tasks": 60, "long": 20}
    # A window of the source `long` is a document: of the others none ends in a question.
    ends = [tokenizer.decode(row[-120:].tolist()) for row in batch.input_ids_BL]
    assert sum("Question: what does" in end for end in ends) == 20
    # What is held out is in no training document.
    trained = tokenizer.decode(np.fromfile(tmp_path / "long" / "long-train.bin", "<u2"))
    rows = pq.read_table(tmp_path / "long" / "valid.parquet").to_pylist()
    assert len(rows) == 2 and sum(sum(row["loss_mask"]) for row in rows) > 0
    for row in rows:
        labels = np.flatnonzero(row["loss_mask"]) + 1
        answer = tokenizer.decode(np.array(row["input_ids"])[labels]).strip()
        assert answer and answer not in trained
    assert json.loads((tmp_path / "long" / "blend.json").read_text())["sources"]["code"]["train"] == ["../code-train"]
    assert write_long_phase(tmp_path / "none", blend, {"train": [], "valid": []}, tokenizer) == 0
    assert not (tmp_path / "none").exists()


def test_other_documents_take_their_share_and_sizes_are_those_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = {"train": [module(seed) for seed in range(6)], "valid": [module(6)]}
    blend: Blend = {
        "phases": [{"name": "last", "until": 1.0, "weights": {"code": 1.0}}],
        "sources": {"code": write_source(tmp_path, "code", texts, tokenizer, EOS_ID)},
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_id": EOS_ID,
    }
    phase = LongPhase(length=512, asked_about=384, share=0.25, most=3)
    other = [np.full(512, 9 + i, np.int32) for i in range(4)]
    assert write_long_phase(tmp_path, blend, texts, tokenizer, phase, {"facts": (0.125, other)}) == 3
    written = json.loads((tmp_path / "long" / "blend.json").read_text())
    assert written["phases"][0]["weights"] == {"code": 0.625, "long": 0.25, "facts": 0.125}
    assert [written["sources"][name]["tokens"] for name in ("long", "facts")] == [3 * 512, 4 * 512]
    loader = BlendLoader(tmp_path / "long", 512, 80, seed=0)
    rows = loader.next_batch(80).input_ids_BL
    assert sum(len(set(row.tolist())) == 1 for row in rows) == 10  # whole documents, an eighth of all
    # Without questions the others are the long documents.
    (tmp_path / "facts").mkdir()
    none: dict[str, list[str]] = {"train": [], "valid": []}
    assert write_long_phase(tmp_path / "facts", blend, none, tokenizer, phase, {"facts": (0.5, other)}) == 0
    weights = json.loads((tmp_path / "facts" / "long" / "blend.json").read_text())["phases"][0]["weights"]
    assert weights == {"code": 0.5, "facts": 0.5}
