"""Documents of retrieval: what is asked stands in them once before, and looking back by the key answers all of it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit.schemas.pretraining import RetrievalConfig
from nemotron.stack.evaluation.language_model import score_answers
from nemotron.stack.evaluation.long_text import batches_of, check_retrieval
from nemotron.stack.evaluation.retrieval import Documents, find_words

WORDS = ["river", "stone", "cloud", "window", "letter", "garden", "silver", "number", "castle", "forest", "engine"]
EOS, WORDS_EACH = 2, 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=40)) + ".\nThe code for that is\n" for _ in range(60)]
    return train_tokenizer(texts, 420, template="nano3")


HAYSTACK = np.arange(280, 400).repeat(3)


def documents(
    tokenizer: Tokenizer, length: int = 120, facts: int = 3, count: int = 8, seed: int = 5, repeats: int = 1
) -> list[Any]:
    return list(Documents(length, facts, WORDS_EACH, EOS, repeats).make(tokenizer, HAYSTACK, count, seed))


def test_each_fact_stands_once_and_is_asked_for_once(tokenizer: Tokenizer) -> None:
    words = find_words(tokenizer, WORDS_EACH)
    assert len({*words.keys.tolist(), *words.values.tolist()}) == 2 * WORDS_EACH
    for ids, mask in documents(tokenizer):
        assert ids.shape == mask.shape == (120,) and ids[-1] == EOS and mask.sum() == 3
        text = tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False)
        for label in np.flatnonzero(mask) + 1:  # the mask is one place earlier than the tokens
            value = int(ids[label])
            key = int(ids[label - 1 - len(words.before_value)])
            assert key in words.keys and value in words.values
            said = f"\nThe code for{tokenizer.decode([key])} is{tokenizer.decode([value])}.\n"
            assert text.count(said) == 2  # the fact, and the question with its answer
        questions = int(np.flatnonzero(mask)[0]) + 2 - words.fact_len + len(words.after_value)
        body = ids[:questions].tolist()
        for position in np.flatnonzero(mask):
            fact = words.fact(int(ids[position - len(words.before_value)]), int(ids[position + 1]))
            (at,) = (i for i in range(len(body)) if body[i : i + words.fact_len] == fact)
            del body[at : at + words.fact_len]
        # What is left is the text as it was.
        assert any(HAYSTACK[i : i + len(body)].tolist() == body for i in range(len(HAYSTACK)))


def test_documents_to_learn_from_say_each_fact_many_times(tokenizer: Tokenizer) -> None:
    words = find_words(tokenizer, WORDS_EACH)
    for ids, mask in documents(tokenizer, length=300, facts=2, repeats=7, count=3):
        assert mask.sum() == 2
        for position in np.flatnonzero(mask):
            fact = words.fact(int(ids[position - len(words.before_value)]), int(ids[position + 1]))
            assert sum(ids[i : i + len(fact)].tolist() == fact for i in range(len(ids))) == 7 + 1


def test_documents_follow_from_seed_and_number(tokenizer: Tokenizer) -> None:
    first, again = documents(tokenizer), documents(tokenizer, count=3)
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(first, again, strict=False))
    other = documents(tokenizer, seed=6)
    assert not any(np.array_equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


class LooksBack(nn.Module):
    """Says what came after the last place where the same key stood in the same words; knows nothing else."""

    def __init__(self, before_value: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.back = before_value

    def forward(self, ids_BL: torch.Tensor, _: None, select_BL: torch.Tensor) -> SimpleNamespace:
        rows = []
        for b, t in select_BL.nonzero().tolist():
            ids = ids_BL[b].tolist()
            key = ids[t - self.back]
            between = ids[t + 1 - self.back : t + 1]
            earlier = [i for i in range(t - self.back) if ids[i : i + 1 + self.back] == [key, *between]]
            rows.append(nn.functional.one_hot(torch.tensor(ids[earlier[-1] + self.back + 1]), 512).float() * 50)
        return SimpleNamespace(logits=torch.stack(rows))


def test_looking_back_by_the_key_answers_all_of_it(tokenizer: Tokenizer) -> None:
    words = find_words(tokenizer, WORDS_EACH)
    made = documents(tokenizer)
    scores = score_answers(LooksBack(len(words.before_value)), batches_of(made, 3, torch.device("cpu")))
    assert scores["accuracy"] == 1 and scores["tokens"] == 24 and scores["loss"] < 1e-6


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="facts and questions are"):
        documents(tokenizer, length=40)
    with pytest.raises(UserError, match="6 facts, but 5 words for their values"):
        documents(tokenizer, facts=6)
    with pytest.raises(UserError, match="words of one token are asked for"):
        find_words(tokenizer, 500)
    with pytest.raises(UserError, match="tokens of text stand between"):
        documents(tokenizer, length=4000)
    settings = RetrievalConfig(lengths=[120, 64], num_documents=4, facts=[2, 6], words=WORDS_EACH, seed=0)
    with pytest.raises(UserError, match=r"evaluation\.retrieval, 6 facts in 120 tokens: 6 facts, but 5 words"):
        check_retrieval(tokenizer, [HAYSTACK], settings)
    check_retrieval(tokenizer, [HAYSTACK], settings.model_copy(update={"facts": [2], "lengths": [120]}))
