"""Chat: messages -> text, text with the loss mask, and back from a response to reasoning and answer.

A template is named by its family or given by its path (`kit/chat_template.py`). Families: `nano2` is Nemotron Nano v2,
`nano3`, `super3` and `ultra3` are Nemotron 3 Nano, Super and Ultra, `lightning35` is Nemotron 3.5 Lightning. The same
Jinja source travels with every tokenizer, for inference engines.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from nemo_runspec.errors import UserError, nearest
from nemotron.kit.chat_template import Segment, load_template
from nemotron.kit.chat_templates import TEMPLATES

Message = Mapping[str, Any]
"""`role`, `content`, and for the assistant optionally `reasoning_content`, `tool_calls` ([{name, arguments}]), and
`weight` 0, with which it is context only."""
Tool = Mapping[str, Any]
"""A function: `name`, optionally `description` and `parameters` (JSON schema); or one wrapped in `{"function": …}`."""

Opening = Literal["reasoning", "answer", "unknown"]
"""How a prompt ends: with `<think>`, with `</think>`, or without either, so that the response itself may reason."""

ROLES = ("system", "user", "assistant", "tool")
SHOWN = ("role", "content", "reasoning_content", "tool_calls")
"""Keys of a message that the families' templates show."""
NO_ANSWER = "no assistant turn"
THINK, END_THINK = "<think>", "</think>"
_CALL = re.compile(
    r"<tool_call>\s*<function=([^<>\n]+)>((?:(?!<tool_call>).)*?)</function>\s*</tool_call>\n?", re.DOTALL
)
_CALL_LIST = re.compile(r"<TOOLCALL>((?:(?!<TOOLCALL>).)*?)</TOOLCALL>\n?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_PROBE = "probe"
_JSON_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    dict: ("object",), list: ("array",),
}  # fmt: skip
_PYTHON_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def control_tokens(template: str) -> tuple[str, ...]:
    """Strings that no message may contain, because they would open or end a turn."""
    return (*load_template(template).turn_tokens, "<s>", "</s>", "<pad>")


def required_tokens(template: str) -> tuple[str, ...]:
    """Strings that must be single tokens in the tokenizer that a template is used with."""
    turns = load_template(template).turn_tokens
    # The tokenizer of Nano v2 has no tokens for the reasoning tags; of a user's template only the turns are known.
    return (*turns, THINK, END_THINK) if template in TEMPLATES and template != "nano2" else turns


def generation_prompt(template: str, enable_thinking: bool = True) -> str:
    """What opens an assistant turn; the model continues from here."""
    question: list[Message] = [{"role": "user", "content": ""}]
    before = render(question, enable_thinking=enable_thinking, template=template)
    text = render(question, enable_thinking=enable_thinking, template=template, add_generation_prompt=True)
    return text.removeprefix(before)


