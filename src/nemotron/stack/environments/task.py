"""What a verifiable task is: the prompt, the spec that its answer is checked against, a demonstration, and its split.

A task belongs to a split by the hash of its canonical form, never by the seed that drew it: `12+7` and `7+12` are in
the same split for every seed, so no evaluation task can occur in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, Literal, Protocol

import xxhash

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.chat import THINK, check_messages, parse_response

Call = dict[str, Any]  # of a tool: its name and arguments
Split = Literal["train", "valid", "eval"]
SPLITS: tuple[Split, ...] = ("train", "valid", "eval")
EVAL_PERCENT = 10
VALID_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Solution:
    """A demonstration: a correct reasoning trace and a correct answer. `style` names how the trace was written."""

    reasoning: str
    answer: str
    style: str = "careful"


@dataclass(frozen=True, slots=True)
class Task:
    """One verifiable task. `spec` is plain JSON, all that verification needs; `canonical` decides the split.

    `messages`: the conversation up to where the model answers, where that is more than `prompt` as the user's.
    `environment`: what verifies it, where that is the user's own (`own.py`); no record says so, only a config.
    """

    family: str
    prompt: str
    canonical: str
    spec: dict[str, Any] = field(hash=False)
    solution: Solution
    messages: list[dict[str, Any]] | None = field(default=None, hash=False)
    environment: Environment | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The task as plain JSON data, as written to the prompt files of RL. `Task.from_dict` is the inverse."""
        record = asdict(replace(self, environment=None))
        return {name: value for name, value in record.items() if name in _REQUIRED or value is not None}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Task:
        """Rebuild a task from `to_dict()`. Missing keys, unknown keys and values of a wrong type raise UserError."""
        _check_record(record, _TASK_KEYS, "")
        _check_record(record["solution"], _SOLUTION_KEYS, "solution.")
        check_messages(record.get("messages", []))
        return cls(**{**record, "solution": Solution(**record["solution"])})


_TASK_KEYS = {"family": str, "prompt": str, "canonical": str, "spec": dict, "solution": dict, "messages": list}
_SOLUTION_KEYS = {"reasoning": str, "answer": str, "style": str}
_OPTIONAL = {"style", "messages"}
_REQUIRED = _TASK_KEYS.keys() - _OPTIONAL


def _check_record(record: Any, keys: Mapping[str, type], prefix: str) -> None:
    """UserError unless `record` is an object with exactly these keys and values of these types."""
    if not isinstance(record, dict):
        raise UserError(f"not a task record: an object is needed, not {_shown(record)}")
    for key, value in record.items():
        if key not in keys:
            raise UserError(f"not a task record: unknown key {prefix}{key}", did_you_mean(str(key), keys))
        if not isinstance(value, keys[key]):
            needed = "a string" if keys[key] is str else "a list" if keys[key] is list else "an object"
            raise UserError(f"not a task record: {prefix}{key} must be {needed}, not {_shown(value)}")
    missing = [prefix + key for key in keys if key not in record and key not in _OPTIONAL]
    if missing:
        raise UserError(f"not a task record: {', '.join(missing)} missing")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying one response.

    `score`: right, score 1.0, or right in part, with the share that is. `wrong`: verified and not right, score 0.0.
    `error`: the verifier could not decide (a broken task, say); its score is nan, so that no mean counts it as a zero
    unnoticed.
    """

    status: Literal["score", "wrong", "error"]
    score: float
    reason: str = ""


class Environment(Protocol):
    """What an environment has to have. It may have `open_episode(spec)` as well, which is None for tasks of one turn.

    An episode has `respond(answer)`, with the messages of the role `tool` that answer a response, or None at the end of
    the episode, and `verdict()`, which is what `verify_answer` returns. The tools are those of the task's record.
    """

    def tasks(self) -> Iterable[Mapping[str, Any]]:
        """Records: `prompt`, text, or `messages`; `spec`, JSON that verification needs; where wanted `tools`, as chat
        templates take them, and `answer`, a right one, which is held against `verify_answer`. They may be endless."""

    def verify_answer(self, spec: dict[str, Any], answer: str) -> Verdict | float:
        """What an answer, without its reasoning, is worth: a verdict, or a number in 0..1, with True and False.

        It is called from several threads. What it raises makes an error of this one answer, which never counts as a
        zero; so a limit of time is its own to keep.
        """


def right() -> Verdict:
    """A response that is right."""
    return Verdict("score", 1.0)


def wrong(reason: str) -> Verdict:
    """A response that was verified and is not right."""
    return Verdict("wrong", 0.0, reason)


def partly(share: float, reason: str) -> Verdict:
    """A response of which a share, above 0 and below 1, is right."""
    return Verdict("score", share, reason)


def error(reason: str) -> Verdict:
    """A response that could not be verified."""
    return Verdict("error", math.nan, reason)


def turns(
    calls: Sequence[Call], result_of: Callable[[Call], str], answer: str, thoughts: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The messages of a demonstration with tools: each call and its result, then the answer without a call.

    `thoughts`: the reasoning before each of them; None: thinking is off.
    """
    messages: list[dict[str, Any]] = []
    for call in calls:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": result_of(call)})
    messages.append({"role": "assistant", "content": answer})
    for message, thought in zip(messages[::2], thoughts, strict=True) if thoughts is not None else ():
        message["reasoning_content"] = thought
    return messages


def split_of(canonical: str) -> Split:
    """The split a canonical task belongs to: xxh64(canonical) mod 100 below 10 eval, below 15 valid, else train."""
    bucket = xxhash.xxh64_intdigest(canonical.encode()) % 100
    if bucket < EVAL_PERCENT:
        return "eval"
    return "valid" if bucket < EVAL_PERCENT + VALID_PERCENT else "train"


def in_split_of(canonical: str, name: str) -> str:
    """`name`, the canonical form of a task that is made of another one, with the first number that puts it in the split
    of that one's `canonical`: what is held out in one family is trained on in none."""
    split = split_of(canonical)
    return next(numbered for number in count() if split_of(numbered := f"{name}|{number}") == split)


def answer_of(response: str, thinking: bool | None = None) -> str:
    """The answer in what a model generated after the generation prompt; empty if it stopped before answering.

    Args:
        response: text generated after the generation prompt, without the token that ended the turn.
        thinking: True when the generation prompt opened `<think>`, so that only what follows `</think>` is an answer;
            False when it did not; None when not known: what follows `</think>` if there is one, else all of it.
    """
    return parse_response(f"{THINK}{response}" if thinking else response)[1]
