"""The label-aligned mask, and tokens that are those at inference."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit.chat import render


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["user assistant two plus two is four " * 50], 300)


def conversation(number: int, **more: Any) -> Conversation:
    answer = {"role": "assistant", "content": str(number), **more}
    return Conversation("math", [{"role": "user", "content": f"{number} plus nothing?"}, answer], "train")


def test_prompt_at_inference_is_a_prefix_of_the_training_tokens(tokenizer: Tokenizer) -> None:
    example = conversation(7, reasoning_content="\n easy")  # a leading newline could merge with that of the prompt
    [(ids, mask)] = encode_conversations([example], tokenizer, "nano3")
    prompt = tokenizer.encode(render(example.messages[:1], add_generation_prompt=True, template="nano3")).ids
    assert ids[: len(prompt)].tolist() == prompt
    assert mask.tolist().index(1) == len(prompt) - 1  # the last prompt token predicts the first trained one
