"""Conversations as people publish them -> messages and tools as the chat templates take them.

`to_messages` reads a record of any of these forms; the first that fits counts:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}      OpenAI
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}          ShareGPT
    {"instruction": "…", "input": "…", "output": "…"}                                            Alpaca
    {"prompt": "…", "completion": "…"}                                  both may be lists of messages
    {"question": "…", "answer": "…"}
    {"prompt": "…", "chosen": "…", "rejected": "…"}                     a preference pair: the chosen one is learnt;
                                                                        `question` is read as `prompt`; `to_pair`
                                                                        reads both answers

Beside them `tools` declares functions, `system` is a system turn, `reasoning` is what precedes an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from nemotron.kit.chat import END_THINK, SHOWN, THINK, UntrainableError, json_value
from nemotron.kit.chat_template import load_template
from nemotron.kit.chat_templates import is_path
from nemotron.kit.record_fields import QUESTION_AND_ANSWER, REASONING, TURNS

NO_CONVERSATION = "no conversation in it"
NO_PAIR = "no preference pair"
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles under other names: ShareGPT's, OpenAI's, Gemini's."""


def to_messages(record: Mapping[str, Any]) -> list[Any]:
    """The conversation of a record, normalised (`normalize_messages`); whether it can be trained on is not checked.

    UntrainableError: the record has none of the forms above; names its fields and a line that would help.
    """
    for name in TURNS:
        if record.get(name) is not None:
            messages = normalize_messages(record[name])
            if messages == []:
                raise UntrainableError(NO_CONVERSATION, f"{NO_CONVERSATION}: {name} is an empty list")
            messages = messages if isinstance(messages, list) else [messages]
            return _with_system(record, messages)
    for question, answer in QUESTION_AND_ANSWER:
        if record.get(question) is not None and record.get(answer) is not None:
            asked, answered = _turns(record[question], "user"), _turns(record[answer], "assistant")
            if isinstance(record.get("input"), str) and record["input"].strip() and question == "instruction":
                if not isinstance(record[question], str):
                    kind = type(record[question]).__name__
                    raise UntrainableError(NO_CONVERSATION, f"{NO_CONVERSATION}: instruction is not text, but a {kind}")
                asked[0]["content"] = f"{asked[0]['content']}\n\n{record['input']}"
            if answered[: len(asked)] == asked:  # `chosen` may be the whole conversation
                asked = []
            return _with_system(record, [*_history(record), *asked, *_with_reasoning(record, answered)])
    if isinstance(record.get("chosen"), list):
        return normalize_messages(record["chosen"])
    raise UntrainableError(NO_CONVERSATION, f"{NO_CONVERSATION}: its fields are {_fields(record)}", _advice(record))


