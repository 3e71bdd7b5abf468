"""Chat templates: messages -> text, text with the loss mask, and back from a response to reasoning and answer.

The format is that of Nemotron 3 Nano: ChatML turns, reasoning between `<think>` tags, XML-style tool calls. With
reasoning off the tags stand empty. A multi-step turn (tool calls) keeps its reasoning; a new user turn drops the
reasoning of all earlier turns (`truncate_history_thinking`). The same format as a Jinja template travels with every
tokenizer, for inference engines (`template_source`); a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, nearest

TEMPLATES = ("nano3",)
ROLES = ("system", "user", "assistant", "tool")

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
CONTROL_TOKENS = (IM_START, IM_END, "<s>", "</s>", "<pad>")

Message = Mapping[str, Any]
"""`role`, `content`, and for the assistant optionally `reasoning_content` and `tool_calls` ([{name, arguments}])."""


def template_source(template: str = "nano3") -> str:
    """Jinja source of a chat template, as `tokenizer_config.json` carries it. UserError for an unknown name."""
    _check_template(template)
    return (Path(__file__).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8").rstrip("\n")


def generation_prompt(enable_thinking: bool = True, template: str = "nano3") -> str:
    """What opens an assistant turn; the model continues from here."""
    _check_template(template)
    return f"{IM_START}assistant\n" + (f"{THINK}\n" if enable_thinking else f"{THINK}{END_THINK}")


def render(
    messages: Sequence[Message],
    *,
    enable_thinking: bool = True,
    truncate_history_thinking: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    template: str = "nano3",
) -> str:
    """Conversation as text. With `add_generation_prompt` it ends where the model is to continue.

    `enable_thinking=False` renders every assistant turn without its reasoning. Raises UserError for an unknown template
    and for malformed messages.
    """
    segments = render_with_mask(
        messages,
        enable_thinking=enable_thinking,
        truncate_history_thinking=truncate_history_thinking,
        tools=tools,
        template=template,
    )
    tail = generation_prompt(enable_thinking, template) if add_generation_prompt else ""
    return "".join(text for text, _ in segments) + tail


def render_with_mask(
    messages: Sequence[Message],
    *,
    enable_thinking: bool = True,
    truncate_history_thinking: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str = "nano3",
) -> list[tuple[str, bool]]:
    """Conversation as segments `(text, trained)`; their concatenation is what `render` returns.

    Trained is what the model has to produce itself: everything of an assistant turn after the generation prompt, up to
    and including `<|im_end|>`. An earlier turn whose reasoning was cut is context only: training on it would teach to
    answer at once where the turn really began with reasoning. Tokenise segment by segment: then the tokens of a prompt
    at inference are exactly a prefix of the tokens in training.
    """
    _check_template(template)
    check_messages(messages)
    segments: list[tuple[str, bool]] = []

    def put(text: str, trained: bool = False) -> None:
        if segments and segments[-1][1] == trained:
            text = segments.pop()[0] + text
        if text:
            segments.append((text, trained))

    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if system is not None or tools:
        put(f"{IM_START}system\n{_system_text(system, tools)}{IM_END}\n")
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user":
            put(f"{IM_START}user\n{content}{IM_END}\n")
        elif role == "tool":
            opens = i == 0 or messages[i - 1]["role"] != "tool"
            closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            put(f"{IM_START}user\n" if opens else "")
            put(f"<tool_response>\n{content}\n</tool_response>\n")
            put(f"{IM_END}\n" if closes else "")
        elif role == "assistant":
            reasoning = message.get("reasoning_content") if enable_thinking else None
            cut = bool(reasoning) and truncate_history_thinking and i < last_user
            thinks = bool(reasoning) and not cut
            put(generation_prompt(thinks, template))
            body = f"{reasoning}\n{END_THINK}\n" if thinks else ""
            put(body + content + _tool_calls_text(message) + IM_END, trained=not cut)
            put("\n")
    return segments


def parse_response(text: str) -> tuple[str | None, str]:
    """Split what the model wrote after the generation prompt into `(reasoning, answer)`.

    Reasoning ends at the first `</think>`. Without that tag the whole text is the answer and reasoning is None, unless
    the text itself opens `<think>`: then it was cut off while reasoning and the answer is empty. Text after
    `<|im_end|>` is ignored, as are blanks around both parts.
    """
    text = text.split(IM_END, 1)[0]
    opened = THINK in text
    reasoning, closed, answer = text.partition(END_THINK)
    if not closed:
        return (text.split(THINK, 1)[1].strip() or None, "") if opened else (None, text.strip())
    return reasoning.split(THINK, 1)[-1].strip() or None, answer.strip()


def check_messages(messages: Sequence[Message], where: str = "message") -> None:
    """Refuse what the template cannot render, naming the message by its index (from 0) in a UserError."""
    for i, message in enumerate(messages):
        place = f"{where} {i}"
        if not isinstance(message, Mapping):
            raise UserError(f"{place} is not an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            guess = nearest(str(role), ROLES)
            raise UserError(
                f"{place}: unknown role {role!r}" + (f", did you mean {guess!r}?" if guess else ""),
                f"roles are {', '.join(ROLES)}",
            )
        if role == "system" and i > 0:
            raise UserError(f"{place}: a system message can only come first")
        calls = message.get("tool_calls") or []
        if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
            raise UserError(f"{place} ({role}): content must be text")
        if not isinstance(message.get("reasoning_content"), str | None):
            raise UserError(f"{place} ({role}): reasoning_content must be text")
        for call in calls:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), Mapping):
                raise UserError(f"{place} ({role}): a tool call needs a name and an object of arguments")


def _check_template(template: str) -> None:
    if template not in TEMPLATES:
        guess = nearest(template, TEMPLATES)
        raise UserError(
            f"unknown chat template {template!r}" + (f", did you mean {guess!r}?" if guess else ""),
            f"templates are {', '.join(TEMPLATES)}",
        )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system_text(system: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
    text = system or ""
    if not tools:
        return text
    text += "\n\n" if text else ""
    text += "# Tools\n\nThese functions can be called:\n\n<tools>\n"
    for tool in tools:
        function = tool.get("function", tool)
        text += f"<function>\n<name>{function['name']}</name>\n"
        if function.get("description"):
            text += f"<description>{function['description']}</description>\n"
        if function.get("parameters"):
            text += f"<parameters>{_json(function['parameters'])}</parameters>\n"
        text += "</function>\n"
    return text + (
        "</tools>\n\nTo call a function, end the answer with:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n"
        "</parameter>\n</function>\n</tool_call>"
    )


def _tool_calls_text(message: Message) -> str:
    calls = message.get("tool_calls") or []
    text = "\n" if calls and message.get("content") else ""
    for call in calls:
        function = call.get("function", call)
        text += f"<tool_call>\n<function={function['name']}>\n"
        for key, value in function["arguments"].items():
            text += f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    return text
