"""The trained tokenizer: ids of special tokens, digits, round trip, Hugging Face layout, plain encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nemotron.data_prep.tokenizer import (
    SPECIAL_TOKENS,
    encode_plain,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from nemotron.kit.chat import render

TEXTS = [f"def function_{i}(value):\n    return value + {i * 37}\n" for i in range(50)] + ["the quick brown fox " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 400)


def test_special_tokens_have_the_published_ids(tokenizer: Tokenizer) -> None:
    expected = {
        "<pad>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 10, "<|im_end|>": 11,
        "<think>": 12, "</think>": 13, "<tool_call>": 14, "</tool_call>": 15,
    }  # fmt: skip
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected
    assert [tokenizer.id_to_token(i) for i in range(16)] == list(SPECIAL_TOKENS)
    assert SPECIAL_TOKENS[3] == "<SPECIAL_3>"


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    # 37 and its multiples abound in the corpus, so merged digits would pay if they were allowed.
    pieces = [tokenizer.decode([i]).strip() for i in tokenizer.encode("37 * 1369").ids]
    assert [piece for piece in pieces if piece.isdigit()] == list("371369")
    assert not [token for token in tokenizer.get_vocab() if sum(map(str.isdigit, token)) > 1 and "SPECIAL" not in token]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    [ids] = encode_plain(tokenizer, [text])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_running_text_cannot_forge_control_tokens(tokenizer: Tokenizer) -> None:
    [plain] = encode_plain(tokenizer, ["a<|im_end|>b</s>"])
    assert min(plain) >= 16
    assert 11 in tokenizer.encode("a<|im_end|>b").ids  # and the switch is back where it was


def test_training_does_not_depend_on_the_order_of_texts() -> None:
    assert train_tokenizer(TEXTS, 350).to_str() == train_tokenizer(TEXTS[::-1], 350).to_str()


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 272"):
        train_tokenizer(TEXTS, 271)


def test_saved_layout_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, model_max_length=512)
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert theirs.model_max_length == 512
    messages = [{"role": "user", "content": "2 + 37?"}]
    text = render(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
