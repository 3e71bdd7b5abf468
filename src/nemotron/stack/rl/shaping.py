"""What the form of a response does to its reward and its advantage, apart from whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemotron.kit.chat import END_THINK, THINK
from nemotron.kit.schemas.rl import EffortConfig

_CALL_MARKS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")  # not <TOOLCALL>, as recorded


def effort_reward(reward: float, num_tokens: int, effort: EffortConfig) -> float:
    """The reward of a response to a prompt that asks for low effort: more for a short one, less for a long one.

    With l = min(1, low_weight (1 - num_tokens / low_ub)): reward + reward l where l is above 0, else reward +
    low_penalty l. A wrong answer, reward 0, gains nothing by being short.
    """
    length_reward = min(1.0, effort.low_weight * (1 - num_tokens / effort.low_ub))
    return reward + (reward if length_reward > 0 else effort.low_penalty) * length_reward


@dataclass
class Message:
    """`num_tokens` of a conversation, and what is wrong with their form. generated: written by the policy.

    takes_back: of an environment's message, how many tokens before it are no longer in the conversation: the template
    shows the response before it differently from how it was written, and so the message tells it anew.
    """

    num_tokens: int
    generated: bool
    invalid_tool_call: bool = False
    malformed_thinking: bool = False
    takes_back: int = 0


def check_form(reasoning: str | None, answer: str) -> tuple[bool, bool]:
    """(invalid tool call, malformed thinking) of a response that `parse_response` has split.

    Marks of a tool call are invalid in both parts: who parses tool calls takes the valid ones out of the text first.
    Thinking is malformed where a mark of it stands in the answer, or twice in the reasoning.
    """
    reasoning = reasoning or ""
    invalid = any(mark in reasoning or mark in answer for mark in _CALL_MARKS)
    malformed = any(mark in answer or reasoning.count(mark) > 1 for mark in (THINK, END_THINK))
    return invalid, malformed


def message_advantages(
    advantage: float, messages: Sequence[Message], invalid_tool_call: float | None, malformed_thinking: float | None
) -> list[float]:
    """The advantage of a rollout at each token, with that of a malformed message overwritten; None overwrites nothing.

    Only messages of the policy are overwritten. An invalid tool call goes before malformed thinking.
    """
    advantages = []
    for message in messages:
        here = advantage
        if message.generated and message.malformed_thinking and malformed_thinking is not None:
            here = malformed_thinking
        if message.generated and message.invalid_tool_call and invalid_tool_call is not None:
            here = invalid_tool_call
        advantages += [here] * message.num_tokens
    return advantages


def count_forms(messages: Sequence[Message]) -> dict[str, int]:
    """How many messages of the policy there are, and have which fault; one with both has an invalid tool call."""
    written = [message for message in messages if message.generated]
    return {
        "messages": len(written),
        "invalid_tool_calls": sum(message.invalid_tool_call for message in written),
        "malformed_thinking": sum(m.malformed_thinking and not m.invalid_tool_call for m in written),
    }
