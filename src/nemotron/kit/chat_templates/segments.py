"""What the three formats share: how messages are given, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""`role`, `content`, and for the assistant optionally `reasoning_content` and `tool_calls` ([{name, arguments}])."""
Tool = Mapping[str, Any]
"""A function: `name`, optionally `description` and `parameters` (JSON schema); or one wrapped in `{"function": …}`."""

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Switches:
    """What the variables of the Jinja templates say."""

    enable_thinking: bool = True
    truncate_history_thinking: bool = True
    low_effort: bool = False
    add_generation_prompt: bool = False


class Segments:
    """Text in the order of writing, as `(text, trained)`; neighbours of one kind are one segment."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bool]] = []
        self._pending: list[str] = []
        self._trained = False

    def put(self, text: str, trained: bool = False) -> None:
        """Append `text`, which the model has to produce itself (`trained`) or is given."""
        if not text:
            return
        if trained != self._trained:
            self._flush()
            self._trained = trained
        self._pending.append(text)

    def finish(self) -> list[tuple[str, bool]]:
        """All segments."""
        self._flush()
        return self.done

    def _flush(self) -> None:
        if self._pending:
            self.done.append(("".join(self._pending), self._trained))
            self._pending = []


def function_of(call_or_tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function in a tool or a call, with or without the envelope of the OpenAI format."""
    function: Mapping[str, Any] = call_or_tool.get("function", call_or_tool)
    return function


def to_json(value: object) -> str:
    """As the filter `tojson` of transformers writes it: characters as they are, keys in the order given."""
    return json.dumps(value, ensure_ascii=False)


def last_user_turn(messages: Sequence[Message]) -> int:
    """Index of the last user message; -1 without one."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
