"""Chat templates: the exact format, the loss mask, agreement with transformers, and parsing back."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.chat import (
    UntrainableError,
    check_conversation,
    generation_prompt,
    parse_response,
    response_of,
)
from nemotron.kit.chat_records import normalize_tools, to_messages
from nemotron.kit.chat_template import ChatTemplate, load_template
from nemotron.kit.chat_templates import TEMPLATES

NO_SYSTEM = "<|im_start|>system\n<|im_end|>\n"
USER = {"role": "user", "content": "2+2?"}
CALLED = {"name": "f", "arguments": {}}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}


def render(messages: list[dict[str, Any]], template: str = "nano3", **options: Any) -> str:
    return chat.render(messages, template=template, **options)


def render_with_mask(messages: list[dict[str, Any]], template: str = "nano3", **options: Any) -> list[tuple[str, bool]]:
    return chat.render_with_mask(messages, template=template, **options)


def rendered_by_transformers(
    messages: list[dict[str, Any]], template: str, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Text, and where in it the assistant's own words begin and end: the reference."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = load_template(template).source
    (text,), _ = utils.render_jinja_template([messages], chat_template=source, **variables)
    variables["add_generation_prompt"] = False  # what is trained on has none
    _, (spans,) = utils.render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=True, **variables
    )
    return text, spans


def test_format_with_reasoning_on_and_off() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert render([system, USER, THOUGHT]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n4<|im_end|>\n"
    )
    assert render([USER, {"role": "assistant", "content": "4"}]) == (
        NO_SYSTEM + "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>4<|im_end|>\n"
    )
    # The switch is about what is to come.
    assert render([USER, THOUGHT], enable_thinking=False) == render([USER, THOUGHT])
    assert render([USER], add_generation_prompt=True).endswith("<|im_start|>assistant\n<think>\n")
    off = render([USER], add_generation_prompt=True, enable_thinking=False)
    assert off.endswith("<|im_start|>assistant\n<think></think>")


def test_new_user_turn_drops_earlier_reasoning_but_a_tool_step_keeps_it() -> None:
    call = {"name": "add", "arguments": {"a": 2, "note": "x"}}
    step = {"role": "assistant", "content": "", "reasoning_content": "need a tool", "tool_calls": [call]}
    messages = [USER, THOUGHT, {"role": "user", "content": "3+3?"}, step, {"role": "tool", "content": "6"}, THOUGHT]
    text = render(messages)
    assert text == (
        NO_SYSTEM + "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nneed a tool\n</think>\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n6\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n4<|im_end|>\n"
    )


def test_mask_covers_what_the_model_writes_and_nothing_else() -> None:
    plain = {"role": "assistant", "content": "4"}
    assert render_with_mask([USER, THOUGHT]) == [
        (NO_SYSTEM + "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
        ("two and two\n</think>\n4<|im_end|>", True),
        ("\n", False),
    ]
    assert trained([USER, plain, USER, THOUGHT], "nano3") == ["4<|im_end|>", "two and two\n</think>\n4<|im_end|>"]
    # The first turn lost its reasoning: as it stands the model would not have written it.
    assert trained([USER, THOUGHT, USER, plain], "nano3") == ["4<|im_end|>"]


def trained(messages: list[dict[str, Any]], template: str) -> list[str]:
    return [text for text, is_trained in render_with_mask(messages, template) if is_trained]


@pytest.mark.parametrize("template", ["nano3", "super3"])
def test_a_turn_of_weight_0_is_context_only(template: str) -> None:
    answers = [{"role": "assistant", "content": answer} for answer in ("one", "", "one")]
    turns = [message for answer in answers for message in (USER, answer)]
    assert trained(turns, template) == ["one<|im_end|>", "<|im_end|>", "one<|im_end|>"]
    for i in range(3):
        marked = [{**message, "weight": 0} if message is turns[2 * i + 1] else message for message in turns]
        left = [answer["content"] + "<|im_end|>" for j, answer in enumerate(answers) if j != i]
        assert trained(marked, template) == left
        assert render(marked, template) == render(turns, template)
    # A turn whose reasoning was dropped has no marks, and the others keep their numbers.
    first = [USER, THOUGHT, USER, answers[0], USER, {**answers[2], "weight": 0}]
    assert trained(first, template) == ["one<|im_end|>"]


def test_a_template_that_trains_turns_as_one_cannot_leave_one_out(tmp_path: Path) -> None:
    source = "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}"
    (tmp_path / "own.jinja").write_text(source, encoding="utf-8")
    turns = [USER, THOUGHT, USER, {**THOUGHT, "weight": 0}]
    with pytest.raises(UserError, match="does not mark each answer on its own"):
        render_with_mask(turns, str(tmp_path / "own.jinja"))


text = st.text(st.sampled_from("ab \n<>{}%&é"), max_size=12)
said = st.one_of(text, st.sampled_from(["/think", "x /no_think", "/think /no_think y", "</think>"]))
arguments = st.dictionaries(
    st.sampled_from(["x", "y"]),
    st.one_of(text, st.integers(), st.none(), st.booleans(), st.lists(st.booleans()), st.dictionaries(text, text)),
    max_size=2,
)
call = st.fixed_dictionaries({"name": st.just("f"), "arguments": arguments})
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": text},
    optional={
        "reasoning_content": text,
        "tool_calls": st.lists(st.one_of(call, call.map(lambda c: {"type": "function", "function": c})), max_size=2),
    },
)
other = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": said})
system = st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": said}), max_size=1)
conversation = st.tuples(system, st.lists(st.one_of(assistant, other), min_size=1, max_size=6)).map(
    lambda p: p[0] + p[1]
)
about = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(st.just("string"), st.just(["integer", "null"])),
        "description": text,
        "enum": st.lists(text, max_size=2),
        "minLength": st.integers(),
        "items": st.just({"type": "string"}),
    },
)
parameters = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(st.sampled_from(["x", "y"]), about, max_size=2),
        "required": st.lists(st.sampled_from(["x", "y"]), max_size=2),
        "additionalProperties": st.booleans(),
    },
)
tool = st.fixed_dictionaries(
    {"name": st.just("f")}, optional={"description": text, "parameters": parameters, "strict": st.booleans()}
)
declared = st.lists(st.one_of(tool, tool.map(lambda t: {"type": "function", "function": t})), max_size=2)


@pytest.mark.parametrize("template", TEMPLATES)
@given(conversation, declared, st.booleans(), st.booleans(), st.booleans())
def test_text_and_mask_are_those_of_transformers(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    thinking: bool,
    low_effort: bool,
    prompt: bool,
) -> None:
    options: dict[str, Any] = {"enable_thinking": thinking, "tools": tools}
    if template == "super3":
        options["low_effort"] = low_effort
    text, spans = rendered_by_transformers(messages, template, add_generation_prompt=prompt, **options)
    assert render(messages, add_generation_prompt=prompt, template=template, **options) == text
    marked, length = [], 0
    segments = render_with_mask(messages, template=template, **options)
    for segment, is_trained in segments:
        if is_trained:
            marked.append((length, length + len(segment)))
        length += len(segment)
    assert marked == spans
    assert "".join(segment for segment, _ in segments) == render(messages, template=template, **options)


@pytest.mark.parametrize("template", ["nano3", "super3"])
@settings(max_examples=25)
@given(conversation, declared)
def test_marks_and_prompts_say_the_same_of_what_is_trained(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    source = load_template(template).source
    unmarked = ChatTemplate("unmarked", re.sub(r"{%- (end)?generation -%}", "", source), {})
    assert unmarked.source != source
    variables = {"tools": tools, "enable_thinking": True, "low_effort": False}
    by_prompts = unmarked.segments(messages, **variables)
    by_marks = load_template(template).segments(messages, **variables)
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    earlier = messages[: asked[-1] if asked else 0]
    if any(
        turn.get("reasoning_content") or (turn.get("tool_calls") and turn["content"][:1].isspace()) for turn in earlier
    ):
        # Behind a turn that loses its reasoning later, or blanks before a call, no prompt was what now stands there.
        words = iter(text for text, is_trained in by_marks if is_trained)
        assert all(text in words for text, is_trained in by_prompts if is_trained)  # in this order
        assert "".join(text for text, _ in by_prompts) == "".join(text for text, _ in by_marks)
    else:
        assert by_prompts == by_marks


@pytest.mark.parametrize("template", TEMPLATES)
@given(conversation, declared)
def test_every_trained_segment_follows_the_prompt_at_inference(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """What is before a trained segment ends in a generation prompt, and is what the template makes of the messages
    before that turn, if nothing after it changed them."""
    before = ""
    end = "<SPECIAL_12>" if template == "nano2" else "<|im_end|>"
    last_trained = None
    for segment, trained in render_with_mask(messages, tools=tools, template=template):
        if trained:
            assert before.endswith((generation_prompt(template, True), generation_prompt(template, False)))
            assert segment.endswith(end)
            last_trained = before
        before += segment
    if messages[-1]["role"] == "assistant":
        thinks = render(messages, tools=tools, template=template).startswith(
            render(messages[:-1], tools=tools, template=template, add_generation_prompt=True, enable_thinking=True)
        )
        at_inference = render(
            messages[:-1], tools=tools, template=template, add_generation_prompt=True, enable_thinking=thinks
        )
        # nano2 asks for reasoning in the text; a turn without any is trained behind the empty tags all the same.
        if template == "nano2":
            at_inference = at_inference.removesuffix("<think>\n").removesuffix("<think></think>")
            assert last_trained is not None and last_trained.startswith(at_inference)
        elif not any(m.get("reasoning_content") for m in messages[:-1]):
            assert last_trained == at_inference


def test_nano2_as_its_card_shows_it() -> None:
    system = {"role": "system", "content": "Be brief. /no_think"}
    opened = "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n2+2?\n"
    assert render([system, USER], template="nano2", add_generation_prompt=True) == (
        opened + "<SPECIAL_11>Assistant\n<think></think>"
    )
    # The last word counts, and neither is left in the text.
    asks = {"role": "user", "content": "/think 3+3?"}
    text = render([system, USER, THOUGHT, asks, THOUGHT], template="nano2")
    assert text == (
        opened + "<SPECIAL_11>Assistant\n4\n<SPECIAL_12>\n<SPECIAL_11>User\n3+3?\n"
        "<SPECIAL_11>Assistant\n<think>\ntwo and two\n</think>\n\n4\n<SPECIAL_12>\n"
    )
    assert trained([USER, THOUGHT, asks, THOUGHT], "nano2") == ["two and two\n</think>\n\n4\n<SPECIAL_12>"]
    # Without a word about it the model reasons; reasoning that was not asked for is left out.
    assert "<think>\ntwo" in render([USER, THOUGHT], template="nano2")
    assert render([system, USER, THOUGHT], template="nano2").endswith("<think></think>4\n<SPECIAL_12>\n")


def test_tools_of_nano2() -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    step = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "add", "arguments": {"a": 2}}] * 2}
    answers = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "7"}]
    text = render([USER, step, *answers, THOUGHT], tools=[tool], template="nano2")
    assert '<AVAILABLE_TOOLS>[{"name": "add", "parameters": {"type": "object"}}]</AVAILABLE_TOOLS>' in text
    assert (
        "<SPECIAL_11>Assistant\nLet me see.\n\n"
        '<TOOLCALL>[{"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {"a": 2}}]</TOOLCALL>\n'
        "<SPECIAL_12>\n<SPECIAL_11>User\n<TOOL_RESPONSE>[6, 7]</TOOL_RESPONSE>\n<SPECIAL_11>Assistant\n<think>\n"
    ) in text


@pytest.mark.parametrize("template", ["nano2", "nano3", "super3", "lightning35", "ultra3"])
def test_values_of_all_types_are_read_as_the_template_shows_them(template: str) -> None:
    values = {"boolean": True, "integer": 7, "number": 1.5, "null": None, "object": {"x": [True]}, "string": "None"}
    properties: dict[str, Any] = {name: {"type": name} for name in values}
    properties["either"] = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    for either in (False, None):
        call = {"name": "f", "arguments": {**values, "either": either}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = render([USER, turn], tools=[tool], template=template)
        assert chat.parse_tool_calls(response_of(text.rpartition("</think>")[2], template), [tool])[1] == [call]


def test_calls_of_nano2_are_read_as_they_are_written() -> None:
    calls = [{"name": "add", "arguments": {"a": 2, "b": [1.5]}}, {"name": "f", "arguments": {}}]
    written = render([USER, {"role": "assistant", "content": "Let me see.", "tool_calls": calls}], template="nano2")
    answer = response_of(written.partition("<think></think>")[2], "nano2")
    assert chat.parse_tool_calls(answer, []) == ("Let me see.", calls)
    for malformed in ('[{"name": "add"}]', '{"name": "f", "arguments": {}}', "[{]", '[{"name": 1, "arguments": {}}]'):
        text = f"<TOOLCALL>{malformed}</TOOLCALL>"
        assert chat.parse_tool_calls(text, []) == (text, [])


@pytest.mark.parametrize(
    ("declaration", "types"),
    [
        ({}, {"string"}),
        ({"description": "any"}, {"string"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", None, True, 1, 1.5, [], {}]},
         {"string", "null", "boolean", "integer", "number", "array", "object"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/definitions/a~1b"}, {"array"}),
        ({"$ref": "#/$defs/Loop"}, {"null", "string"}),
        ({"$ref": "#/$defs/None"}, {"string"}),
        ({"allOf": [{"description": "x"}, {"$ref": "#/definitions/a~1b"}]}, {"array"}),
        ({"oneOf": [{"type": "number"}, {"anyOf": [{"type": "boolean"}, {"const": 1}]}]},
         {"number", "boolean", "integer"}),
        ({"$ref": 5, "anyOf": {}, "enum": "ab"}, {"string"}),
        ({"type": 5}, {"string"}),
        (5, {"string"}),
    ],
)  # fmt: skip
def test_types_that_a_declaration_allows(declaration: object, types: set[str]) -> None:
    parameters = {
        "definitions": {"a/b": {"type": "array"}},
        "$defs": {"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/End"}]},
                  "End": {"anyOf": [{"enum": [None, "x"]}, {"$ref": "#/$defs/Loop"}]}},
    }  # fmt: skip
    assert chat.declared_types(declaration, parameters) == types


def test_super3_as_its_template_writes_it() -> None:
    opened = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2+2?"
    assert render([USER, THOUGHT], template="super3") == (
        opened + "<|im_end|>\n<|im_start|>assistant\n<think>\ntwo and two\n</think>\n4<|im_end|>\n"
    )
    assert render([USER], template="super3", low_effort=True, add_generation_prompt=True) == (
        opened + "\n\n{reasoning effort: low}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    text = render([USER, THOUGHT, USER, THOUGHT], template="super3", low_effort=True)
    assert text.count("low}") == 1 and text.index("low}") > text.index("<think></think>\n4<|im_end|>")


def test_tools_of_super3() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer", "description": " first ", "minimum": 0, "enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    step = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": True, "b": [1]}}]}
    text = render([USER, step], tools=[{"name": "add", "parameters": parameters}], template="super3")
    assert (
        "<tools>\n<function>\n<name>add</name>\n<parameters>\n<parameter>\n<name>a</name>\n<type>integer</type>\n"
        "<description>first</description>\n<enum>[1, 2]</enum>\n<minimum>0</minimum>\n</parameter>\n"
        '<additionalProperties>False</additionalProperties>\n<required>["a"]</required>\n</parameters>\n</function>\n'
        "</tools>"
    ) in text
    assert text.endswith(
        "<|im_start|>assistant\n<think></think>\n<tool_call>\n<function=add>\n<parameter=a>\nTrue\n</parameter>\n"
        "<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>\n<|im_end|>\n"
    )


def test_a_switch_that_a_template_does_not_have() -> None:
    with pytest.raises(UserError, match="template nano3 has no switch low_effort"):
        render([USER], low_effort=True)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("two and two\n</think>\n4", ("two and two", "4")),
        ("<think>\ntwo\n</think>\n4", ("two", "4")),
        ("4", (None, "4")),
        ("<think></think>4", (None, "4")),
        ("<think>\nstill at it", ("still at it", "")),
        ("a</think>b</think>c", ("a", "b</think>c")),
        ("", (None, "")),
    ],
)
def test_parse_response(response: str, expected: tuple[str | None, str]) -> None:
    assert parse_response(response) == expected


@given(st.text("xyz \n").filter(str.strip), st.text("xyz \n"))
def test_parse_inverts_render(reasoning: str, answer: str) -> None:
    messages = [USER, {"role": "assistant", "content": answer, "reasoning_content": reasoning}]
    response = render(messages).removeprefix(render([USER], add_generation_prompt=True))
    assert parse_response(response_of(response, "nano3")) == (reasoning.strip(), answer.strip())


def test_misspelt_template_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown chat template 'nanno3', did you mean 'nano3'"):
        render([USER], template="nanno3")
    with pytest.raises(UserError, match="templates: lightning35, nano2, nano3, super3, ultra3,"):
        load_template("zzz")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "asistant", "content": "x"}], "message 0: unknown role 'asistant', did you mean 'assistant'"),
        ([{"content": "x"}], "message 0 has no role; its keys are 'content'"),
        ([USER, {**THOUGHT, "weight": 0.5}], "message 1 .assistant.: weight must be 0 or 1, not 0.5"),
        ([USER, {"role": "system", "content": "x"}], "message 1: a system message can only come first"),
        ([{"role": "user"}], "message 0 .user.: content must be text"),
        ([{"role": "user", "content": ["x"]}], "message 0 .user.: content must be text"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 3}], "reasoning_content must be text"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "a tool call needs a name"),
        ([{"role": "user", "content": None, "tool_calls": [CALLED]}], "message 0 .user.: content must be text"),
        ([{"role": "assistant", "content": None, "tool_calls": 3}], "tool_calls must be a list"),
        ([{**USER, "tool_calls": 3}], "message 0 .user.: tool_calls must be a list"),
        ([{**USER, "tool_calls": "null"}], "message 0 .user.: tool_calls must be a list"),
        (["hello"], "message 0 is not an object"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        render(messages)


ADD = {"name": "add", "parameters": {"type": "object"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
ANSWER = {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("messages", "tools", "reason", "complaint"),
    [
        ([USER], None, "no assistant turn", "no assistant turn"),
        ([{"role": "human", "content": "x"}, THOUGHT], None, "unknown role", "message 0: unknown role 'human'"),
        ([USER, {"role": "assistant"}], None, "malformed messages", "content must be text"),
        ([USER, CALL, ANSWER], None, "tool without declaration", "message 1: calls 'add', which is not declared"),
        ([USER, CALL], [{"name": "adds"}], "tool without declaration", "meant 'adds'?"),
        ([USER, ANSWER, THOUGHT], [ADD], "tool response without call", "message 1: a tool response without a call"),
        ([USER, CALL, ANSWER, ANSWER], [ADD], "tool response without call", "message 3: a tool response"),
        ([USER, CALL, USER, ANSWER], [ADD], "tool response without call", "message 3: a tool response"),
        ([USER, THOUGHT], [{"description": "x"}], "malformed tools", "tool 0: a tool is an object with a name"),
        ([USER, THOUGHT], [{"name": "f", "parameters": []}, "f"], "malformed tools", "tool 1: a tool is an object"),
        ([USER, THOUGHT], [{"name": "f", "parameters": {"properties": {"x": 1}}}], "malformed tools", "tool 0: "),
        ([USER, THOUGHT], [{"name": "f", "parameters": {"x": b""}}], "malformed tools", "must be JSON: .* bytes"),
    ],
)
def test_what_cannot_be_trained_on(messages: list[Any], tools: list[Any] | None, reason: str, complaint: str) -> None:
    with pytest.raises(UntrainableError, match=complaint.replace("?", "[?]")) as raised:
        check_conversation(messages, tools)
    assert raised.value.reason == reason
    again = pickle.loads(pickle.dumps(raised.value))  # as a worker sends it
    assert (again.reason, str(again)) == (reason, str(raised.value))


def test_calls_that_are_declared_and_answered_pass() -> None:
    # A call within the text, as ShareGPT has it: tools may answer.
    check_conversation([USER, {"role": "assistant", "content": "add(2, 2)"}, ANSWER, ANSWER, THOUGHT], None)
    check_conversation([USER, CALL, ANSWER, THOUGHT, USER, CALL], [{"type": "function", "function": ADD}])
    check_conversation([USER, CALL, THOUGHT], [ADD])  # a call need not be answered: the conversation may go on without


anything = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | text | st.sampled_from(['{"a": 1}', '["x"]', '{"a": "\\ud800"}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
loose_call = st.dictionaries(st.sampled_from(["name", "arguments", "function", "id"]), anything, max_size=3) | anything
loose_message = (
    st.dictionaries(
        st.sampled_from(["content", "reasoning_content", "name", "weight", "thinking", "function_call"]),
        anything,
        max_size=3,
    ).flatmap(
        lambda rest: st.builds(
            lambda role, calls: {"role": role, **rest, **({"tool_calls": calls} if calls is not None else {})},
            st.sampled_from(["system", "user", "assistant", "tool", "gpt", "function_call", "x", None]),
            st.none() | st.lists(loose_call, max_size=2) | anything,
        )
    )
    | anything
)
loose_tool = st.dictionaries(st.sampled_from(["name", "function", "description", "parameters"]), anything, max_size=3)


@settings(max_examples=300)
@given(
    st.lists(assistant | other | loose_message, max_size=4) | anything,
    st.none() | st.lists(loose_tool | tool) | anything,
    st.sampled_from([("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("x",)]),
)
def test_whatever_a_record_holds_it_is_refused_or_rendered(messages: Any, tools: Any, names: tuple[str, ...]) -> None:
    tools = normalize_tools(tools)
    try:
        messages = to_messages({names[0]: messages, names[-1]: messages})
        check_conversation(messages, tools)
    except UntrainableError as error:
        assert error.reason and "\n" not in error.message
        return
    for template in TEMPLATES:
        render(messages, tools=tools, template=template).encode()


def test_the_end_of_reasoning_is_what_training_has_between_reasoning_and_answer(tmp_path: Path) -> None:
    ends = {template: chat.end_of_reasoning(template) for template in ("nano3", "super3", "ultra3", "lightning35")}
    assert ends["nano3"] == "\n</think>\n"
    for template, end in ends.items():
        messages = [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "reasoning_content": "so", "content": "2"},
        ]
        trained = [text for text, is_trained in chat.render_with_mask(messages, template=template) if is_trained]
        assert trained == [f"so{end}2<|im_end|>"]
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with pytest.raises(UserError, match="shows no reasoning before an answer"):
        chat.end_of_reasoning(str(tmp_path / "plain.jinja"))
    (tmp_path / "bare.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match="does not end a prompt with <think>"):  # whether it reasons, the model decides
        chat.end_of_reasoning(str(tmp_path / "bare.jinja"))
