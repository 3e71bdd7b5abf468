"""Packing: bins, the label-aligned mask, sub-sequence starts, and independence of the order of arrival."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nemotron.data_prep.conversations import Conversation
from nemotron.data_prep.packing import best_fit, pack, tokenize_conversations
from nemotron.data_prep.tokenizer import train_tokenizer
from nemotron.kit.chat import render


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["user assistant two plus two is four " * 50], 300)


def conversation(number: int, **more: Any) -> Conversation:
    answer = {"role": "assistant", "content": str(number), **more}
    return Conversation("math", [{"role": "user", "content": f"{number} plus nothing?"}, answer], "train")


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_places_everything_once_and_wastes_little(lengths: list[int]) -> None:
    bins = best_fit(lengths, 20)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in members) <= 20 for members in bins)
    # Any-fit algorithms use at most 1.7 times the optimum (Johnson 1974), which is at least the sum over the capacity.
    assert len(bins) <= 1.7 * max(1, -(-sum(lengths) // 20)) + 1


def test_best_fit_chooses_the_fullest_bin_that_fits() -> None:
    # Free after two items: 5 and 2. An item of 2 goes to the second bin, one of 5 to the first.
    assert best_fit([5, 8, 2, 5], 10) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="item 0 has length 11"):
        best_fit([11], 10)


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


def test_rows_hold_every_conversation_with_its_mask(tokenizer: Tokenizer, tmp_path: Path) -> None:
    items = list(tokenize_conversations([conversation(i) for i in range(40)], tokenizer))
    statistics = pack(items, 64, tmp_path / "train.parquet")
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
