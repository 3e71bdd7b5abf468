"""Nemotron 3 Super: the turns of Nemotron 3 Nano, and a switch for low effort at the end of the last user turn.

As in the template that comes with the released model, the system turn is there even when it is empty, declarations of
tools list each parameter, and an assistant turn loses the blanks at its end. What an earlier turn keeps after its
reasoning was dropped begins with the line break that followed `</think>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron.kit.chat_templates.nano3 import TOOLS_CLOSE, TOOLS_OPEN, prompt, put_tool_response
from nemotron.kit.chat_templates.segments import (
    END_THINK,
    IM_END,
    IM_START,
    Message,
    Segments,
    Switches,
    Tool,
    function_of,
    last_user_turn,
    to_json,
)

LOW_EFFORT = "{reasoning effort: low}"


def write(messages: Sequence[Message], tools: Sequence[Tool], switches: Switches, out: Segments) -> None:
    """Put a conversation into `out`. Trained: an assistant turn after its prompt, up to and including `<|im_end|>`."""
    last_user = last_user_turn(messages)
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    out.put(f"{IM_START}system\n{system}{_declared(tools, after=system)}{IM_END}\n")
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user":
            effort = f"\n\n{LOW_EFFORT}" if switches.low_effort and i == last_user else ""
            out.put(f"{IM_START}user\n{content}{effort}{IM_END}\n")
        elif role == "tool":
            put_tool_response(messages, i, out)
        elif role == "assistant":
            reasoning = message.get("reasoning_content") or "" if switches.enable_thinking else ""
            reasons = bool(reasoning.strip())
            earlier = switches.truncate_history_thinking and i < last_user
            cut = reasons and earlier
            calls = message.get("tool_calls") or []
            out.put(prompt(thinks=reasons and not cut))
            if calls and earlier:
                body = content.strip()
            elif cut:
                body = f"\n{content}".rstrip()
            elif reasons:
                body = f"{reasoning}\n{END_THINK}\n{content}".rstrip()
            else:
                body = content.rstrip()
            out.put(body + ("\n" if calls else "") + "".join(map(_call, calls)) + IM_END, trained=not cut)
            out.put("\n")


def _declared(tools: Sequence[Tool], after: str) -> str:
    if not tools:
        return ""
    text = ("\n\n" if after else "") + TOOLS_OPEN
    for function in map(function_of, tools):
        text += f"<function>\n<name>{function['name']}</name>\n"
        if function.get("description") is not None:
            text += f"<description>{function['description'].strip()}</description>\n"
        parameters = function.get("parameters") or {}
        text += "<parameters>\n"
        for name, about in (parameters.get("properties") or {}).items():
            text += f"<parameter>\n<name>{name}</name>\n"
            if about.get("type") is not None:
                text += f"<type>{about['type']}</type>\n"
            if about.get("description") is not None:
                text += f"<description>{about['description'].strip()}</description>\n"
            if about.get("enum") is not None:
                text += f"<enum>{to_json(about['enum'])}</enum>\n"
            text += _others(about, ("name", "type", "description", "enum")) + "</parameter>\n"
        text += _others(parameters, ("type", "properties", "required"))
        if parameters.get("required") is not None:
            text += f"<required>{to_json(parameters['required'])}</required>\n"
        text += "</parameters>\n" + _others(function, ("type", "name", "description", "parameters")) + "</function>\n"
    return text + TOOLS_CLOSE


def _others(given: Mapping[str, Any], without: Sequence[str]) -> str:
    """Whatever else a JSON schema says, key by key."""
    return "".join(f"<{key}>{_shown(value)}</{key}>\n" for key, value in given.items() if key not in without)


def _call(call: Mapping[str, Any]) -> str:
    function = function_of(call)
    text = f"<tool_call>\n<function={function['name']}>\n"
    for key, value in function["arguments"].items():
        text += f"<parameter={key}>\n{_shown(value)}\n</parameter>\n"
    return text + "</function>\n</tool_call>\n"


def _shown(value: object) -> str:
    """JSON of an object or a list; of anything else what Jinja prints (`True`, `None`)."""
    return to_json(value) if isinstance(value, dict | list | tuple) else str(value)
