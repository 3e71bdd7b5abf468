"""Batched sampling with the cache: greedy, at a temperature, top-p; stop tokens, prompts of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.chunks import read_on
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.nemotron_h import NemotronH

# Compacting the batch copies the cache, which pays off once this share of the rows has finished.
COMPACT_AT = 0.25
# A large batch is compacted to a multiple of this, so that oneDNN compiles few kernels (`ONEDNN_ROWS` in steps.py).
ROW_MULTIPLE = 16


@dataclass
class Generation:
    """Completions of a batch, in the order of the prompts.

    tokens: generated ids, the stop token included. logprobs: log-probability of each generated token under the model's
    own distribution (temperature 1, no truncation), the behaviour policy of RL at temperature 1. finished: a stop token
    was reached within the limit. entropies: mean entropy in nats of that distribution over a row's steps. states: what
    a finished row has read, all tokens but the stop token, where `keeps_states` asked for it; else None.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    entropies: list[float]
    states: list[Cache | None] = field(default_factory=list)

    def __iadd__(self, other: Generation) -> Self:
        """Those of another batch behind them."""
        for mine, others in zip(vars(self).values(), vars(other).values(), strict=True):
            mine += others
        return self


@dataclass(frozen=True)
class ReasoningBudget:
    """Reasoning of `max_tokens` tokens at most: rows that have not drawn `tag_ids` by then go on with `end_ids`.

    tag_ids: `</think>`, a special token or several others. end_ids: the tokens from reasoning to answer, those of the
    tag among them. A token is drawn for a row even where another one is put in its place, so that a budget that no row
    reaches changes nothing.
    """

    max_tokens: int
    tag_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    def hold(self, index: int, next_B: Tensor, progress_B: Tensor) -> Tensor:
        """The tokens number `index` of the rows, drawn or put.

        `progress_B`, int, is brought up to date: how many tokens of the tag each row has just drawn; all: it answers.
        """
        tag_T = torch.tensor(self.tag_ids, device=next_B.device)
        answers_B = progress_B == len(tag_T)
        if index < self.max_tokens:
            expected_B = tag_T[progress_B.clamp(max=len(tag_T) - 1)]
            drawn_B = torch.where(next_B == expected_B, progress_B + 1, (next_B == tag_T[0]).to(progress_B.dtype))
            progress_B.copy_(torch.where(answers_B, progress_B, drawn_B))
        elif index < self.max_tokens + len(self.end_ids):
            return torch.where(answers_B, next_B, self.end_ids[index - self.max_tokens])
        return next_B


