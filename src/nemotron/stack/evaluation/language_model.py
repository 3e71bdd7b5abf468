"""Bits per byte on held-out text: a language model's loss in a unit that does not depend on the tokenizer.

bits per byte = sum of the negative log-likelihoods of all predicted tokens (nats) / ln 2 / UTF-8 bytes of their text.
End-of-document tokens are predicted and cost bits, but have no bytes. N windows, L tokens a window, V vocabulary.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from nemotron.kit.metrics import Progress
from nemotron.stack.evaluation.trigram import COUNTS, InterpolatedTrigram
from nemotron.stack.training.loaders import Batch
from nemotron.stack.training.losses import token_losses


def bits_per_byte_of(nll_nats: float, num_bytes: int) -> float:
    """The score from a summed negative log-likelihood in nats and the bytes of the text that it covers."""
    if num_bytes <= 0:
        raise ValueError("the held-out text has no bytes")
    return nll_nats / math.log(2) / num_bytes


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """[V] UTF-8 bytes that each token stands for; special tokens stand for none.

    In a byte-level vocabulary every byte is written as one character, so a token has as many bytes as characters. In
    others a token is text, with U+2581 for a blank, or a single byte, <0x0A>; what such a tokenizer puts before a text
    or drops from it (a blank, most often) counts as if it were in the text.
    """
    vocabulary, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)  # ids may have gaps
    parts = json.loads(tokenizer.to_str())
    is_byte_level = "ByteLevel" in json.dumps([parts["decoder"], parts["pre_tokenizer"]])
    for token, index in vocabulary.items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(added[index].content.encode())
        elif is_byte_level:
            lengths[index] = len(token)
        else:
            lengths[index] = 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("▁", " ").encode())
    return lengths


def model_bits_per_byte(
    model: torch.nn.Module,
    tokens: np.ndarray,
    byte_lengths: np.ndarray,
    *,
    seq_len: int,
    batch_size: int = 16,
    poll: Callable[[], None] = lambda: None,
    label: str | None = None,
) -> float:
    """Bits per byte of a model on one held-out token stream.

    The stream is cut into windows of `seq_len` as in training; every token but the first of the stream is predicted
    exactly once, from the tokens before it in its window.

    Args:
        model: called as `model(input_ids_NL).logits`, [N, L, V].
        tokens: [T] documents joined as in training, end-of-document tokens included.
        byte_lengths: [V] bytes of each token (`token_byte_lengths`).
        poll: called before each batch; raises to stop.
        label: where given, a line on stderr with this name says how many windows are done, tokens/s and the time left.
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
    progress = Progress(sum(map(len, batches)), label=label or "", stream=sys.stderr if label else io.StringIO())
    done = 0
    try:
        with torch.inference_mode():
            for batch in batches:
                poll()
                ids_NL = torch.from_numpy(batch).to(device)
                logits_NLV = model(ids_NL[:, :-1]).logits
                # Summed in fp64: a sum of many thousand fp32 losses loses digits.
                total += float(token_losses(logits_NLV, ids_NL[:, 1:]).double().sum())
                done += len(batch)
                progress.update(done, tokens=ids_NL[:, 1:].numel())
    finally:
        progress.close()
        model.train(was_training)
    return bits_per_byte_of(total, int(byte_lengths[stream[1:]].sum()))


