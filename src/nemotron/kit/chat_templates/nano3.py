"""Nemotron 3 Nano: ChatML turns, reasoning between `<think>` tags, XML-style tool calls.

With reasoning off the tags stand empty. A multi-step turn (tool calls) keeps its reasoning; a new user turn drops the
reasoning of all earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemotron.kit.chat_templates.segments import (
    END_THINK,
    IM_END,
    IM_START,
    THINK,
    Message,
    Segments,
    Switches,
    Tool,
    function_of,
    last_user_turn,
    to_json,
)

TOOLS_OPEN = "# Tools\n\nThese functions can be called:\n\n<tools>\n"
TOOLS_CLOSE = (
    "</tools>\n\nTo call a function, end the answer with:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n"
    "</parameter>\n</function>\n</tool_call>"
)


def prompt(thinks: bool) -> str:
    """What opens an assistant turn."""
    return f"{IM_START}assistant\n" + (f"{THINK}\n" if thinks else f"{THINK}{END_THINK}")


def write(messages: Sequence[Message], tools: Sequence[Tool], switches: Switches, out: Segments) -> None:
    """Put a conversation into `out`. Trained: an assistant turn after its prompt, up to and including `<|im_end|>`."""
    last_user = last_user_turn(messages)
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if system is not None or tools:
        out.put(f"{IM_START}system\n{_system_text(system, tools)}{IM_END}\n")
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user":
            out.put(f"{IM_START}user\n{content}{IM_END}\n")
        elif role == "tool":
            put_tool_response(messages, i, out)
        elif role == "assistant":
            reasoning = message.get("reasoning_content") if switches.enable_thinking else None
            cut = bool(reasoning) and switches.truncate_history_thinking and i < last_user
            thinks = bool(reasoning) and not cut
            out.put(prompt(thinks))
            body = f"{reasoning}\n{END_THINK}\n" if thinks else ""
            out.put(body + content + _tool_calls_text(message) + IM_END, trained=not cut)
            out.put("\n")


def put_tool_response(messages: Sequence[Message], i: int, out: Segments) -> None:
    """A tool's answer; neighbours share one user turn."""
    opens = i == 0 or messages[i - 1]["role"] != "tool"
    closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
    out.put(f"{IM_START}user\n" if opens else "")
    out.put(f"<tool_response>\n{messages[i].get('content') or ''}\n</tool_response>\n")
    out.put(f"{IM_END}\n" if closes else "")


def _system_text(system: str | None, tools: Sequence[Tool]) -> str:
    text = system or ""
    if not tools:
        return text
    text += ("\n\n" if text else "") + TOOLS_OPEN
    for function in map(function_of, tools):
        text += f"<function>\n<name>{function['name']}</name>\n"
        if function.get("description"):
            text += f"<description>{function['description']}</description>\n"
        if function.get("parameters"):
            text += f"<parameters>{to_json(function['parameters'])}</parameters>\n"
        text += "</function>\n"
    return text + TOOLS_CLOSE


def _tool_calls_text(message: Message) -> str:
    calls = message.get("tool_calls") or []
    text = "\n" if calls and message.get("content") else ""
    for function in map(function_of, calls):
        text += f"<tool_call>\n<function={function['name']}>\n"
        for key, value in function["arguments"].items():
            text += f"<parameter={key}>\n{value if isinstance(value, str) else to_json(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    return text