@torch.inference_mode()
def generate(
    model: NemotronH,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token_ids: Sequence[int] = (11,),
    generator: torch.Generator | None = None,
    samples_per_prompt: int = 1,
    poll: Callable[[], None] = lambda: None,
    budget: ReasoningBudget | None = None,
    opens_answer: Sequence[bool] | None = None,
    states: list[Cache] | None = None,
    keeps_states: Callable[[int, int], bool] | None = None,
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Returns len(prompts) x samples_per_prompt completions; those of one prompt stand together.

    Args:
        model: put into eval mode for the call and restored after it.
        prompts: non-empty lists of token ids; padded on the left, which changes no result.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it (Holtzman et al. 2020).
        stop_token_ids: end a row after one of these.
        samples_per_prompt: every prompt is read once and its cache copied for each sample; so are equal prompts.
        generator: source of randomness; the same generator state gives the same tokens.
        poll: called after every step; raises to stop (a signal arrived).
        budget: of prompts that open reasoning. Tokens put by it stand among the others, log-probability included.
        opens_answer: of each prompt, whether it opens the answer instead, which no budget holds; None: none does.
        states: of each prompt, what has been read of it already: `Generation.states` of a turn before. For one sample a
            prompt. The list is empty afterwards, so that none outlives its copy in the cache.
        keeps_states: whether those of a completion are returned, copies, which take as much memory as its part of the
            cache; asked when it has ended, with its number and its tokens, those of the prompt included.

    Raises:
        ValueError: an empty prompt, a negative temperature, top_p outside (0, 1].
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature >= 0 and 0 < top_p <= 1 expected, got {temperature} and {top_p}")
    total = len(prompts) * samples_per_prompt
    device = model.lm_head.weight.device
    result = Generation(
        [[] for _ in range(total)], [[] for _ in range(total)], [False] * total, [0.0] * total, [None] * total
    )
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token")
    if not prompts or max_new_tokens <= 0:
        return result

    cache: Cache | None = None
    was_training = model.training
    if was_training:  # every module's flag: at the size of a laptop a part of what a short answer costs
        model.eval()
    try:
        stop = torch.tensor(list(stop_token_ids), device=device)
        if states is None:
            logits_BV, cache = _read_prompts(model, prompts, samples_per_prompt, max_new_tokens)
        else:
            logits_BV, cache = read_on(model, prompts, states, max_new_tokens)
        width = cache.length
        rows = torch.arange(total, device=device)  # which completion each row of the batch is
        finished_B = torch.zeros(total, dtype=torch.bool, device=device)
        progress_B = torch.zeros_like(rows)  # of the end of reasoning
        if budget and opens_answer:
            are_answers_B = torch.tensor(opens_answer, device=device).repeat_interleave(samples_per_prompt)
            progress_B[are_answers_B] = len(budget.tag_ids)
        records: list[tuple[Tensor, ...]] = []  # of each step: rows, tokens, and what their probabilities follow from
        for index in range(max_new_tokens):
            logits_BV = at_least_fp32(logits_BV)
            probs_BV = torch.softmax(logits_BV, dim=-1)
            next_B = _choose(logits_BV, probs_BV, temperature, top_p, generator)
            if budget:
                next_B = budget.hold(index, next_B, progress_B)
            logit_B = logits_BV.gather(-1, next_B.unsqueeze(-1)).squeeze(-1)
            best_logit_B, best_prob_B = logits_BV.amax(-1), probs_BV.amax(-1)
            records.append((rows, next_B, logit_B, best_logit_B, best_prob_B, probs_BV.mul_(logits_BV).sum(-1)))
            stops_B = torch.isin(next_B, stop)
            if keeps_states:
                ending = (stops_B & ~finished_B).nonzero().flatten()
                for place, row in zip(ending.tolist(), rows[ending].tolist(), strict=True):
                    prompt_size = len(prompts[row // samples_per_prompt])
                    if keeps_states(row, prompt_size + index + 1):
                        result.states[row] = cache.row(place, width - prompt_size)
            finished_B |= stops_B
            num_rows, num_finished = len(rows), int(finished_B.sum())
            if num_finished == num_rows or index + 1 == max_new_tokens:
                break
            poll()
            num_kept = num_rows - num_finished
            if num_kept > ROW_MULTIPLE:
                num_kept += -num_kept % ROW_MULTIPLE
            if num_finished >= COMPACT_AT * num_rows and num_kept < num_rows:  # until then a finished row decodes on
                keep = finished_B.int().argsort(stable=True)[:num_kept]
                rows, next_B, finished_B, progress_B = rows[keep], next_B[keep], finished_B[keep], progress_B[keep]
                cache.keep_rows(keep)
            logits_BV = step(model, next_B, cache)
    finally:
        if cache is not None:
            cache.step = None  # which holds the cache: the memory of both comes back now
        if was_training:
            model.train()

    row_R, token_R, logit_R, best_logit_R, best_prob_R, mean_logit_R = map(torch.cat, zip(*records, strict=True))
    step_R = torch.arange(len(records), device=device).repeat_interleave(
        torch.tensor([len(record[0]) for record in records], device=device)
    )
    # log of the sum of all exp(logit), from the likeliest token: its probability is never too small for a logarithm.
    log_sum_R = best_logit_R - best_prob_R.log()

    def by_completion(values_R: Tensor) -> list[list[Any]]:
        values_BS = values_R.new_zeros(total, len(records))
        values_BS[row_R, step_R] = values_R
        values: list[list[Any]] = values_BS.tolist()
        return values

    tokens, logprobs = by_completion(token_R), by_completion(logit_R - log_sum_R)
    entropies, stops = by_completion(log_sum_R - mean_logit_R), set(stop_token_ids)
    for row, ids in enumerate(tokens):
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        count = len(ids) if end is None else end + 1
        result.tokens[row], result.logprobs[row] = ids[:count], logprobs[row][:count]
        result.finished[row] = end is not None
        result.entropies[row] = sum(entropies[row][:count]) / count
    return result


def _read_prompts(
    model: NemotronH, prompts: Sequence[Sequence[int]], samples_per_prompt: int, room: int
) -> tuple[Tensor, Cache]:
    """Each prompt once: equal ones, and the samples of a prompt, get copies.

    Returns logits and cache as `prefill`, of `samples_per_prompt` rows a prompt, with room for so many further tokens.
    """
    device, unique = model.lm_head.weight.device, list(dict.fromkeys(map(tuple, prompts)))
    input_ids_BL, is_token_BL = pad_left(unique, device)
    logits_BV, cache = prefill(model, input_ids_BL, is_token_BL, input_ids_BL.shape[1] + room)
    if len(prompts) * samples_per_prompt > len(unique):
        place = {prompt: row for row, prompt in enumerate(unique)}
        rows_of_prompts = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
        copies = rows_of_prompts.repeat_interleave(samples_per_prompt)
        cache.keep_rows(copies)
        logits_BV = logits_BV[copies]
    return logits_BV, cache


def generate_tokens(
    model: NemotronH,
    prompt: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: Sequence[int],
    generator: torch.Generator,
    budget: ReasoningBudget | None = None,
) -> Iterator[int]:
    """Continue one prompt, a token at a time: those that `generate` returns for it, the stop token included.

    Raises ValueError for an empty prompt.
    """
    input_ids_BL, is_token_BL = pad_left([prompt], model.lm_head.weight.device)
    cache: Cache | None = None
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.inference_mode():
            logits_BV, cache = prefill(model, input_ids_BL, is_token_BL, len(prompt) + max_new_tokens)
        progress_B = torch.zeros(1, dtype=torch.int64, device=input_ids_BL.device)
        for index in range(max_new_tokens):
            with torch.inference_mode():  # not around the yield: the caller is not in it
                logits_BV = at_least_fp32(logits_BV)
                next_B = _choose(logits_BV, torch.softmax(logits_BV, dim=-1), temperature, 1.0, generator)
                if budget:
                    next_B = budget.hold(index, next_B, progress_B)
            token = int(next_B)
            yield token
            if token in stop_token_ids or index + 1 == max_new_tokens:
                return
            with torch.inference_mode():
                logits_BV = step(model, next_B, cache)
    finally:
        if cache is not None:
            cache.step = None  # which holds the cache: the memory of both comes back now
        if was_training:
            model.train()


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts behind each other's padding (id 0), int64 [B, L], and where they are, bool [B, L].

    Raises ValueError for an empty prompt.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token")
    width = max((len(prompt) for prompt in prompts), default=0)
    input_ids_BL = torch.zeros(len(prompts), width, dtype=torch.int64)
    is_token_BL = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        input_ids_BL[row, width - len(prompt) :] = torch.tensor(prompt)
        is_token_BL[row, width - len(prompt) :] = True
    return input_ids_BL.to(device), is_token_BL.to(device)


def _choose(
    logits_BV: Tensor, probs_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token a row from logits and their softmax, both [B, V]."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    if temperature != 1:
        probs_BV = torch.softmax(logits_BV / temperature, dim=-1)
    if top_p < 1:
        probs_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    index_B1 = draw(probs_BV, uniforms(probs_BV, generator), top_p)
    return (order_BV.gather(-1, index_B1) if top_p < 1 else index_B1).squeeze(-1)


def uniforms(weights_BV: Tensor, generator: torch.Generator | None) -> Tensor:
    """A number in [0, 1) a row, [B, 1], to `draw` from these weights by."""
    return torch.rand((len(weights_BV), 1), generator=generator, dtype=torch.float64, device=weights_BV.device)


def draw(weights_BV: Tensor, uniform_B1: Tensor, top_p: float = 1.0) -> Tensor:
    """An index a row, [B, 1], drawn in proportion to weights, which need not sum to 1.

    By inverting the distribution function: one number in [0, 1) a row, the first index whose cumulated weight exceeds
    it. `torch.multinomial` draws one number an index, which at batch 256 would take longer than the model. The sums are
    in float64, where no token of a large vocabulary is lost to rounding, and where the largest number below 1 times a
    sum stays below that sum: no index behind the last possible one is drawn.

    top_p: of weights in descending order, up to the first with which their share reaches it.
    """
    cumulated_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    mass_B1 = cumulated_BV[:, -1:]
    if top_p < 1:
        mass_B1 = cumulated_BV.gather(-1, torch.searchsorted(cumulated_BV, top_p * mass_B1))
    return torch.searchsorted(cumulated_BV, uniform_B1 * mass_B1, right=True)