def bits_per_byte_by_position(
    model: torch.nn.Module,
    documents_NL: np.ndarray,
    byte_lengths: np.ndarray,
    ends: Sequence[int],
    batch_size: int = 4,
) -> dict[str, float]:
    """Bits per byte of the first tokens of documents, by how many tokens stand before: what a longer context gives.

    Args:
        model: called as `model(input_ids_NL).logits`; every document is a window, from its first token on.
        documents_NL: [N, L + 1] token ids.
        byte_lengths: [V] bytes of each token (`token_byte_lengths`).
        ends: rising, at most L: 128, 512 gives the bits of the tokens behind 1 to 128 others, and behind 129 to 512.
    """
    nll_L, bytes_L = np.zeros(documents_NL.shape[1] - 1), byte_lengths[documents_NL[:, 1:]].sum(0)
    device = next(model.parameters()).device
    with torch.inference_mode():
        for i in range(0, len(documents_NL), batch_size):
            ids_NL = torch.from_numpy(documents_NL[i : i + batch_size].astype(np.int64)).to(device)
            losses_NL = token_losses(model(ids_NL[:, :-1]).logits, ids_NL[:, 1:])
            nll_L += losses_NL.double().sum(0).cpu().numpy()
    ranges = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return {f"{r.start}-{r.stop}": bits_per_byte_of(float(nll_L[r].sum()), int(bytes_L[r].sum())) for r in ranges}


def score_answers(model: torch.nn.Module, batches: Iterable[Batch], last: int | None = None) -> dict[str, float]:
    """Loss in nats and accuracy of the most likely token, means over the labels that a mask selects, teacher forced.

    `last`: the model sees only so many of the last tokens of each row.
    """
    loss, right, count = 0.0, 0, 0
    with torch.inference_mode():
        for batch in batches:
            columns = slice(-(last or batch.input_ids_BL.shape[1]), None)
            answers_BL, labels_BL = batch.loss_mask_BL[:, columns].bool(), batch.labels_BL[:, columns]
            logits_TV = model(batch.input_ids_BL[:, columns], None, answers_BL).logits
            labels_T = labels_BL[answers_BL]
            loss += float(token_losses(logits_TV[None], labels_T[None]).double().sum())
            right, count = right + int((logits_TV.argmax(-1) == labels_T).sum()), count + len(labels_T)
    return {"loss": loss / count, "accuracy": right / count, "tokens": count}


def score_text(
    model: torch.nn.Module,
    held_out: Mapping[str, Sequence[np.ndarray]],
    trained_tokens: np.ndarray | None,
    byte_lengths: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """What a pretraining script publishes of its model: bits per byte of each source, beside those of the trigram.

    Every tenth document only sets the weights of the trigram's interpolation; those documents are not scored. Where a
    source has one document alone, the model is scored on it. The trigram is left out where there is nothing to count or
    nothing left to score.

    Args:
        held_out: by source, token ids of its held-out documents, one array each; at least one.
        trained_tokens: [N] exactly the tokens that the model was trained on, in order; None: no baseline.
        byte_lengths, seq_len, batch_size: as in `model_bits_per_byte`.
        poll: called while the trigram is counted, between the iterations of its fit, and before each batch; raises to
            stop.
    """
    poll()
    trigram = None
    if trained_tokens is not None and len(trained_tokens):
        progress = Progress(len(COUNTS), label="count trigrams", only_if_slow=True)

        def counting(step: int) -> None:
            poll()
            progress.update(step, tokens=len(trained_tokens) if step else 0)

        trigram = InterpolatedTrigram(trained_tokens, len(byte_lengths), counting)
        progress.close()
    text: dict[str, dict[str, float]] = {}
    for source, documents in held_out.items():
        fit, scored = documents[::10], [document for i, document in enumerate(documents) if i % 10]
        stream = np.concatenate(scored or fit)
        num_bytes = int(byte_lengths[stream[1:]].sum())
        bits = model_bits_per_byte(
            model, stream, byte_lengths, seq_len=seq_len, batch_size=batch_size, poll=poll, label=source
        )
        text[source] = {"bits_per_byte": bits, "tokens": len(stream) - 1, "bytes": num_bytes}
        line = f"{source}: {bits:.3f} bits per byte"
        if trigram is not None and scored:
            trigram.fit(np.concatenate(fit), poll=poll)
            baseline = bits_per_byte_of(float(trigram.nll(stream).sum()), num_bytes)
            text[source]["trigram_bits_per_byte"] = baseline
            line += f" (trigram {baseline:.3f})"
        print(line, file=sys.stderr)
    return text