def opening_of(prompt: str) -> Opening:
    """What a response to `prompt` begins with."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "reasoning"
    return "answer" if end.endswith(END_THINK) else "unknown"


def opens_reasoning(prompt: str) -> bool | None:
    """Whether a response to `prompt` begins inside of reasoning; None: it may open its own."""
    return {"reasoning": True, "answer": False, "unknown": None}[opening_of(prompt)]


@lru_cache(maxsize=32)
def template_opens_reasoning(template: str, thinking: bool = True) -> bool | None:
    """`opens_reasoning` of the prompts of a template, with reasoning on, or off where it has the switch."""
    return opens_reasoning(generation_prompt(template, thinks(template, thinking)))


def thinks(template: str, thinking: bool) -> bool:
    """`thinking`, or True where the template has no switch that turns reasoning off."""
    return thinking or not load_template(template).has_switch("enable_thinking")


def answer_prompt(
    messages: Sequence[Message], *, thinking: bool = True, tools: Sequence[Tool] | None = None, template: str
) -> str:
    """The prompt for an answer to `messages`, with reasoning on, or off where the template has the switch."""
    return render(
        messages, enable_thinking=thinks(template, thinking), tools=tools, add_generation_prompt=True, template=template
    )


def end_of_reasoning(template: str) -> str:
    """What stands between reasoning and answer, `</think>` with its line breaks.

    UserError: the template shows no reasoning, or its generation prompt does not open one.
    """
    answer: Message = {"role": "assistant", "content": _PROBE, "reasoning_content": _PROBE}
    text = render([{"role": "user", "content": ""}, answer], template=template)
    between = text.split(_PROBE)[1] if text.count(_PROBE) == 2 else ""
    if END_THINK not in between:
        raise UserError(f"chat template {template} shows no reasoning before an answer, which a budget could end")
    if not generation_prompt(template).rstrip().endswith(THINK):
        raise UserError(
            f"chat template {template} does not end a prompt with {THINK}: a budget cannot know if a response reasons"
        )
    return between


def render(
    messages: Sequence[Message],
    *,
    enable_thinking: bool = True,
    low_effort: bool = False,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = False,
    template: str,
) -> str:
    """Conversation as text. With `add_generation_prompt` it ends where the model is to continue.

    `enable_thinking=False` asks for an answer without reasoning; with nano2 it is what holds where no message says
    `/think` or `/no_think`. `low_effort` is for super3. Raises UserError for an unknown template, a switch
    that the template does not have, and malformed messages.
    """
    segments = render_with_mask(
        messages,
        enable_thinking=enable_thinking,
        low_effort=low_effort,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        template=template,
    )
    return "".join(text for text, _ in segments)


def render_with_mask(
    messages: Sequence[Message],
    *,
    enable_thinking: bool = True,
    low_effort: bool = False,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = False,
    template: str,
) -> list[Segment]:
    """Conversation as segments `(text, trained)`; their concatenation is what `render` returns.

    Trained is what the model has to produce itself: everything of an assistant turn after the generation prompt, up to
    and including the token that ends it. An earlier turn whose reasoning was cut is context only: training on it would
    teach to answer at once where the turn really began with reasoning. So is one whose `weight` is 0. Tokenise
    segment by segment: then the tokens of a prompt at inference are exactly a prefix of the tokens in training.
    """
    chosen = load_template(template)
    if not enable_thinking:
        chosen.check_switch("enable_thinking")
    if low_effort:
        chosen.check_switch("low_effort")
    check_messages(messages)
    # As an inference engine gets them; templates of users may ask for `tool.function`.
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
    variables: dict[str, Any] = {
        "tools": wrapped or None,
        "enable_thinking": enable_thinking,
        "low_effort": low_effort,
        "add_generation_prompt": add_generation_prompt,
    }
    untrained = {i for i, message in enumerate(messages) if message.get("weight") == 0}
    if untrained:
        return chosen.segments_without(untrained, messages, **variables)
    return chosen.segments(messages, **variables)


def text_after_response(messages: Sequence[Message], *, enable_thinking: bool = True, template: str) -> str:
    """What a prompt for the next turn adds to a response whose calls `messages` of the role `tool` answer.

    It begins after the token that ended the response and ends with the generation prompt, so that its tokens continue
    those of prompt and response. What in `messages` could open or end a turn is blanked: a tool may show what the model
    itself wrote. UserError: `template` has no token that ends a turn, does not show results of tools, or shows an
    earlier turn differently from how it was written (`retold_turn`).
    """
    chosen = load_template(template)
    results = _inert_results(messages, template)
    calls = [{"name": _PROBE, "arguments": {}}] * len(results)
    turns: list[Message] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": _PROBE, "tool_calls": calls},
    ]
    text = render([*turns, *results], enable_thinking=enable_thinking, template=template, add_generation_prompt=True)
    before = render(turns, enable_thinking=enable_thinking, template=template)
    end = before.rfind(chosen.stop) + len(chosen.stop) if chosen.stop else 0
    if not end or not text.startswith(before[:end]):
        raise UserError(f"chat template {template} cannot continue a response with results of tools")
    return text[end:]


def retold_turn(
    answer: str, calls: Sequence[Mapping[str, Any]], messages: Sequence[Message], *, enable_thinking: bool = True,
    template: str,
) -> str:  # fmt: skip
    """What a prompt for the next turn shows in the place of a response and of the generation prompt before it.

    For templates that show an earlier turn differently from how it was written: nano2 leaves its reasoning out. So the
    prompt is the one that SFT trains. `answer` and `calls`: the response, without its reasoning; `messages`: of the
    role `tool`, which answer the calls. The text ends with the next generation prompt. What in all of them could open
    or end a turn is blanked.
    """
    question: list[Message] = [{"role": "user", "content": ""}]
    without_marks = json.loads(inert(json.dumps(list(calls), ensure_ascii=False), template))
    turn: Message = {"role": "assistant", "content": inert(answer, template), "tool_calls": without_marks}
    talk = [*question, turn, *_inert_results(messages, template)]
    text = render(talk, enable_thinking=enable_thinking, template=template, add_generation_prompt=True)
    return text.removeprefix(render(question, enable_thinking=enable_thinking, template=template))


def _inert_results(messages: Sequence[Message], template: str) -> list[Message]:
    return [{**message, "content": inert(message["content"], template)} for message in messages]


def inert(text: str, template: str) -> str:
    """`text` with a blank for whatever in it could open or end a turn or reasoning: it may be what a model wrote."""
    reserved = {*control_tokens(template), *required_tokens(template)}
    return re.sub("|".join(map(re.escape, sorted(reserved, key=len, reverse=True))), " ", text)


def response_of(text: str, template: str) -> str:
    """What a model wrote in its turn: `text` up to the token with which `template` ends a turn."""
    stop = load_template(template).stop
    return text.partition(stop)[0] if stop else text


def parse_response(text: str) -> tuple[str | None, str]:
    """Split a response (`response_of`) into `(reasoning, answer)`.

    Reasoning ends at the first `</think>`. Without that tag the whole text is the answer and reasoning is None, unless
    the text itself opens `<think>`: then it was cut off while reasoning and the answer is empty. Blanks around both
    parts are ignored.
    """
    opened = THINK in text
    reasoning, closed, answer = text.partition(END_THINK)
    if not closed:
        return (text.split(THINK, 1)[1].strip() or None, "") if opened else (None, text.strip())
    return reasoning.split(THINK, 1)[-1].strip() or None, answer.strip()


def json_value(text: str) -> Any:
    """As `json.loads`; ValueError also for half of a surrogate pair, which JSON can spell and no UTF-8 can."""
    value = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_tool_calls(answer: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into `(text, calls)`, each call as {name, arguments}.

    Calls are in the XML style of the Nemotron 3 templates, where a value is text if its declaration allows texts alone
    or says nothing (`declared_types`), else JSON as far as it can be read, or True, False or None, as those templates
    show them: beside texts, values of the other types. Or they are in the JSON lists of Nano v2. What is malformed (a
    tag missing, text between parameters, a parameter twice; a list that is not one of calls) stays in the text.
    """
    declared = {function["name"]: function.get("parameters") or {} for function in map(function_of, tools)}
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        name, body = match.groups()
        arguments: dict[str, Any] = {}
        position = 0
        body = body.strip()
        while position < len(body):
            parameter = _PARAMETER.match(body, position)
            if parameter is None or parameter[1] in arguments:
                return match[0]
            value = parameter[2]
            parameters = declared.get(name, {})
            allowed = declared_types((parameters.get("properties") or {}).get(parameter[1]), parameters)
            if allowed != {"string"}:
                with suppress(ValueError, RecursionError):
                    read = json_value(_PYTHON_AS_JSON.get(value, value))
                    if "string" not in allowed or not allowed.isdisjoint({*_JSON_TYPES[type(read)]} - {"string"}):
                        value = read
            arguments[parameter[1]] = value
            position = parameter.end()
        calls.append({"name": name, "arguments": arguments})
        return ""

    def take_list(match: re.Match[str]) -> str:
        try:
            listed = json_value(match[1])
        except (ValueError, RecursionError):
            return match[0]
        if not isinstance(listed, list) or not all(map(_is_call, listed)):
            return match[0]
        calls.extend({"name": call["name"], "arguments": call["arguments"]} for call in listed)
        return ""

    return _CALL_LIST.sub(take_list, _CALL.sub(take, answer)).strip(), calls


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)


