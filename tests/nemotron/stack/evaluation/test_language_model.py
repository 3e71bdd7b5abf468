"""Bits per byte: closed forms, independence of the batching, and the bytes of tokens."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotron.stack.evaluation import bits_per_byte_of, model_bits_per_byte, token_byte_lengths


class Bigram(torch.nn.Module):
    """Logits of the next token that depend on the current one only, so that windows cannot matter."""

    def __init__(self, logits_VV: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(logits_VV)

    def forward(self, ids_NL: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[ids_NL])


def test_a_uniform_model_pays_log2_of_the_vocabulary_per_token() -> None:
    tokens = np.random.default_rng(0).integers(0, 16, 101)
    score = model_bits_per_byte(Bigram(torch.zeros(16, 16)), tokens, np.full(16, 2), seq_len=8)
    assert score.bits_per_byte == pytest.approx(4 / 2, rel=1e-6)
    assert (score.tokens, score.bytes) == (100, 200)


@pytest.mark.parametrize(("seq_len", "batch_size"), [(7, 2), (10, 3), (100, 1), (1000, 4), (1, 50)])
def test_every_token_is_predicted_once_however_the_stream_is_cut(seq_len: int, batch_size: int) -> None:
    rng = np.random.default_rng(1)
    tokens, table = rng.integers(0, 10, 101), torch.from_numpy(rng.normal(size=(10, 10)))
    lengths = rng.integers(0, 4, 10)
    logp = torch.log_softmax(table, -1)
    expected = -sum(float(logp[a, b]) for a, b in itertools.pairwise(tokens))
    model = Bigram(table).train()
    score = model_bits_per_byte(model, tokens, lengths, seq_len=seq_len, batch_size=batch_size)
    assert score.nll_nats == pytest.approx(expected, rel=1e-6)
    assert score.bytes == sum(lengths[token] for token in tokens[1:])
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / score.bytes)
    assert model.training


def test_text_without_bytes_or_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no bytes"):
        bits_per_byte_of(1.0, 1, 0)
    with pytest.raises(ValueError, match="fewer than two"):
        model_bits_per_byte(Bigram(torch.zeros(4, 4)), np.array([1]), np.ones(4), seq_len=8)


def test_the_bytes_of_tokens_add_up_to_the_bytes_of_the_text() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "def naïve(x):\n    return '日本語 ü' # 🙂 twice twice\t\n" * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", AddedToken("</s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    lengths = token_byte_lengths(tokenizer)
    assert len(lengths) == tokenizer.get_vocab_size()
    assert lengths[tokenizer.token_to_id("</s>")] == 0
    for sample in (text, "ä", "🙂🙂", "never seen: ж"):
        assert lengths[tokenizer.encode(sample + "</s>").ids].sum() == len(sample.encode())
