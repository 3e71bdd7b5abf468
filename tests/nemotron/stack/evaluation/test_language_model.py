"""Bits per byte: closed forms, independence of the batching, and the bytes of tokens."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nemotron.kit import metrics
from nemotron.stack.evaluation.language_model import (
    bits_per_byte_of,
    model_bits_per_byte,
    score_text,
    token_byte_lengths,
)
from nemotron.stack.evaluation.trigram import InterpolatedTrigram


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
    assert score == pytest.approx(4 / 2, rel=1e-6)


@pytest.mark.parametrize(("seq_len", "batch_size"), [(7, 2), (10, 3), (100, 1), (1000, 4), (1, 50)])
def test_every_token_is_predicted_once_however_the_stream_is_cut(seq_len: int, batch_size: int) -> None:
    rng = np.random.default_rng(1)
    tokens, table = rng.integers(0, 10, 101), torch.from_numpy(rng.normal(size=(10, 10)))
    lengths = rng.integers(0, 4, 10)
    logp = torch.log_softmax(table, -1)
    expected = -sum(float(logp[a, b]) for a, b in itertools.pairwise(tokens))
    model = Bigram(table).train()
    score = model_bits_per_byte(model, tokens, lengths, seq_len=seq_len, batch_size=batch_size)
    assert score == pytest.approx(expected / math.log(2) / sum(lengths[token] for token in tokens[1:]), rel=1e-6)
    assert model.training


def test_a_label_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.arange(101) % 16
    for label in (None, "web"):
        model_bits_per_byte(Bigram(torch.zeros(16, 16)), tokens, np.full(16, 2), seq_len=8, batch_size=5, label=label)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("web   5/13") and "ETA" in first and last.startswith("web  13/13  100%")


def text_scores(trained: np.ndarray | None, poll: Callable[[], None] = lambda: None) -> dict[str, dict[str, float]]:
    """Two sources: ten documents of five tokens, and a single one."""
    held_out = {"many": [np.arange(5) + i for i in range(10)], "one": [np.arange(9)]}
    model = Bigram(torch.zeros(16, 16))
    return score_text(model, held_out, trained, np.full(16, 2), seq_len=8, batch_size=2, poll=poll)


def test_each_source_is_scored_beside_the_trigram_on_what_did_not_fit_it() -> None:
    trained = np.arange(160) % 16
    scores = text_scores(trained)
    assert (scores["many"]["tokens"], scores["many"]["bytes"]) == (9 * 5 - 1, 2 * (9 * 5 - 1))
    assert scores["many"]["bits_per_byte"] == pytest.approx(4 / 2, rel=1e-6)
    trigram = InterpolatedTrigram(trained, 16)
    trigram.fit(np.arange(5))
    nats = trigram.nll(np.concatenate([np.arange(5) + i for i in range(1, 10)])).sum()
    assert scores["many"]["trigram_bits_per_byte"] == pytest.approx(nats / math.log(2) / 88)
    # A single document is scored, and leaves none to fit the trigram with.
    assert scores["one"]["tokens"] == 8 and "trigram_bits_per_byte" not in scores["one"]
    for nothing in (None, np.empty(0, np.int64)):
        assert all("trigram_bits_per_byte" not in of_source for of_source in text_scores(nothing).values())


def test_counting_that_takes_long_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_PLAIN_SECONDS", 0.0)
    text_scores(np.arange(160) % 16)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("count trigrams")]
    assert [line.split()[2] for line in lines] == ["0/3", "1/3", "2/3", "3/3"]
    assert "tok/s" in lines[1] and "ETA" in lines[1]


@pytest.mark.parametrize("polls", [1, 2, 20])
def test_it_can_be_left_before_counting_and_between_batches_and_iterations(polls: int) -> None:
    left = iter([None] * (polls - 1))
    with pytest.raises(StopIteration):
        text_scores(np.arange(160) % 16, poll=lambda: next(left))


def test_text_without_bytes_or_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no bytes"):
        bits_per_byte_of(1.0, 0)
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


def test_the_bytes_of_tokens_that_are_text_add_up_too() -> None:
    """As in SentencePiece: U+2581 for a blank, single bytes for what is unknown; and an added token."""
    text = "Größe und Höhe über 中文字"
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special[:2], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    vocabulary = tokenizer.get_vocab() | {name: tokenizer.get_vocab_size() + i for i, name in enumerate(special[2:])}
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer.add_tokens(["   "])
    lengths = token_byte_lengths(tokenizer)
    for sample in (text, "new: ж, 日本", "a   b"):
        assert lengths[tokenizer.encode(sample).ids].sum() == len(sample.encode()), sample
    assert lengths[tokenizer.token_to_id("</s>")] == 0