def to_pair(record: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Prompt, chosen answer and rejected answer of a preference pair, each a list of messages as `to_messages` has it.

    The prompt is in `prompt` or `question`, in a list of turns beside the answers, or at the beginning of both answers,
    which are then whole conversations. It ends with the last user turn that both have.

    UntrainableError: the record is no such pair, or both answers are equal.
    """
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if missing:
        raise UntrainableError(NO_PAIR, f"{NO_PAIR}: no field {missing[0]!r}; its fields are {_fields(record)}")
    answers = [normalize_messages(record[name]) for name in ("chosen", "rejected")]
    # Beside whole conversations a list of turns is one of them once more.
    is_whole = isinstance(answers[0], list) and any(
        isinstance(turn, dict) and turn.get("role") == "user" for turn in answers[0]
    )
    names = ("prompt", "question", *(() if is_whole else TURNS))
    asked = next((record[name] for name in names if record.get(name) is not None), None)
    prompt = {} if asked is None else {"prompt": asked}
    beside = {name: record[name] for name in ("system", "system_prompt") if record.get(name) is not None}
    chosen, rejected = (to_messages({**beside, **prompt, "chosen": answer}) for answer in answers)
    if chosen == rejected:
        raise UntrainableError("equal answers", "chosen and rejected are equal")
    common = 0
    for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)):
        if one != other:
            break
        if isinstance(one, dict) and one.get("role") == "user":
            common = i + 1
    if not common:
        raise UntrainableError(NO_PAIR, f"{NO_PAIR}: chosen and rejected have no user turn in common")
    return chosen[:common], chosen[common:], rejected[common:]


def unused_keys(messages: Iterable[Any], template: str) -> set[str]:
    """Keys of the messages that `template` does not show; of a user's template, those that its text does not name."""
    keys = {key for message in messages if isinstance(message, Mapping) for key in message} - {*SHOWN, "weight"}
    if not is_path(template):
        return keys
    source = load_template(template).source
    return {key for key in keys if not re.search(rf"(?<!\w){re.escape(key)}(?!\w)", source)}


def normalize_messages(messages: Any) -> Any:
    """Messages as they are published, as the templates take them; what is malformed stays as it is.

    A list given as JSON text is read; fields that are None or empty lists go; `from` and `value` become `role` and
    `content`, other names of roles those of `ROLE_NAMES`; system turns at the beginning become one; arguments of a call
    given as JSON text become an object; content given in parts of text is put together; reasoning under another name,
    or at the beginning of the content up to `</think>` (`<think>` may be missing: it is in the prompt), becomes
    `reasoning_content`.
    """
    messages = _from_json(messages)
    if not isinstance(messages, list):
        return messages
    clean = [_normalized(message) if isinstance(message, Mapping) else message for message in messages]
    while len(clean) > 1 and _is_system(clean[0]) and _is_system(clean[1]):
        clean[:2] = [{**clean[0], "content": f"{clean[0]['content']}\n\n{clean[1]['content']}"}]
    return clean


def normalize_tools(tools: Any) -> list[Any] | None:
    """Declarations as they are published (a list, each an object, any of it as JSON text); None without any."""
    tools = _from_json(tools)
    if not isinstance(tools, list):
        return None if tools in (None, "", "null") else [tools]
    return [_normalized_tool(_from_json(tool)) for tool in tools] or None


# --- Records ----------------------------------------------------------------------------------------------------------


def _turns(value: Any, role: str) -> list[dict[str, Any]]:
    """A question or an answer: text, or a message or messages already."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return [message if isinstance(message, dict) else {"content": message} for message in normalize_messages(value)]
    return [_normalized({"role": role, "content": value})]


def _history(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns of an Alpaca record: pairs of a question and an answer."""
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UntrainableError("malformed messages", "history is not a list of pairs [question, answer]")
    return [
        _normalized({"role": role, "content": text})
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _with_system(record: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    text = record.get("system") or record.get("system_prompt")
    if not isinstance(text, str) or not text or (messages and _is_system(messages[0])):
        return messages
    return [{"role": "system", "content": text}, *messages]


def _with_reasoning(record: Mapping[str, Any], answered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reasoning that stands in a field beside the answer."""
    reasoning = next((record[name] for name in REASONING if record.get(name)), None)
    if reasoning is None or len(answered) != 1 or "reasoning_content" in answered[0]:
        return answered
    return [{**answered[0], "reasoning_content": reasoning}]


_NO_TURN = ("id", "category", "system", "system_prompt")


def _fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:12])) or "none"


def _advice(record: Mapping[str, Any]) -> str:
    """A line of the config that would read the record, as far as it can be guessed."""
    lists = [name for name, value in record.items() if isinstance(_from_json(value), list)]
    texts = [name for name, value in record.items() if isinstance(value, str) and name not in _NO_TURN]
    if lists:
        return f"if {lists[0]} holds the turns, say so in the source: columns: {{messages: {lists[0]}}}"
    if len(texts) > 1:
        pair = f"{{question: {texts[0]}, answer: {texts[1]}}}"
        return f"if these are question and answer, say so in the source: columns: {pair}"
    return "a conversation is {messages: [{role: user, content: …}, {role: assistant, content: …}]}"


# --- Messages ---------------------------------------------------------------------------------------------------------


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system" and isinstance(message.get("content"), str)


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    clean = {key: value for key, value in message.items() if value is not None and value != []}
    if "role" not in clean and "from" in clean:
        clean = {"role": clean.pop("from"), "content": clean.pop("value", None), **clean}
    role = clean.get("role")
    if isinstance(role, str) and role in ROLE_NAMES:
        clean["role"] = ROLE_NAMES[role]
    elif role == "function_call":  # ShareGPT: a turn of its own that is the call
        clean["role"], clean["tool_calls"], clean["content"] = "assistant", clean.get("content"), ""
    if "function_call" in clean:  # OpenAI, before tool_calls
        clean.setdefault("tool_calls", clean.pop("function_call"))
    if "tool_calls" in clean:
        calls = _from_json(clean["tool_calls"])
        calls = [calls] if isinstance(calls, Mapping) else calls
        clean["tool_calls"] = [_normalized_call(call) for call in calls] if isinstance(calls, list) else calls
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    content = clean.get("content")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        clean["content"] = content = "".join(part["text"] for part in content)
    if clean.get("role") == "assistant":
        _find_reasoning(clean)
    if clean.get("weight") == 1:  # every turn has that
        del clean["weight"]
    return clean


def _find_reasoning(message: dict[str, Any]) -> None:
    """Put the reasoning of an assistant turn where templates look for it."""
    for name in REASONING[1:]:
        if name in message and not message.get("reasoning_content"):
            message["reasoning_content"] = message.pop(name)
    content = message.get("content")
    if isinstance(content, str) and not message.get("reasoning_content"):
        reasoning, closed, answer = content.partition(END_THINK)
        reasoning = reasoning.strip().removeprefix(THINK)
        if closed and THINK not in reasoning:
            message["content"] = answer.lstrip()
            if reasoning.strip():
                message["reasoning_content"] = reasoning.strip()


def _normalized_call(call: Any) -> Any:
    call = _from_json(call)
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _arguments(function)}}
    return {**call, "arguments": _arguments(call)}


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call; an empty text, as some servers write it, is an object without any."""
    arguments = function.get("arguments")
    return {} if isinstance(arguments, str) and not arguments.strip() else _from_json(arguments)


def _normalized_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _normalized_tool(tool["function"])}
    return {**tool, "parameters": _from_json(tool["parameters"])} if "parameters" in tool else tool


def _from_json(value: Any) -> Any:
    """The value behind JSON text of an object or a list; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json_value(value)
    return value
