"""Conversations of several turns: the model writes, its environment answers, the model goes on.

Tokens in, tokens out: what the model sampled is never decoded and tokenised again, so that every prompt begins with all
tokens of the turn before it; except under a chat template that shows an earlier turn differently (`Retold`). A turn
goes on from the states of the one before and reads what was added, but where that was told anew: then it reads its
prompt from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.generate import Generation, ReasoningBudget, generate
from nemotron.stack.models.nemotron_h import NemotronH

# Prompt tokens, padding included, of the rows that a later turn decodes together: there every completion is a prompt of
# its own.
PROMPT_TOKENS = 1 << 16
REPLIES_AT_ONCE = 64
POLL_SECONDS = 0.5  # while replies are waited for


@dataclass(frozen=True)
class Retold:
    """What follows a response that is told anew: `ids` take the place of the last `takes_back` tokens before them."""

    ids: list[int]
    takes_back: int


@dataclass
class Conversation:
    """What follows a prompt. tokens: of model and environment in order.

    A response that was told anew stands there twice: as it was sampled, and among the environment's tokens.

    logprobs: of the sampled tokens. entropy: nats, mean over those. finished: every turn ended with a stop token, and
    the conversation within its limits. max_turns_reached: every turn ended with one, and there was to be one more.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropy: float = 0.0
    finished: bool = False
    max_turns_reached: bool = False

    def add_turn(self, tokens: list[int], logprobs: list[float], entropy: float) -> None:
        """Append a turn of the model."""
        total = len(self.logprobs) + len(tokens)
        self.entropy += (entropy - self.entropy) * len(tokens) / max(total, 1)
        self.tokens += tokens
        self.logprobs += logprobs


def generate_turns(
    model: NemotronH,
    prompts: Sequence[Sequence[int]],
    reply: Callable[[int, list[int]], list[int] | Retold | None],
    max_new_tokens: int,
    *,
    max_turns: int,
    max_length: int | None = None,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int],
    generator: torch.Generator,
    samples_per_prompt: int = 1,
    poll: Callable[[], None] = lambda: None,
    budget: ReasoningBudget | None = None,
    opens_answer: Sequence[bool] | None = None,
    reads_on: Callable[[int], bool] = lambda row: True,
) -> list[Conversation]:
    """`samples_per_prompt` conversations for each prompt; those of one prompt stand together.

    Args:
        reply: called with the number of a conversation and the tokens that the model just wrote in it, stop token
            included; returns the tokens that follow, up to where the model is to go on, perhaps in place of some before
            them, or None to end it. Those of different conversations are asked for at once, in threads: a tool may be
            a server.
        poll: called at every decoding step, and now and then while replies are waited for; raises to stop.
        max_new_tokens: of a turn. max_turns: of the model. max_length: tokens of prompt and conversation together;
            there has to be room for a whole turn, else the conversation ends without it, as not finished.
        reads_on: whether a conversation may have a further turn that goes on from the states of the one before. Those
            of others are not kept; where one of these goes on nevertheless, it reads its prompt from the start.
        others: as `generate`; the budget is that of a turn, and every turn opens what the first one did.
    """
    conversations = [Conversation() for _ in range(len(prompts) * samples_per_prompt)]
    rows = list(range(len(conversations)))
    opened = opens_answer = opens_answer or [False] * len(prompts)
    states: list[Cache | None] = [None] * len(prompts)
    for turn in range(max_turns):
        outputs = Generation([], [], [], [])
        for group in [slice(None)] if turn == 0 else _groups(prompts):

            def keeps_states(position: int, length: int, of_group: list[int] = rows[group]) -> bool:
                return reads_on(of_group[position]) and (max_length is None or length + max_new_tokens <= max_length)

            read = [state for state in states[group] if state is not None]
            states[group] = [None] * len(prompts[group])  # `generate` alone has them now
            outputs += generate(
                model, prompts[group], max_new_tokens, temperature=temperature, stop_token_ids=stop_token_ids,
                generator=generator, samples_per_prompt=samples_per_prompt if turn == 0 else 1, poll=poll,
                budget=budget, opens_answer=opened[group],
                states=read if len(read) == len(prompts[group]) else None,
                keeps_states=keeps_states if turn + 1 < max_turns else None,
            )  # fmt: skip
        answers = _replies(reply, rows, outputs.tokens, poll)
        going_on: list[int] = []
        next_prompts: list[list[int]] = []
        next_states: list[Cache | None] = []
        for position, row in enumerate(rows):
            conversation, sampled, answer = conversations[row], outputs.tokens[position], answers[position]
            conversation.add_turn(sampled, outputs.logprobs[position], outputs.entropies[position])
            conversation.finished = outputs.finished[position] and answer is None
            conversation.max_turns_reached = outputs.finished[position] and answer is not None and turn + 1 == max_turns
            if answer is None or not outputs.finished[position] or turn + 1 == max_turns:
                continue
            prompt_before = prompts[position // (samples_per_prompt if turn == 0 else 1)]
            follows, takes_back = (answer.ids, answer.takes_back) if isinstance(answer, Retold) else (answer, 0)
            before = [*prompt_before, *sampled]
            prompt = [*before[: len(before) - takes_back], *follows]
            if max_length is None or len(prompt) + max_new_tokens <= max_length:
                conversation.tokens += follows
                going_on.append(row)
                next_prompts.append(prompt)
                next_states.append(outputs.states[position] if outputs.states and not takes_back else None)
        if not going_on:
            break
        rows, prompts, states = going_on, next_prompts, next_states
        opened = [opens_answer[row // samples_per_prompt] for row in rows]
    return conversations


def _replies(
    reply: Callable[[int, list[int]], list[int] | Retold | None],
    rows: Sequence[int],
    sampled: Sequence[list[int]],
    poll: Callable[[], None],
) -> list[list[int] | Retold | None]:
    """What follows each response. Where `poll` or a reply raises, those that have not begun are dropped."""
    with ThreadPoolExecutor(REPLIES_AT_ONCE) as pool:
        futures = [pool.submit(reply, row, list(ids)) for row, ids in zip(rows, sampled, strict=True)]
        try:
            pending = set(futures)
            while pending:
                ended, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
                for future in ended:
                    future.result()  # raises what the reply did
                poll()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _groups(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """Neighbours of at most `PROMPT_TOKENS` together."""
    size = max(1, PROMPT_TOKENS // max(map(len, prompts)))
    return [slice(start, start + size) for start in range(0, len(prompts), size)]
