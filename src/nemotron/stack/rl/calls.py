"""Rollouts of verifiable tasks, cut into calls that anybody may do: the trainer's process, or a worker elsewhere.

A call generates for some prompts of like length together, and verifies what it has generated. What it draws depends on
the weights and on its own seed: not on who draws it, and not on what was drawn before. So those of a step can be dealt
out, and the step is the same as without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer

from nemotron.kit.chat import template_opens_reasoning
from nemotron.kit.schemas.rl import EffortConfig
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import Task, open_episode, prompt_messages
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.dialogue import Dialogue, verdicts
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts
from nemotron.stack.rl.shaping import effort_reward


@dataclass(frozen=True)
class RolloutSettings:
    """What holds for all rollouts of a run. max_new_tokens: of a turn. max_length: prompt and completion, tokens."""

    template: str
    thinking: bool
    sandbox: Sandbox
    effort_levels: EffortConfig | None
    samples_per_prompt: int
    max_new_tokens: int
    max_turns: int
    max_length: int
    stop_token_ids: Sequence[int]


@dataclass(frozen=True)
class Call:
    """Prompts that are generated for together. indices: where they stand among those of the step."""

    indices: list[int]
    tasks: list[Task]
    prompts: list[list[int]]
    seed: int


@dataclass(frozen=True)
class Drawn:
    """The rollouts of a call, those of a prompt together, and why the verification of some failed."""

    rollouts: list[Rollout]
    errors: list[str]


def cut_into_calls(
    tasks: Sequence[Task], prompts: Sequence[list[int]], prompts_per_call: int, entropy: Sequence[int]
) -> list[Call]:
    """The calls of a step, short prompts first, so that padding stays small; each draws a seed from `entropy`."""
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    calls: list[Call] = []
    for start in range(0, len(order), prompts_per_call):
        indices = order[start : start + prompts_per_call]
        seed = np.random.SeedSequence([*entropy, len(calls)]).generate_state(1)[0]
        calls.append(Call(indices, [tasks[i] for i in indices], [prompts[i] for i in indices], int(seed)))
    return calls


def draw_call(
    call: Call,
    model: NemotronH,
    tokenizer: Tokenizer,
    settings: RolloutSettings,
    poll: Callable[[], None] = lambda: None,
) -> Drawn:
    """`samples_per_prompt` completions of each prompt, sampled from `model` at temperature 1, and their rewards.

    An answer that could not be verified has None, which is no zero: it is left out of baseline and loss, and counted.
    """
    errors: list[str] = []
    opened = template_opens_reasoning(settings.template, settings.thinking)

    def begin(index: int) -> Dialogue:
        episode = open_episode(call.tasks[index], opened, settings.sandbox)
        return Dialogue(episode, tokenizer, settings.template, settings.thinking)

    def score(index: int, dialogues: list[Dialogue]) -> list[float | None]:
        task, rewards = call.tasks[index], list[float | None]()
        for dialogue, verdict in zip(dialogues, verdicts(task, dialogues, settings.sandbox), strict=True):
            reward: float | None = verdict.score
            if verdict.status == "error":
                errors.append(verdict.reason)
                reward = None
            elif (effort := settings.effort_levels) and effort.low_string in last_request(task):
                written = sum(message.num_tokens for message in dialogue.messages if message.generated)
                reward = effort_reward(verdict.score, written, effort)
            rewards.append(reward)
        return rewards

    device = next(model.parameters()).device
    rollouts = collect_rollouts(
        model, call.prompts, begin, score, samples_per_prompt=settings.samples_per_prompt,
        max_new_tokens=settings.max_new_tokens, max_turns=settings.max_turns, max_length=settings.max_length,
        stop_token_ids=settings.stop_token_ids, prompts_per_call=len(call.prompts),
        generator=torch.Generator(device=device).manual_seed(call.seed), poll=poll,
    )  # fmt: skip
    return Drawn(rollouts, errors)


def last_request(task: Task) -> str:
    """What the user said last, which is where effort is asked for."""
    return str(next(each["content"] for each in reversed(prompt_messages(task)) if each["role"] == "user"))


def merge_calls(calls: Sequence[Call], drawn: Sequence[Drawn]) -> Drawn:
    """The step's rollouts in the order of its prompts, and what went wrong in the order of its calls."""
    rollouts = [
        replace(rollout, prompt_index=call.indices[rollout.prompt_index])
        for call, of_call in zip(calls, drawn, strict=True)
        for rollout in of_call.rollouts
    ]
    rollouts.sort(key=lambda rollout: rollout.prompt_index)  # stable: completions of a prompt keep their order
    return Drawn(rollouts, [error for of_call in drawn for error in of_call.errors])
