"""From prompts to scored completions, and from those to packed micro-batches for the trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from nemotron.stack.models.decoding.turns import generate_turns
from nemotron.stack.models.nemotron_h import NemotronH
from nemotron.stack.models.shared_prompt import SeparateRows
from nemotron.stack.rl.dialogue import Dialogue
from nemotron.stack.rl.losses import token_logprobs
from nemotron.stack.rl.shaping import Message, count_forms
from nemotron.stack.training.losses import IGNORED, mtp_loss_sums

# Rows are padded to a multiple of this, or to the longest row allowed: whole chunks for the scan, few shapes.
WIDTH_MULTIPLE = 64


@dataclass
class Rollout:
    """One completion of one prompt, and what the environment said of it.

    completion_ids: all that follows the prompt, what tools answered included. messages: its parts, of policy and
    environment. logprobs: of the tokens that the policy sampled; only they are in the loss. entropy: mean over those.
    reward: None where verification failed (an error is not a zero). truncated: cut at a number of tokens.
    max_turns_reached: ended by the number of turns, which is no truncation, as in NeMo-RL (`rollouts.py`).
    """

    prompt_index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    entropy: float
    truncated: bool
    reward: float | None
    messages: list[Message]
    max_turns_reached: bool = False

    @property
    def is_sampled(self) -> list[bool]:
        """Which tokens of the completion the policy wrote."""
        return [message.generated for message in self.messages for _ in range(message.num_tokens)]


@dataclass
class MicroBatch:
    """Rows of a prompt and completions of it, and per completion token what the loss needs.

    input_ids_BL, seq_idx_BL: [B, L]. Document 0 of a row is the prompt without its last token; the others begin with
    that token and go on with a completion, without its last one, which predicts nothing. predicts_BL: bool [B, L], True
    where the *next* token is one that the policy sampled. The flat tensors [T] follow predicts_BL in row-major order.
    rollouts: which of the rollouts stand there, in that order; lengths: sampled tokens of each.
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
        """Log-probabilities of the sampled tokens, [T], each completion as if it alone followed its prompt."""
        return self.logprobs_and_mtp(model, 0, detach=True)[0]

    def logprobs_and_mtp(self, model: NemotronH, mtp_depths: int, detach: bool) -> tuple[Tensor, list[Tensor]]:
        """`logprobs`, and the logits of so many depths of multi-token prediction, for `mtp_loss`."""
        out = model(
            self.input_ids_BL, self.seq_idx_BL, self.predicts_BL, mtp_depths=mtp_depths, detach_mtp=detach,
            shared_prompt=True,
        )  # fmt: skip
        return token_logprobs(out.logits, self.targets_T), out.mtp_logits

    def mtp_loss(self, mtp_logits: list[Tensor], kept_T: Tensor) -> tuple[Tensor, Tensor]:
        """Of each depth the sum in nats over the sampled tokens that are kept, and their number: `mtp_loss_sums`.

        A depth predicts a token from the position so many before it, which may be one of the prompt.
        """
        rows = SeparateRows.of(self.seq_idx_BL)
        labels_BL = torch.full_like(self.input_ids_BL, IGNORED)
        labels_BL[self.predicts_BL] = torch.where(kept_T, self.targets_T, IGNORED)
        predicts_RM, labels_RM = rows.take(self.predicts_BL, False), rows.take(labels_BL, IGNORED)
        return mtp_loss_sums(mtp_logits, labels_RM, rows.seq_idx_RM, predicts_RM)


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
            reads_on=lambda row, dialogues=dialogues: dialogues[row].reads_on,  # type: ignore[misc]
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
                    truncated=not (conversations[row].finished or conversations[row].max_turns_reached),
                    reward=reward,
                    messages=dialogues[row].messages,
                    max_turns_reached=conversations[row].max_turns_reached,
                )
                for row, reward in zip(rows, rewards, strict=True)
            ]
            poll()  # rewards may take long
    return [rollout for index in sorted(by_prompt) for rollout in by_prompt[index]]


def one_turn_each(rollout: Rollout) -> list[Rollout]:
    """The turns of a rollout, each as a rollout of its own behind the context that the policy read, with its reward.

    For templates that show an earlier turn differently from how it was written (`Message.takes_back`): there the
    conversation is no sequence of tokens that the policy ever saw.
    """
    turns, context, start, written = [], list(rollout.prompt_ids), 0, 0
    for message in rollout.messages:
        ids = rollout.completion_ids[start : start + message.num_tokens]
        start += message.num_tokens
        if message.generated:
            logprobs = rollout.logprobs[written : written + len(ids)]
            written += len(ids)
            turns.append(
                replace(rollout, prompt_ids=context, completion_ids=ids, logprobs=logprobs, messages=[message])
            )
        context = [*context[: len(context) - message.takes_back], *ids]
    return turns


