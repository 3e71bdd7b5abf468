"""Bits per byte on held-out text: a language model's loss in a unit that does not depend on the tokenizer.

bits per byte = sum of the negative log-likelihoods of all predicted tokens (nats) / ln 2 / UTF-8 bytes of their text.
End-of-document tokens are predicted and cost bits, but have no bytes. N windows, L tokens a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from nemotron.stack.evaluation.trigram import InterpolatedTrigram
from nemotron.stack.training.losses import token_losses


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """A score with what it was computed from."""

    bits_per_byte: float
    nll_nats: float
    tokens: int
    bytes: int


def bits_per_byte_of(nll_nats: float, tokens: int, num_bytes: int) -> BitsPerByte:
    """The score from a summed negative log-likelihood in nats and the bytes of the text that it covers."""
    if num_bytes <= 0:
        raise ValueError("the held-out text has no bytes")
    return BitsPerByte(nll_nats / math.log(2) / num_bytes, nll_nats, tokens, num_bytes)


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """[V] UTF-8 bytes that each token of a byte-level BPE stands for; special tokens stand for none.

    In a byte-level vocabulary every byte is written as one character, so a token has as many bytes as characters.
    """
    lengths = np.zeros(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    special = set(tokenizer.get_added_tokens_decoder())
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index not in special:
            lengths[index] = len(token)
    return lengths


def model_bits_per_byte(
    model: torch.nn.Module,
    tokens: np.ndarray,
    byte_lengths: np.ndarray,
    *,
    seq_len: int,
    batch_size: int = 16,
    poll: Callable[[], None] = lambda: None,
) -> BitsPerByte:
    """Bits per byte of a model on one held-out token stream.

    The stream is cut into windows of `seq_len` as in training; every token but the first of the stream is predicted
    exactly once, from the tokens before it in its window.

    Args:
        model: called as `model(input_ids_NL).logits`, [N, L, V].
        tokens: [T] documents joined as in training, end-of-document tokens included.
        byte_lengths: [V] bytes of each token (`token_byte_lengths`).
        poll: called before each batch; raises to stop.
    """
    stream = np.asarray(tokens, dtype=np.int64)
    if len(stream) < 2:
        raise ValueError("the held-out text has fewer than two tokens")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    full = (len(stream) - 1) // seq_len
    windows = [stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(full)]
    batches = [np.stack(windows[i : i + batch_size]) for i in range(0, full, batch_size)]
    if (len(stream) - 1) % seq_len:
        batches.append(stream[None, full * seq_len :])
    try:
        with torch.inference_mode():
            for batch in batches:
                poll()
                ids_NL = torch.from_numpy(batch).to(device)
                logits_NLV = model(ids_NL[:, :-1]).logits
                # Summed in fp64: a sum of many thousand fp32 losses loses digits.
                total += float(token_losses(logits_NLV, ids_NL[:, 1:]).double().sum())
    finally:
        model.train(was_training)
    return bits_per_byte_of(total, len(stream) - 1, int(byte_lengths[stream[1:]].sum()))


def trigram_baseline(
    trained_tokens: np.ndarray | None,
    documents: Sequence[np.ndarray],
    byte_lengths: np.ndarray,
    poll: Callable[[], None] = lambda: None,
) -> tuple[float | None, np.ndarray]:
    """The trigram's bits per byte on held-out documents, and the stream that it was scored on, for the model as well.

    Every tenth document sets the weights of the trigram's interpolation and is not scored. The bits are None where
    there is nothing to count or nothing left to score.

    Args:
        trained_tokens: [N] as `train_tokens` of `trigram_bits_per_byte`; None: no baseline.
        documents: token ids of the held-out documents, one array each; at least one.
        byte_lengths: [V] bytes of each token.
        poll: called between counting, fitting and scoring, and while fitting; raises to stop.
    """
    fit, scored = documents[::10], [document for i, document in enumerate(documents) if i % 10]
    stream = np.concatenate(scored or fit)
    if trained_tokens is None or len(trained_tokens) == 0 or not scored:
        return None, stream
    return trigram_bits_per_byte(trained_tokens, np.concatenate(fit), stream, byte_lengths, poll).bits_per_byte, stream


def trigram_bits_per_byte(
    train_tokens: np.ndarray,
    fit_tokens: np.ndarray,
    tokens: np.ndarray,
    byte_lengths: np.ndarray,
    poll: Callable[[], None] = lambda: None,
) -> BitsPerByte:
    """Bits per byte of the interpolated trigram baseline on the same held-out stream.

    Args:
        train_tokens: [N] exactly the tokens that the compared model was trained on, in order; they are counted.
        fit_tokens: tokens of other documents, neither counted nor scored; they set the interpolation weights.
        tokens: [T] the held-out stream to score.
        byte_lengths: [V] bytes of each token.
        poll: as in `trigram_baseline`.
    """
    poll()
    trigram = InterpolatedTrigram(train_tokens, len(byte_lengths))
    trigram.fit(fit_tokens, poll=poll)
    poll()
    stream = np.asarray(tokens, dtype=np.int64)
    return bits_per_byte_of(float(trigram.nll(stream).sum()), len(stream) - 1, int(byte_lengths[stream[1:]].sum()))
