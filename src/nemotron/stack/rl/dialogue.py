"""An episode in tokens: between a model, which reads and writes tokens, and an environment, which knows text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Tokenizer

from nemotron.kit.chat import (
    THINK,
    generation_prompt,
    parse_response,
    parse_tool_calls,
    response_of,
    retold_turn,
    template_opens_reasoning,
    text_after_response,
    thinks,
)
from nemotron.kit.chat_template import load_template
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import Episode, Task, Verdict, verify_all
from nemotron.stack.environments.task import error
from nemotron.stack.models.decoding.turns import REPLIES_AT_ONCE, Retold
from nemotron.stack.rl.shaping import Message, check_form


class Dialogue:
    """One attempt at one task under a chat template. `messages`: what the conversation after the prompt consists of.

    `episode`: None where the task is done with one response. `response`: the last one. `called`: the names of all tools
    that its responses called, declared or not. `opened`: whether its prompts open reasoning (`chat.opens_reasoning`).
    """

    def __init__(self, episode: Episode | None, tokenizer: Tokenizer, template: str, thinking: bool) -> None:
        self.episode, self.tokenizer, self.template = episode, tokenizer, template
        self.thinking, self.opened = thinks(template, thinking), template_opens_reasoning(template, thinking)
        self.messages: list[Message] = []
        self.response = ""
        self.called: list[str] = []
        self._answer: Message | None = None  # to the last response: part of the conversation once it goes on
        self.failure: Verdict | None = None

    @property
    def reads_on(self) -> bool:
        """Whether there may be a further turn, which begins with all tokens of the one before."""
        has_turns = self.episode is not None and self.episode.has_turns
        return has_turns and load_template(self.template).keeps_turns

    def reply(self, sampled_ids: list[int]) -> list[int] | Retold | None:
        """The tokens that follow a response, up to where the model is to go on; None at the end of the episode.

        Under a template that shows an earlier turn differently from how it was written they take its place.

        Where the environment fails, the episode ends, and its verdict is an error.
        """
        text = response_of(self.tokenizer.decode(sampled_ids, skip_special_tokens=False), self.template)
        reasoning, answer = parse_response(f"{THINK}{text}" if self.opened else text)
        tools = self.episode.tools if self.episode else []
        without_calls, calls = parse_tool_calls(answer, tools)
        self.called += [call["name"] for call in calls]
        if tools:  # calls that can be read are no fault of form
            answer = without_calls
        if self._answer:
            self.messages.append(self._answer)
        self.messages.append(Message(len(sampled_ids), True, *check_form(reasoning, answer)))
        self.response = text
        if self.episode is None:
            return None
        try:
            results = self.episode.respond(text)
            return None if results is None else self._following(results, without_calls, calls, len(sampled_ids))
        except Exception as failure:  # of the environment, or of a template that cannot show what it returned
            self.failure = error(f"{type(failure).__name__}: {failure}")
            return None

    def _following(
        self, results: list[dict[str, Any]], without_calls: str, calls: list[dict[str, Any]], num_sampled: int
    ) -> list[int] | Retold:
        """The tokens of what the environment returned for a response."""
        if load_template(self.template).keeps_turns:
            ids = self._encode(text_after_response(results, enable_thinking=self.thinking, template=self.template))
            self._answer = Message(len(ids), False)
            return ids
        ids = self._encode(
            retold_turn(without_calls, calls, results, enable_thinking=self.thinking, template=self.template)
        )
        opening = self._encode(generation_prompt(self.template, self.thinking))
        self._answer = Message(len(ids), False, takes_back=len(opening) + num_sampled)
        return Retold(ids, self._answer.takes_back)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def verdict(self) -> Verdict | None:
        """What the episode is worth, never raises; None without an episode."""
        if self.episode is None or self.failure:
            return self.failure
        try:
            return self.episode.verdict()
        except Exception as failure:
            return error(f"{type(failure).__name__}: {failure}")


def episode_verdicts(dialogues: Sequence[Dialogue | None]) -> list[Verdict | None]:
    """`Dialogue.verdict` of each, None without a dialogue. They are waited for together: each may run programs, or ask
    a server."""
    if not any(dialogue and dialogue.episode for dialogue in dialogues):
        return [None] * len(dialogues)
    with ThreadPoolExecutor(REPLIES_AT_ONCE) as pool:
        return list(pool.map(lambda dialogue: dialogue.verdict() if dialogue else None, dialogues))


def verdicts(task: Task, dialogues: Sequence[Dialogue], sandbox: Sandbox) -> list[Verdict]:
    """What attempts at one task are worth, that have ended; programs run in `sandbox`, side by side."""
    of_episodes = [verdict for verdict in episode_verdicts(dialogues) if verdict is not None]
    if len(of_episodes) == len(dialogues):
        return of_episodes
    responses = [dialogue.response for dialogue in dialogues]
    return verify_all([task] * len(responses), responses, dialogues[0].opened, sandbox)
