"""Nemotron Nano v2: turns that begin with `<SPECIAL_10>` and `<SPECIAL_11>`, of which the assistant's end with
`<SPECIAL_12>`; tools as JSON.

Whether the model reasons is said in the text: `/think` or `/no_think` in the system message or in that of a user; the
last message with one of them counts, and both are taken out. Of earlier assistant turns only the answer stays, without
the tags with which it was generated: so it is the last turn alone that stands as the model would produce it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemotron.kit.chat_templates.segments import (
    END_THINK,
    THINK,
    Message,
    Segments,
    Switches,
    Tool,
    function_of,
    to_json,
)

SYSTEM, TURN, END = "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"
TOOLS_OPEN = "These tools can be used to help the user:\n<AVAILABLE_TOOLS>["
TOOLS_CLOSE = (
    "]</AVAILABLE_TOOLS>\n\nTo call tools, end the answer with:\n"
    '<TOOLCALL>[{"name": "NAME", "arguments": {"KEY": "VALUE"}}, ...]</TOOLCALL>\n\n'
    "What they return comes as:\n<TOOL_RESPONSE>[FIRST, SECOND, ...]</TOOL_RESPONSE>"
)


def prompt(thinks: bool) -> str:
    """What opens an assistant turn."""
    return f"{TURN}Assistant\n" + (f"{THINK}\n" if thinks else f"{THINK}{END_THINK}")


def thinks(messages: Sequence[Message], default: bool) -> bool:
    """What the last `/think` or `/no_think` says; a message with both says `/think`."""
    for message in reversed(messages):
        if message["role"] in ("system", "user"):
            if "/think" in message["content"]:
                return True
            if "/no_think" in message["content"]:
                return False
    return default


def write(messages: Sequence[Message], tools: Sequence[Tool], switches: Switches, out: Segments) -> None:
    """Put a conversation into `out`. Trained: the last assistant turn after its prompt, up to `<SPECIAL_12>`.

    It is history, and not trained, where another is to follow (`add_generation_prompt`).
    """
    system = _without_switches(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
    out.put(f"{SYSTEM}System\n{system}{_declared(tools, after=system)}\n")
    last = -1 if switches.add_generation_prompt else len(messages) - 1
    thinking = thinks(messages, switches.enable_thinking)
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "user":
            out.put(f"{TURN}User\n{_without_switches(content)}\n")
        elif role == "tool":
            opens = i == 0 or messages[i - 1]["role"] != "tool"
            closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            out.put(f"{TURN}User\n<TOOL_RESPONSE>[" if opens else "")
            out.put(content)
            out.put("]</TOOL_RESPONSE>\n" if closes else ", ")
        elif role == "assistant":
            answer = content.strip()
            calls = _calls_text(message)
            answer += ("\n\n" if answer and calls else "") + calls
            if i != last:
                out.put(f"{TURN}Assistant\n{answer}\n{END}\n")
                continue
            reasoning = (message.get("reasoning_content") or "").strip() if thinking else ""
            out.put(prompt(thinks=bool(reasoning)))
            out.put((f"{reasoning}\n{END_THINK}\n\n" if reasoning else "") + f"{answer}\n{END}", trained=True)
            out.put("\n")


def _without_switches(text: str) -> str:
    return text.replace("/think", "").replace("/no_think", "").strip()


def _declared(tools: Sequence[Tool], after: str) -> str:
    if not tools:
        return ""
    listed = ", ".join(to_json(function_of(tool)) for tool in tools)
    return ("\n\n" if after else "") + TOOLS_OPEN + listed + TOOLS_CLOSE


def _calls_text(message: Message) -> str:
    calls = [function_of(call) for call in message.get("tool_calls") or []]
    listed = ", ".join(f'{{"name": "{call["name"]}", "arguments": {to_json(call["arguments"])}}}' for call in calls)
    return f"<TOOLCALL>[{listed}]</TOOLCALL>" if calls else ""
