"""Batched sampling with the cache: greedy, temperature and top-p, stop tokens, prompts of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron.stack.models.nemotron_h import NemotronH

# Compacting the batch copies the cache; it pays once this share of the rows has finished.
COMPACT_AT = 0.25


@dataclass
class Generation:
    """Completions of a batch, in the order of the prompts.

    tokens: generated ids, the stop token included. logprobs: log-probability of each generated token under the model's
    own distribution (temperature 1, no truncation), the behaviour policy of RL at temperature 1. finished: a stop token
    was reached within the limit. entropies: mean entropy in nats of that distribution over a row's steps.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    entropies: list[float]


@torch.no_grad()
def generate(
    model: NemotronH,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token_ids: Sequence[int] = (11,),
    generator: torch.Generator | None = None,
    samples_per_prompt: int = 1,
    should_stop: Callable[[], bool] | None = None,
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Returns len(prompts) x samples_per_prompt completions; those of one prompt stand together.

    Args:
        model: put into eval mode for the call and restored after it.
        prompts: non-empty lists of token ids; padded on the left, which changes no result.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it (Holtzman et al. 2020).
        stop_token_ids: end a row after one of these.
        samples_per_prompt: every prompt is read once and its cache copied for each sample.
        generator: source of randomness; the same generator state gives the same tokens.
        should_stop: polled every step (a signal arrived); rows are then returned unfinished.

    Raises:
        ValueError: an empty prompt, a negative temperature, top_p outside (0, 1].
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature >= 0 and 0 < top_p <= 1 expected, got {temperature} and {top_p}")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token")
    total = len(prompts) * samples_per_prompt
    result = Generation([[] for _ in range(total)], [[] for _ in range(total)], [False] * total, [0.0] * total)
    if not prompts or max_new_tokens <= 0:
        return result
    device = model.lm_head.weight.device
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    is_token = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        is_token[row, width - len(prompt) :] = True

    was_training = model.training
    model.eval()
    try:
        stop = torch.tensor(list(stop_token_ids), device=device)
        logits_BV, cache = model.prefill(input_ids.to(device), is_token.to(device), width + max_new_tokens)
        if samples_per_prompt > 1:
            copies = torch.arange(len(prompts), device=device).repeat_interleave(samples_per_prompt)
            cache.keep_rows(copies)
            logits_BV = logits_BV[copies]
        # Step-major records over all rows of the batch; rows that ended keep the value -1 from then on.
        rows = torch.arange(total, device=device)  # which prompt each live row belongs to
        tokens_SB = torch.full((max_new_tokens, total), -1, dtype=torch.int64, device=device)
        logprobs_SB = torch.zeros(max_new_tokens, total, device=device)
        entropy_SB = torch.zeros(max_new_tokens, total, device=device)
        done_B = torch.zeros(total, dtype=torch.bool, device=device)
        for step in range(max_new_tokens):
            logp_BV = torch.log_softmax(logits_BV.float(), dim=-1)
            next_B = _choose(logp_BV, temperature, top_p, generator)
            live = ~done_B
            tokens_SB[step, rows[live]] = next_B[live]
            logprobs_SB[step, rows[live]] = logp_BV.gather(-1, next_B.unsqueeze(-1)).squeeze(-1)[live]
            entropy_SB[step, rows[live]] = -(logp_BV.exp() * logp_BV).sum(-1)[live]
            done_B |= torch.isin(next_B, stop)
            num_done = int(done_B.sum())
            if num_done == len(rows) or step + 1 == max_new_tokens or (should_stop is not None and should_stop()):
                break
            if num_done >= COMPACT_AT * len(rows):  # until then a finished row is decoded on and not recorded
                keep = (~done_B).nonzero().squeeze(-1)
                rows, next_B, done_B = rows[keep], next_B[keep], done_B[keep]
                cache.keep_rows(keep)
            logits_BV = model.step(next_B, cache)
    finally:
        model.train(was_training)

    ids, logprobs, entropies = tokens_SB.T.tolist(), logprobs_SB.T.tolist(), entropy_SB.T.tolist()
    stops = set(stop_token_ids)
    for row in range(total):
        count = next((i for i, token in enumerate(ids[row]) if token < 0), max_new_tokens)
        result.tokens[row], result.logprobs[row] = ids[row][:count], logprobs[row][:count]
        result.finished[row] = count > 0 and ids[row][count - 1] in stops
        result.entropies[row] = sum(entropies[row][:count]) / max(count, 1)
    return result


def _choose(logp_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One token a row from log-probabilities [B, V]."""
    if temperature == 0:
        return logp_BV.argmax(-1)
    probs_BV = torch.softmax(logp_BV / temperature, dim=-1)
    if top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
        # A token is dropped when the tokens before it already reach top_p; the first one always stays.
        sorted_BV[sorted_BV.cumsum(-1) - sorted_BV >= top_p] = 0
        probs_BV = torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV)
    return torch.multinomial(probs_BV, 1, generator=generator).squeeze(-1)
