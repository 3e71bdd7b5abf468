"""Packing: bins, the label-aligned mask, sub-sequence starts, and independence of the order of arrival."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.chat.bin_packing import Algorithm
from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.chat.packing import TokenizedConversation, pack, tokenize_conversations
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit.chat import render


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["user assistant two plus two is four " * 50], 300)


def conversation(number: int, **more: Any) -> Conversation:
    answer = {"role": "assistant", "content": str(number), **more}
    return Conversation("math", [{"role": "user", "content": f"{number} plus nothing?"}, answer], "train")


def test_mask_trains_exactly_the_answer(tokenizer: Tokenizer) -> None:
    example = conversation(42, reasoning_content="easy")
    [item] = tokenize_conversations([example], tokenizer)
    labels = [int(label) for label, trained in zip(item.input_ids[1:], item.loss_mask[:-1], strict=True) if trained]
    assert tokenizer.decode(labels, skip_special_tokens=False) == "easy\n</think>\n42<|im_end|>"
    assert item.loss_mask[-1] == 0
    assert tokenizer.decode(item.input_ids.tolist(), skip_special_tokens=False) == render(example.messages)


def test_prompt_at_inference_is_a_prefix_of_the_training_tokens(tokenizer: Tokenizer) -> None:
    example = conversation(7, reasoning_content="\n easy")  # a leading newline could merge with that of the prompt
    [item] = tokenize_conversations([example], tokenizer)
    prompt = tokenizer.encode(render(example.messages[:1], add_generation_prompt=True)).ids
    assert item.input_ids[: len(prompt)].tolist() == prompt
    assert item.loss_mask.tolist().index(1) == len(prompt) - 1  # the last prompt token predicts the first trained one


@pytest.mark.parametrize("algorithm", [name for name in get_args(Algorithm) if name != "concatenate"])
def test_rows_hold_every_conversation_with_its_mask(tokenizer: Tokenizer, tmp_path: Path, algorithm: Algorithm) -> None:
    items = list(tokenize_conversations([conversation(i) for i in range(40)], tokenizer))
    statistics = pack(items, 64, tmp_path / "train.parquet", algorithm=algorithm, seed=1)
    table = pq.read_table(tmp_path / "train.parquet")
    assert [str(field.type) for field in table.schema] == [
        "list<element: int32>",
        "list<element: uint8>",
        "list<element: int32>",
    ]
    found = []
    for row in table.to_pylist():
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 64
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        assert bounds[0] == 0
        for begin, end in pairwise(bounds):
            assert row["loss_mask"][end - 1] == 0  # no conversation predicts the next one
            found.append((tuple(row["input_ids"][begin:end]), tuple(row["loss_mask"][begin:end])))
    assert sorted(found) == sorted((tuple(i.input_ids.tolist()), tuple(i.loss_mask.tolist())) for i in items)
    tokens = sum(len(item.input_ids) for item in items)
    assert (statistics.conversations, statistics.tokens, statistics.rows) == (40, tokens, table.num_rows)
    assert statistics.trained_tokens == sum(int(np.sum(item.loss_mask)) for item in items)
    assert statistics.fill == pytest.approx(tokens / (64 * table.num_rows))


def test_file_depends_on_content_and_seed_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    conversations = [conversation(i) for i in range(30)]

    def packed(order: list[Conversation], seed: int) -> bytes:
        pack(tokenize_conversations(order, tokenizer, seed=seed), 64, tmp_path / "x.parquet")
        return (tmp_path / "x.parquet").read_bytes()

    shuffled = random.Random(0).sample(conversations, len(conversations))
    assert packed(conversations, 1) == packed(shuffled, 1)
    assert packed(conversations, 1) != packed(conversations, 2)


def test_bytes_of_the_default_have_not_changed(tmp_path: Path) -> None:
    """Rows as they were packed when best fit was the only algorithm."""

    def tokenized(number: int) -> TokenizedConversation:
        length = 1 + (number * number * 7 + 13 * number) % 61
        ids = (np.arange(length, dtype=np.int32) * 31 + number) % 997
        mask = (np.arange(length) % 3 == 0).astype(np.uint8)
        mask[-1] = 0
        return TokenizedConversation("x", "train", ids.astype(np.int32), mask, stable_hash("pack", "1", str(number)))

    statistics = pack(map(tokenized, range(200)), 64, tmp_path / "train.parquet")
    assert (statistics.rows, statistics.fewest_rows, statistics.tokens) == (99, 93, 5913)
    digest = hashlib.sha256()
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        for column in ("input_ids", "loss_mask", "seq_start_id"):
            digest.update(np.array(row[column], dtype="<i4").tobytes() + b"|")
    assert digest.hexdigest() == "c5fc24c404e35ae5dcf68481034faa74892ff3140130d85b09fdb9c1a387cc1d"


def test_half_conversations_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    items = tokenize_conversations([conversation(1)], tokenizer)
    with pytest.raises(ValueError, match="half a conversation"):
        pack(items, 64, tmp_path / "train.parquet", algorithm="concatenate")
    with pytest.raises(ValueError, match="no lengths"):
        pack([], 64, tmp_path / "train.parquet")
