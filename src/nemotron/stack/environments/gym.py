"""What NeMo Gym reads and writes: records with a prompt, and responses with texts and calls.

    {"responses_create_params": {"input": [{"role": "user", "content": "What is 2+2? Box it."}]},
     "agent_ref": {"name": "math_with_judge_simple_agent"}, "question": "What is 2+2?", "expected_answer": "4"}

`from_gym` of a family's module makes a task of a record with its own fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit.chat import check_messages
from nemotron.stack.environments.task import Solution, Task

ROLE = "assistant"


def prompt_of(record: Mapping[str, Any]) -> str:
    """The text of the one user message of a record; UserError where there are others, or other things than text."""
    messages = messages_of(record)
    roles = [message["role"] for message in messages]
    if roles != ["user"]:
        raise UserError(f"responses_create_params.input holds {', '.join(roles)}; a task is one user message")
    return messages[0]["content"]


def messages_of(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation of a record up to where the model answers; UserError where it holds other things than text."""
    messages = [_message_of(item) for item in _input_of(record)]
    check_messages(messages, "responses_create_params.input")
    return messages


def conversation_of(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The conversation of a record with its reasoning, calls and results, as chat templates take it, and its tools.

    UserError where it holds something else.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in _input_of(record):
        match item:
            case {"type": "function_call", "name": str(name), "arguments": str(text)}:
                if not messages or messages[-1]["role"] != ROLE or reasoning:
                    messages.append({"role": ROLE, "content": "", "reasoning_content": reasoning})
                messages[-1].setdefault("tool_calls", []).append({"name": name, "arguments": _arguments_in(text)})
                reasoning = ""
            case {"type": "function_call_output", "output": str(text)}:
                messages.append({"role": "tool", "content": text})
            case {"type": "reasoning", "summary": [*parts]}:
                reasoning = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            case _:
                message: dict[str, Any] = _message_of(item)
                if message["role"] == ROLE:
                    message["reasoning_content"], reasoning = reasoning, ""
                messages.append(message)
    check_messages(messages, "responses_create_params.input")
    tools = record["responses_create_params"].get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and "name" in tool for tool in tools):
        raise UserError("responses_create_params.tools is no list of functions")
    keys = ("name", "description", "parameters")
    return messages, [{key: tool[key] for key in keys if tool.get(key)} for tool in tools]


def input_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as items of the Responses API, calls and their results among them: what `conversation_of` reads."""
    items: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of the calls that have no result yet
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": waiting.pop(0), "output": message["content"]})
            continue
        if reasoning := message.get("reasoning_content"):
            part = {"type": "summary_text", "text": reasoning}
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [part]})
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            waiting.append(f"call_{len(items)}")
            arguments = json.dumps(call["arguments"])
            items.append(
                {"type": "function_call", "call_id": waiting[-1], "name": call["name"], "arguments": arguments}
            )
    return items


def _input_of(record: Mapping[str, Any]) -> list[Any]:
    params = record.get("responses_create_params")
    items = params.get("input") if isinstance(params, Mapping) else None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise UserError("no prompt in responses_create_params.input")
    return items


def _message_of(item: Any) -> dict[str, str]:
    role = str(item.get("role", item.get("type"))) if isinstance(item, Mapping) else "?"
    if role not in ("system", "developer", "user", "assistant"):
        raise UserError(f"responses_create_params.input holds {role}, which is no message")
    content = item.get("content")
    if isinstance(content, list):  # parts: {"type": "input_text", "text": …}
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in texts else "\n".join(map(str, texts))
    if not isinstance(content, str) or not content.strip():
        raise UserError(f"the {role} message of responses_create_params.input has no text")
    return {"role": "system" if role == "developer" else role, "content": content}


def _arguments_in(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError("responses_create_params.input has a call whose arguments are no object")
    return arguments


def task_without_solution(family: str, record: Mapping[str, Any], spec: dict[str, Any]) -> Task:
    """The task of a record that shows no right answer, with all messages of its conversation."""
    messages = messages_of(record)
    prompt = "\n\n".join(message["content"] for message in messages)
    is_plain = [message["role"] for message in messages] == ["user"]
    return Task(
        family, prompt, canonical_of(family, prompt), spec, Solution("", ""), messages=None if is_plain else messages
    )


def text_in(record: Mapping[str, Any], name: str) -> str:
    """A field that must hold text."""
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{name} must be text, not {value!r}")
    return value.strip()


def text_of(output: Sequence[Any]) -> str:
    """The last message in the items of a response; reasoning is an item of its own. UserError: an item is broken."""
    messages = [item for item in _items(output) if item["type"] == "message" and item.get("role", "assistant") == ROLE]
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise UserError("response.output: the content of a message is neither text nor a list of parts")
    texts = [part.get("text") for part in content if part.get("type") == "output_text"]
    if not all(isinstance(text, str) for text in texts):
        raise UserError("response.output: an output_text without text")
    return "".join(map(str, texts))


def calls_in(output: Sequence[Any]) -> list[dict[str, Any]]:
    """The calls in the items of a response, as {name, arguments}.

    A call whose arguments are no JSON object is left out: no tool was run for it.
    """
    calls = []
    for item in _items(output):
        if item["type"] == "function_call" and isinstance(item.get("name"), str):
            try:
                arguments = json.loads(item.get("arguments") or "{}")
            except (TypeError, ValueError, RecursionError):
                continue
            if isinstance(arguments, dict):
                calls.append({"name": item["name"], "arguments": arguments})
    return calls


def response_of(text: str) -> dict[str, Any]:
    """A response that says `text`, as a resources server reads it."""
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_0", "type": "message", "role": ROLE, "status": "completed", "content": [part]}
    return {
        "id": "resp_0", "object": "response", "created_at": 0, "model": "policy", "output": [message], "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": False,
    }  # fmt: skip


def _items(output: Sequence[Any]) -> list[Mapping[str, Any]]:
    for item in output:
        if not isinstance(item, Mapping) or not isinstance(item.get("type", "message"), str):
            raise UserError("response.output: an item is no object with a type")
    return [{"type": "message", **item} for item in output]


def canonical_of(family: str, prompt: str) -> str:
    """What two records of one prompt have in common, whatever its case and blanks."""
    return f"{family}|gym|{' '.join(prompt.casefold().split())}"


def is_published(canonical: str) -> bool:
    """Whether a task was made of a published record: no generator draws it, so no evaluation asks it."""
    return canonical.split("|")[1:2] == ["gym"]