def declared_types(declaration: object, parameters: Mapping[str, Any]) -> set[str]:
    """JSON types of the values that `declaration`, of one of a tool's `parameters`, allows; `string` if it says none.

    They are those of all its `alternatives`, as in vLLM's parser of these calls.
    """
    types: set[str] = set()
    for each in alternatives(declaration, parameters):
        said = each["type"] if "type" in each else list(_JSON_TYPES.get(type(each["const"]), ())[:1])
        names = said if isinstance(said, list | tuple) else [said]
        types.update(name for name in names if isinstance(name, str))
    return types or {"string"}


def alternatives(declaration: object, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What `declaration`, of one of a tool's `parameters`, allows, one by one; empty where it says nothing.

    Each has a `type`, a `const` or both: values of an `enum` are constants, `$ref` is resolved in `parameters`, and of
    an `allOf` it is the first part that says something.
    """
    resolved: set[str] = set()

    def expanded(part: object) -> list[Mapping[str, Any]]:
        if not isinstance(part, Mapping):
            return []
        if isinstance(values := part.get("enum", [part["const"]] if "const" in part else None), list):
            typed = {"type": part["type"]} if "type" in part else {}
            return [{**typed, "const": value} for value in values]
        if "type" in part:
            return [part]
        if isinstance(pointer := part.get("$ref"), str) and pointer not in resolved:
            resolved.add(pointer)  # once, however often it is named: it may name itself
            target: Any = parameters
            for key in pointer.removeprefix("#/").split("/"):
                target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            return expanded(target)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(key), list):
                found = list(filter(None, map(expanded, part[key])))
                return [each for several in (found[:1] if key == "allOf" else found) for each in several]
        return []

    return expanded(declaration)


def check_messages(messages: Sequence[Message], where: str = "message") -> None:
    """Refuse what the template cannot render, naming the message by its index (from 0) in a UserError."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict | Mapping):  # dict first: the question for an abstract class is slow
            raise UserError(f"{where} {i} is not an object with role and content")
        role = message.get("role")
        if role is None:
            keys = ", ".join(map(repr, list(message)[:8])) or "none"
            raise UserError(
                f"{where} {i} has no role; its keys are {keys}", "a message is {role, content}, or {from, value}"
            )
        if role not in ROLES:
            guess = nearest(str(role), ROLES)
            raise UserError(
                f"{where} {i}: unknown role {role!r}" + (f", did you mean {guess!r}?" if guess else ""),
                f"roles are {', '.join(ROLES)}",
            )
        if role == "system" and i > 0:
            raise UserError(f"{where} {i}: a system message can only come first")
        content = message.get("content")
        calls = message.get("tool_calls") or []
        if not isinstance(content, str) and not (role == "assistant" and calls and content is None):
            raise UserError(f"{where} {i} ({role}): content must be text")
        if message.get("weight", 1) not in (0, 1):
            raise UserError(
                f"{where} {i} ({role}): weight must be 0 or 1, not {message['weight']!r}",
                "how much a whole record counts is said by loss_weight beside its messages",
            )
        if not isinstance(message.get("reasoning_content"), str | None):
            raise UserError(f"{where} {i} ({role}): reasoning_content must be text")
        if not isinstance(calls, list | tuple):
            raise UserError(f"{where} {i} ({role}): tool_calls must be a list")
        for call in calls:
            function = function_of(call) if isinstance(call, Mapping) else {}
            if (
                not isinstance(function, Mapping)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("arguments"), Mapping)
            ):
                raise UserError(f"{where} {i} ({role}): a tool call needs a name and an object of arguments")


