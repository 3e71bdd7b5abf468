"""Retrieval from long text: facts are strewn over a document, and at its end each is asked for by its beginning.

In the style of RULER's needle in a haystack with several keys and several questions (arXiv 2404.06654, section 3): a
fact gives a key word a value, other text of the data stands between the facts, and the questions repeat a fact up to
its value. Which value a key has is drawn anew for every document, so nothing but the document tells it: a model that
does not look back is right once in as many times as there are values, and one that only knows which values occur once
in as many times as there are facts. Words are single tokens of the tokenizer, so that a small model spends its
capacity on looking back and not on spelling.

Documents for training (the synthetic retrieval of Nemotron 3 Nano's long-context blend, 1 % of it: arXiv 2512.20848,
section 2.5) and for the score are made here, between text of different splits. No torch.

Shapes: L tokens of a document, N documents, F facts a document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError

SOURCE = "retrieval"
FACT, END = "\nThe code for{key} is", ".\n"


@dataclass(frozen=True)
class Words:
    """Ids of single-token words, those that are keys and those that are values; what is written around them."""

    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    before_key: tuple[int, ...]
    before_value: tuple[int, ...]
    after_value: tuple[int, ...]

    @property
    def fact_len(self) -> int:
        """Tokens of a fact: also of a question with its answer."""
        return len(self.before_key) + 1 + len(self.before_value) + 1 + len(self.after_value)

    def fact(self, key: int, value: int) -> list[int]:
        """Ids of the fact that `key` has `value`."""
        return [*self.before_key, key, *self.before_value, value, *self.after_value]


def single_token_words(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Words of three letters or more that are one token with the space before them, with that token, sorted.

    The byte-level alphabet writes a space as U+0120.
    """
    return sorted((t, index) for t, index in tokenizer.get_vocab().items() if re.fullmatch("\u0120[a-z]{3,}", t))


def find_words(tokenizer: Tokenizer, count: int) -> Words:
    """Words that are one token each: `count` keys, as many values.

    UserError: the tokenizer has fewer, or writes a fact otherwise than as its parts.
    """
    found = single_token_words(tokenizer)
    if len(found) < 2 * count:
        raise UserError(
            f"{2 * count} words of one token are asked for, and the tokenizer has {len(found)}",
            "ask for fewer words, or give it a larger tokenizer.vocab_size",
        )
    # Spread over the alphabet, so that no two of few words begin alike.
    found = [found[i * len(found) // (2 * count)] for i in range(2 * count)]
    ids = np.array([index for _, index in found], np.int64)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    head, _, tail = FACT.partition("{key}")
    words = Words(ids[::2], ids[1::2], tuple(encode(head)), tuple(encode(tail)), tuple(encode(END)))
    key, value = found[0][0], found[1][0]
    text = FACT.replace("{key}", key.replace("\u0120", " ")) + value.replace("\u0120", " ") + END
    if encode(text) != words.fact(found[0][1], found[1][1]):
        raise UserError("the tokenizer does not divide a fact of retrieval at its words")
    return words


@dataclass(frozen=True)
class Documents:
    """What documents are like.

    length: tokens, the last of which is `eos_id`. facts: in each, every one asked for. words: that are keys, and as
    many that are values. repeats: how often a fact stands in the text: documents to learn from say each many times, and
    all but the first can be known.
    """

    length: int
    facts: int
    words: int
    eos_id: int
    repeats: int = 1

    def make(
        self, tokenizer: Tokenizer, haystack: NDArray[Any], count: int, seed: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """`count` documents: ids, int32 [L]; mask, uint8 [L], label-aligned, 1 where the next token is an answer.

        Facts stand at random places before the questions, `haystack`, a stream of token ids, between them. Document
        number i is a function of (seed, i) and the stream. UserError: facts and questions alone are longer than that.
        """
        words = find_words(tokenizer, self.words)
        if self.facts > self.words:
            raise UserError(f"{self.facts} facts, but {self.words} words for their values", "each has another one")
        said, facts = self.facts * self.repeats, self.facts
        filler = self.length - 1 - (said + facts) * words.fact_len
        if filler < 0:
            raise UserError(
                f"facts and questions are {self.length - 1 - filler} tokens, the document has {self.length}",
                "ask for fewer facts, or longer documents",
            )
        if len(haystack) < filler:
            raise UserError(f"{filler} tokens of text stand between the facts, and there are {len(haystack)}")
        at_value = words.fact_len - len(words.after_value) - 1
        for i in range(count):
            rng = np.random.default_rng([seed, i])
            keys = rng.choice(words.keys, self.facts, replace=False).tolist()
            values = rng.choice(words.values, self.facts, replace=False).tolist()
            begin = int(rng.integers(len(haystack) - filler + 1))
            places = np.sort(rng.integers(0, filler + 1, said))
            ids, at = list[int](), 0
            for place, fact in zip(places.tolist(), rng.permutation(np.arange(said) % facts).tolist(), strict=True):
                ids += haystack[begin + at : begin + place].tolist() + words.fact(keys[fact], values[fact])
                at = place
            ids += haystack[begin + at : begin + filler].tolist()
            mask = np.zeros(self.length, np.uint8)
            for fact in rng.permutation(self.facts).tolist():
                mask[len(ids) + at_value - 1] = 1  # the label there is the value
                ids += words.fact(keys[fact], values[fact])
            yield np.array([*ids, self.eos_id], np.int32), mask
