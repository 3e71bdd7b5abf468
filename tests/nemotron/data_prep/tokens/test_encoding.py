"""Encoding in batches and in windows: the ids of one call for the whole text, whatever the tokenizer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.encoding import Encoder, plain_tokenizer, vocab_size_of
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit.tokenizer import read_tokenizer

SENTENCE = "the quick brown fox jumps over lazy dogs 3.14 naïve 東京タワー 🙂 don't == --> </s> ___"
WORDS = [*SENTENCE.split(), "", "\n\n\t"]
CORPUS = [" ".join(random.Random(i).choices(WORDS, k=60)) for i in range(60)]
# Small, so that a test has many joints: (window, overlap) in characters.
SMALL = ((512, 128),)


def metaspace(split: bool) -> Tokenizer:
    """As of Llama 2: a mark before the text and for every blank; without `split` a text is one word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    # Trained with words in both cases: a merge over the whole text is never worth learning.
    trained_with = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    if trained_with is None:
        data = tokenizer.to_str()
        tokenizer = Tokenizer.from_str(data.replace(_section(data), '"pre_tokenizer":null'))
    return tokenizer


def _section(data: str) -> str:
    begin = data.index('"pre_tokenizer":')
    return data[begin : data.index("}", begin) + 1]


def wordpiece() -> Tokenizer:
    """Normalises (accents, case), and takes whole words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"]))
    return tokenizer


def added() -> Tokenizer:
    """A token that is not special is found in running text, too."""
    tokenizer = train_tokenizer(CORPUS, 400)
    tokenizer.add_tokens([AddedToken("fox jumps", normalized=False), AddedToken("-->", single_word=False)])
    return tokenizer


TOKENIZERS = {
    "byte-level": lambda: train_tokenizer(CORPUS, 500),
    "metaspace": lambda: metaspace(True),
    "no words": lambda: metaspace(False),
    "wordpiece": wordpiece,
    "added": added,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_in_windows_has_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer = plain_tokenizer(TOKENIZERS[kind]().to_str())
    encoder = Encoder(tokenizer, 1, 2)
    rng = random.Random(7)
    joined = 0
    for _ in range(10):
        text = "".join(rng.choice(WORDS) + rng.choice([" ", "  ", "\n", ""]) for _ in range(4000))
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        encoded = encoder.encode_long(text, SMALL)
        if encoded is None:  # windows that do not agree are given up, never joined wrongly
            continue
        tokens, lengths = encoded
        assert tokens.tolist() == [1, *whole, 2]
        assert lengths.tolist() == [len(whole) + 2]
        joined += 1
    assert joined >= 8


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.sampled_from([*WORDS, " ", "\n", "aaaa", "é", "1"]), min_size=600, max_size=1500))
def test_windows_never_join_wrongly(words: list[str]) -> None:
    reference = Tokenizer.from_str(BYTE_LEVEL)
    reference.encode_special_tokens = True
    encoded = Encoder(plain_tokenizer(BYTE_LEVEL)).encode_long("".join(words), SMALL)
    if encoded is not None:
        assert encoded[0].tolist() == reference.encode("".join(words), add_special_tokens=False).ids


BYTE_LEVEL = train_tokenizer(CORPUS, 500).to_str()


def test_a_word_without_end_is_given_up_and_a_wider_window_is_tried_first() -> None:
    encoder = Encoder(plain_tokenizer(BYTE_LEVEL))
    text = "the fox " * 300 + "x" * 700 + " the dogs" * 300
    assert encoder.encode_long("x" * 3000, SMALL) is None
    assert encoder.encode_long(text, SMALL) is None
    wider = encoder.encode_long(text, ((512, 128), (3000, 1500)))
    assert wider is not None
    assert wider[0].tolist() == encoder.encode([text])[0].tolist()


def test_a_text_that_the_last_window_holds_is_encoded_whatever_words_it_has() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "x" * 300_000: 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = ("w" * 999 + " ") * 800 + "x" * 300_000 + (" " + "w" * 999) * 100  # over where the second windows meet
    encoded = Encoder(plain_tokenizer(tokenizer.to_str())).encode_long(text)
    assert encoded is not None and encoded[0].tolist() == [0] * 800 + [1] + [0] * 100


def test_a_batch_is_what_single_texts_are_with_what_stands_around_them() -> None:
    tokenizer = plain_tokenizer(BYTE_LEVEL)
    texts = ["", "the fox", "</s> spelled out", "🙂" * 5]
    tokens, lengths = Encoder(tokenizer, 1, 2).encode(texts)
    ends = np.cumsum(lengths)
    documents = [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
    assert documents[0] == [1, 2]
    assert [document[0] for document in documents] == [1] * 4 and [document[-1] for document in documents] == [2] * 4
    assert all(token >= 16 for document in documents for token in document[1:-1])
    assert [tokenizer.decode(d[1:-1], skip_special_tokens=False) for d in documents] == texts
    bare, lengths = Encoder(tokenizer).encode(texts)
    assert bare.tolist() == [token for document in documents for token in document[1:-1]]
    assert Encoder(tokenizer).encode([])[0].tolist() == []


def test_what_the_file_says_of_cutting_padding_and_chance_is_not_done() -> None:
    wild = Tokenizer.from_str(BYTE_LEVEL)
    wild.enable_truncation(3)
    wild.enable_padding(length=50)
    wild.model.dropout = 0.9
    expected = Encoder(plain_tokenizer(BYTE_LEVEL)).encode(CORPUS[:5])
    found = Encoder(plain_tokenizer(wild.to_str())).encode(CORPUS[:5])
    assert [array.tolist() for array in found] == [array.tolist() for array in expected]
    for text in (wild.to_str(), BYTE_LEVEL):  # of conversations and prompts, with their special tokens
        assert (
            read_tokenizer(text).encode("".join(CORPUS)).ids == read_tokenizer(BYTE_LEVEL).encode("".join(CORPUS)).ids
        )


def test_the_largest_id_counts_not_the_number_of_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    assert vocab_size_of(tokenizer) == 70_001
    with pytest.raises(UserError, match="not a readable tokenizer"):
        plain_tokenizer("{}")