def count_rollouts(
    rollouts: Sequence[Rollout], prompt_families: Sequence[str], families: Sequence[str]
) -> dict[str, float | Tensor]:
    """What rates of a batch are made of, as counts and sums that add up over ranks.

    completions, tokens, completions that were truncated or had no turn left, the entropy of the policy summed over
    tokens (nats), its messages and the malformed ones, and for each of `families` the sum of its rewards and the number
    of completions with a verdict.

    Args:
        prompt_families: the family of each prompt, which `Rollout.prompt_index` points to.
        families: all of them, also those without a prompt here: every rank counts the same names.
    """
    counts: dict[str, float | Tensor] = {
        "completions": len(rollouts),
        "tokens": sum(len(rollout.logprobs) for rollout in rollouts),
        "entropy": sum(rollout.entropy * len(rollout.logprobs) for rollout in rollouts),
        "truncated": sum(rollout.truncated for rollout in rollouts),
        "max_turns_reached": sum(rollout.max_turns_reached for rollout in rollouts),
        **count_forms([message for rollout in rollouts for message in rollout.messages]),
    }
    for family in families:
        rewards = [r.reward for r in rollouts if r.reward is not None and prompt_families[r.prompt_index] == family]
        counts |= {f"reward_{family}": sum(rewards), f"verdicts_{family}": len(rewards)}
    return counts


def rollout_rates(sums: Mapping[str, float], families: Sequence[str]) -> dict[str, float]:
    """The rates of a step: `sums` are what `count_rollouts` counted, summed over all ranks.

    reward: mean over the completions with a verdict, of all and of each family that has some. entropy: nats a token.
    completion_tokens: mean number of sampled tokens. truncated, max_turns_reached: shares of the completions.
    avg_turns_per_sample: messages of the policy in a completion. invalid_tool_call_rate and malformed_thinking_rate:
    shares of those.
    """
    verdicts = {family: sums[f"verdicts_{family}"] for family in families}
    return {
        "reward": sum(sums[f"reward_{family}"] for family in families) / max(sum(verdicts.values()), 1),
        **{f"reward_{family}": sums[f"reward_{family}"] / count for family, count in verdicts.items() if count},
        "entropy": sums["entropy"] / max(sums["tokens"], 1),
        "completion_tokens": sums["tokens"] / max(sums["completions"], 1),
        "truncated": sums["truncated"] / max(sums["completions"], 1),
        "max_turns_reached": sums["max_turns_reached"] / max(sums["completions"], 1),
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
    """Pack the completions that carry gradient, those of a prompt behind it, into rows of at most `row_len` tokens.

    `advantages` has one for each completion token; those of tokens that the policy did not sample do not count.
    Completions in which all others are 0 are left out unless they are to be kept: without a KL term and multi-token
    prediction their gradient is exactly 0. Those of a prompt that do not fit one row take several, each with the
    prompt. Rows of like length make a micro-batch, as many as have the tokens of `rows_per_batch` whole ones; their
    empty tails are padding (id 0, document -1, never predicted).

    Raises:
        ValueError: a prompt with its completion is longer than a row; a turn was told anew (`one_turn_each`).
    """
    if any(message.takes_back for rollout in rollouts for message in rollout.messages):
        raise ValueError("a turn was told anew: the completion is no sequence that the policy read")
    of_prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        if rollout.logprobs and (keep_zero_advantage or any(compress(advantages[index], rollout.is_sampled))):
            of_prompts[tuple(rollout.prompt_ids)].append(index)
    rows: list[tuple[int, list[int]]] = []  # tokens of a row, and the rollouts in it
    for prompt_ids, indices in of_prompts.items():
        sizes = [len(rollouts[index].completion_ids) for index in indices]
        if len(prompt_ids) + max(sizes) > row_len:
            raise ValueError(f"a rollout of {len(prompt_ids) + max(sizes)} tokens does not fit a row of {row_len}")
        shared = len(prompt_ids) - 1  # the prompt's last token begins each completion
        for row in first_fit(sizes, row_len - shared):
            rows.append((shared + sum(sizes[i] for i in row), [indices[i] for i in row]))
    rows.sort(key=lambda row: -row[0])
    batches: list[MicroBatch] = []
    while rows:
        width = min(-(-rows[0][0] // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, row_len)
        count = max(1, rows_per_batch * row_len // width)
        batches.append(_micro_batch([row for _, row in rows[:count]], width, rollouts, advantages))
        rows = rows[count:]
    return batches


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, as indices into `sizes`: the largest first, each into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = next((b for b, free in enumerate(room) if free >= sizes[index]), None)
        if fitting is None:
            bins.append([])
            room.append(capacity)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] -= sizes[index]
    return bins


def _micro_batch(
    rows: list[list[int]], width: int, rollouts: Sequence[Rollout], advantages: Sequence[Sequence[float]]
) -> MicroBatch:
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    seq_idx = torch.zeros(len(rows), width, dtype=torch.int64)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    targets: list[int] = []
    logprobs: list[float] = []
    sampled_advantages: list[float] = []
    for b, row in enumerate(rows):
        *prompt, last = rollouts[row[0]].prompt_ids
        input_ids[b, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        start = len(prompt)
        for document, index in enumerate(row, start=1):
            rollout = rollouts[index]
            here, is_sampled = slice(start, start + len(rollout.completion_ids)), rollout.is_sampled
            input_ids[b, here] = torch.tensor([last, *rollout.completion_ids[:-1]])
            seq_idx[b, here] = document
            predicts[b, here] = torch.tensor(is_sampled)
            targets += compress(rollout.completion_ids, is_sampled)
            logprobs += rollout.logprobs
            sampled_advantages += compress(advantages[index], is_sampled)
            start = here.stop
        seq_idx[b, start:] = -1
    packed = [i for row in rows for i in row]
    return MicroBatch(
        input_ids,
        seq_idx,
        predicts,
        torch.tensor(targets),
        torch.tensor(logprobs),
        torch.tensor(sampled_advantages),
        packed,
        [len(rollouts[i].logprobs) for i in packed],
    )
