"""From prompts to scored completions, and from those to packed micro-batches for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from nemotron.stack.models.decoding.turns import generate_turns
from nemotron.stack.models.nemotron_h import NemotronH
from nemotron.stack.rl.dialogue import Dialogue
from nemotron.stack.rl.losses import token_logprobs
from nemotron.stack.rl.shaping import Message, count_forms


@dataclass
class Rollout:
    """One completion of one prompt, and what the environment said of it.

    completion_ids: all that follows the prompt, what tools answered included. messages: its parts, of policy and
    environment. logprobs: of the tokens that the policy sampled; only they are in the loss. entropy: mean over those.
    reward: None where verification failed (an error is not a zero). truncated: not ended within the limits.
    """

    prompt_index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    entropy: float
    truncated: bool
    reward: float | None
    messages: list[Message]

    @property
    def is_sampled(self) -> list[bool]:
        """Which tokens of the completion the policy wrote."""
        return [message.generated for message in self.messages for _ in range(message.num_tokens)]


@dataclass
class MicroBatch:
    """Packed rows of whole sequences (prompt + completion), and per completion token what the loss needs.

    input_ids_BL, seq_idx_BL: [B, L]. predicts_BL: bool [B, L], True where the *next* token is one that the policy
    sampled. The flat tensors [T] follow predicts_BL in row-major order. rollouts: which of the rollouts stand there, in
    that order; lengths: sampled tokens of each.
    """

    input_ids_BL: Tensor
    seq_idx_BL: Tensor
    predicts_BL: Tensor
    targets_T: Tensor
    logp_generator_T: Tensor
    advantages_T: Tensor
    rollouts: list[int]
    lengths: list[int]

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`."""
        tensors: dict[str, Any] = {k: value.to(device) for k, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def logprobs(self, model: NemotronH) -> Tensor:
        """Log-probabilities of the sampled tokens, [T]."""
        return token_logprobs(model(self.input_ids_BL, self.seq_idx_BL, self.predicts_BL).logits, self.targets_T)


def collect_rollouts(
    model: NemotronH,
    prompts: Sequence[Sequence[int]],
    begin: Callable[[int], Dialogue],
    score: Callable[[int, list[Dialogue]], list[float | None]],
    *,
    samples_per_prompt: int,
    max_new_tokens: int,
    max_turns: int = 1,
    max_length: int | None = None,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int],
    prompts_per_call: int,
    generator: torch.Generator,
    poll: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """Sample `samples_per_prompt` completions of each prompt and score them; those of a prompt stand together.

    Prompts are generated `prompts_per_call` at a time, sorted by length so that padding stays small; the result is in
    the order given. `begin(prompt_index)` opens a dialogue for each sample, and `score(prompt_index, dialogues)` gives
    the rewards of those of a prompt, with None where verification failed. `max_new_tokens` is that of a turn;
    `max_turns` and `max_length` limit the whole (`generate_turns`).
    `poll` is called at every decoding step and after the rewards of each prompt; it raises to stop (a signal arrived).
    """
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    by_prompt: dict[int, list[Rollout]] = {}
    for start in range(0, len(order), prompts_per_call):
        chunk = order[start : start + prompts_per_call]
        dialogues = [begin(index) for index in chunk for _ in range(samples_per_prompt)]
        conversations = generate_turns(
            model,
            [prompts[index] for index in chunk],
            lambda row, ids, dialogues=dialogues: dialogues[row].reply(ids),  # type: ignore[misc]
            max_new_tokens,
            max_turns=max_turns,
            max_length=max_length,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            generator=generator,
            samples_per_prompt=samples_per_prompt,
            poll=poll,
        )
        for position, index in enumerate(chunk):
            rows = range(position * samples_per_prompt, (position + 1) * samples_per_prompt)
            rewards = score(index, [dialogues[row] for row in rows])
            by_prompt[index] = [
                Rollout(
                    prompt_index=index,
                    prompt_ids=list(prompts[index]),
                    completion_ids=conversations[row].tokens,
                    logprobs=conversations[row].logprobs,
                    entropy=conversations[row].entropy,
                    truncated=not conversations[row].finished,
                    reward=reward,
                    messages=dialogues[row].messages,
                )
                for row, reward in zip(rows, rewards, strict=True)
            ]
            poll()  # rewards may take long
    return [rollout for index in sorted(by_prompt) for rollout in by_prompt[index]]


def count_rollouts(
    rollouts: Sequence[Rollout], prompt_families: Sequence[str], families: Sequence[str]
) -> dict[str, float | Tensor]:
    """What rates of a batch are made of, as counts and sums that add up over ranks.

    completions, tokens, truncated completions, the entropy of the policy summed over tokens (nats), its messages and
    the malformed ones, and for each of `families` the sum of its rewards and the number of completions with a verdict.

    Args:
        prompt_families: the family of each prompt, which `Rollout.prompt_index` points to.
        families: all of them, also those without a prompt here: every rank counts the same names.
    """
    counts: dict[str, float | Tensor] = {
        "completions": len(rollouts),
        "tokens": sum(len(rollout.logprobs) for rollout in rollouts),
        "entropy": sum(rollout.entropy * len(rollout.logprobs) for rollout in rollouts),
        "truncated": sum(rollout.truncated for rollout in rollouts),
        **count_forms([message for rollout in rollouts for message in rollout.messages]),
    }
    for family in families:
        rewards = [r.reward for r in rollouts if r.reward is not None and prompt_families[r.prompt_index] == family]
        counts |= {f"reward_{family}": sum(rewards), f"verdicts_{family}": len(rewards)}
    return counts


def rollout_rates(sums: Mapping[str, float], families: Sequence[str]) -> dict[str, float]:
    """The rates of a step: `sums` are what `count_rollouts` counted, summed over all ranks.

    reward: mean over the completions with a verdict, all together and of each family. entropy: nats a token.
    completion_tokens: mean number of sampled tokens. truncated: share of the completions. avg_turns_per_sample:
    messages of the policy in a completion. invalid_tool_call_rate and malformed_thinking_rate: shares of those.
    """
    verdicts = {family: sums[f"verdicts_{family}"] for family in families}
    return {
        "reward": sum(sums[f"reward_{family}"] for family in families) / max(sum(verdicts.values()), 1),
        **{f"reward_{family}": sums[f"reward_{family}"] / max(count, 1) for family, count in verdicts.items()},
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "completion_tokens": sums["tokens"] / max(sums["completions"], 1),
        "truncated": sums["truncated"] / max(sums["completions"], 1),
        "avg_turns_per_sample": sums["messages"] / max(sums["completions"], 1),
        "invalid_tool_call_rate": sums["invalid_tool_calls"] / max(sums["messages"], 1),
        "malformed_thinking_rate": sums["malformed_thinking"] / max(sums["messages"], 1),
    }


def pack_rollouts(
    rollouts: Sequence[Rollout],
    advantages: Sequence[Sequence[float]],
    row_len: int,
    rows_per_batch: int,
    keep_zero_advantage: bool = False,
) -> list[MicroBatch]:
    """Pack the sequences that carry gradient into rows of `row_len` tokens, `rows_per_batch` rows a micro-batch.

    `advantages` has one for each completion token; those of tokens that the policy did not sample do not count.
    Sequences in which all others are 0 are left out unless they are to be kept: without a KL term their gradient is
    exactly 0. First-fit decreasing, so few tokens of a row stay empty; the
    empty tail of a row is padding (id 0, a document of its own, never predicted).

    Raises:
        ValueError: a sequence is longer than a row.
    """
    used = [
        index
        for index, of_tokens in enumerate(advantages)
        if rollouts[index].logprobs and (keep_zero_advantage or any(compress(of_tokens, rollouts[index].is_sampled)))
    ]
    lengths = {i: len(rollouts[i].prompt_ids) + len(rollouts[i].completion_ids) for i in used}
    too_long = max(lengths.values(), default=0)
    if too_long > row_len:
        raise ValueError(f"a rollout of {too_long} tokens does not fit a row of {row_len}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(used, key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(row_len)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return [
        _micro_batch(batch, rollouts, advantages)
        for batch in (rows[start : start + rows_per_batch] for start in range(0, len(rows), rows_per_batch))
    ]


def _micro_batch(
    rows: list[list[int]], rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]]
) -> MicroBatch:
    width = max(sum(len(rollouts[i].prompt_ids) + len(rollouts[i].completion_ids) for i in row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    seq_idx = torch.zeros(len(rows), width, dtype=torch.int64)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    targets: list[int] = []
    logprobs: list[float] = []
    weights: list[float] = []
    for b, row in enumerate(rows):
        start = 0
        for document, index in enumerate(row):
            rollout = rollouts[index]
            ids = rollout.prompt_ids + rollout.completion_ids
            input_ids[b, start : start + len(ids)] = torch.tensor(ids)
            seq_idx[b, start : start + len(ids)] = document
            is_sampled = rollout.is_sampled
            predicts[b, start + len(rollout.prompt_ids) - 1 : start + len(ids) - 1] = torch.tensor(is_sampled)
            targets += compress(rollout.completion_ids, is_sampled)
            logprobs += rollout.logprobs
            weights += compress(advantages[index], is_sampled)
            start += len(ids)
        seq_idx[b, start:] = len(row)
    packed = [i for row in rows for i in row]
    return MicroBatch(
        input_ids,
        seq_idx,
        predicts,
        torch.tensor(targets),
        torch.tensor(logprobs),
        torch.tensor(weights),
        packed,
        [len(rollouts[i].logprobs) for i in packed],
    )