class UntrainableError(UserError):
    """A conversation that cannot be trained on. `reason`: a few words, the same for all of a kind."""

    def __init__(self, reason: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.reason = reason


def check_conversation(messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Refuse what cannot be trained on as it would be produced.

    UntrainableError, with the message's index where it is about one: malformed messages or tools (`check_messages`), no
    assistant turn, a call of a tool that is not declared, more responses of tools than calls. Where a turn has no calls
    beside its text, the text may hold them: responses may follow it.
    """
    try:
        check_messages(messages)
    except UserError as error:
        reason = "unknown role" if "unknown role" in error.message else "malformed messages"
        raise UntrainableError(reason, error.message, error.hint) from None
    names: list[str] = []
    for i, tool in enumerate(tools or ()):
        function = function_of(tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UntrainableError("malformed tools", f"tool {i}: a tool is an object with a name")
        if not isinstance(function.get("description"), str | None) or not _is_schema(function.get("parameters")):
            raise UntrainableError(
                "malformed tools", f"tool {i}: description must be text, parameters an object of objects"
            )
        names.append(function["name"])
    try:
        json.dumps([tools, [message.get("tool_calls") for message in messages]])
    except TypeError as error:  # bytes of a table
        raise UntrainableError("malformed tools", f"tools and their calls must be JSON: {error}") from None
    open_calls: float = 0
    answered = False
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            open_calls -= 1
            if open_calls < 0:
                raise UntrainableError("tool response without call", f"message {i}: a tool response without a call")
            continue
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        answered = answered or message["role"] == "assistant"
        open_calls = len(calls) or (math.inf if message["role"] == "assistant" else 0)
        for call in calls:
            name = function_of(call)["name"]
            if name not in names:
                guess = nearest(name, names)
                declared = f"declared: {', '.join(names[:8])}" if names else "no tool is declared"
                raise UntrainableError(
                    "tool without declaration",
                    f"message {i}: calls {name!r}, which is not declared" + (f"; meant {guess!r}?" if guess else ""),
                    f"{declared}; declarations belong in the column of tools, beside the messages",
                )
    if not answered:
        raise UntrainableError(NO_ANSWER, "no assistant turn: nothing to train on")


def _is_schema(parameters: object) -> bool:
    """Whether `parameters` of a tool can be listed: absent, or an object whose properties are objects."""
    if not parameters:
        return True
    if not isinstance(parameters, Mapping):
        return False
    properties = parameters.get("properties") or {}
    return isinstance(properties, Mapping) and all(
        isinstance(about, Mapping) and isinstance(about.get("description"), str | None) for about in properties.values()
    )


def function_of(call_or_tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function in a tool or a call, with or without the envelope of the OpenAI format."""
    function: Mapping[str, Any] = call_or_tool.get("function", call_or_tool)
    return function
