"""Chat templates: the exact format, the loss mask, agreement with the Jinja template, and parsing back."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_runspec.errors import UserError
from nemotron.kit.chat import TEMPLATES, generation_prompt, parse_response, render, render_with_mask, template_source

USER = {"role": "user", "content": "2+2?"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}


def jinja_render(messages: list[dict[str, Any]], **variables: Any) -> str:
    """The template as inference engines run it: sandboxed, blocks trimmed, `tojson` without HTML escapes."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template_source("nano3")).render(messages=messages, **variables)


def test_format_with_reasoning_on_and_off() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert render([system, USER, THOUGHT]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n4<|im_end|>\n"
    )
    assert render([USER, THOUGHT], enable_thinking=False) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>4<|im_end|>\n"
    )
    assert render([USER], add_generation_prompt=True).endswith("<|im_start|>assistant\n<think>\n")
    off = render([USER], add_generation_prompt=True, enable_thinking=False)
    assert off.endswith("<|im_start|>assistant\n<think></think>")


def test_new_user_turn_drops_earlier_reasoning_but_a_tool_step_keeps_it() -> None:
    call = {"name": "add", "arguments": {"a": 2, "note": "x"}}
    step = {"role": "assistant", "content": "", "reasoning_content": "need a tool", "tool_calls": [call]}
    messages = [USER, THOUGHT, {"role": "user", "content": "3+3?"}, step, {"role": "tool", "content": "6"}, THOUGHT]
    text = render(messages)
    assert text == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think></think>4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nneed a tool\n</think>\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n6\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n4<|im_end|>\n"
    )
    assert render(messages, truncate_history_thinking=False).count("two and two") == 2


def test_mask_covers_what_the_model_writes_and_nothing_else() -> None:
    plain = {"role": "assistant", "content": "4"}
    assert render_with_mask([USER, THOUGHT]) == [
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
        ("two and two\n</think>\n4<|im_end|>", True),
        ("\n", False),
    ]
    trained = [text for text, is_trained in render_with_mask([USER, plain, USER, THOUGHT]) if is_trained]
    assert trained == ["4<|im_end|>", "two and two\n</think>\n4<|im_end|>"]
    # The first turn lost its reasoning: as it stands the model would not have written it.
    trained = [text for text, is_trained in render_with_mask([USER, THOUGHT, USER, plain]) if is_trained]
    assert trained == ["4<|im_end|>"]


text = st.text(st.sampled_from("ab \n<>{}%&é"), max_size=12)
arguments = st.dictionaries(
    st.sampled_from(["x", "y"]), st.one_of(text, st.integers(), st.lists(st.booleans())), max_size=2
)
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": text},
    optional={
        "reasoning_content": text,
        "tool_calls": st.lists(st.fixed_dictionaries({"name": st.just("f"), "arguments": arguments}), max_size=2),
    },
)
other = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": text})
system = st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": text}), max_size=1)
conversation = st.tuples(system, st.lists(st.one_of(assistant, other), min_size=1, max_size=6)).map(
    lambda p: p[0] + p[1]
)


@settings(deadline=None)
@given(conversation, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_python_and_jinja_agree(
    messages: list[dict[str, Any]], thinking: bool, truncate: bool, prompt: bool, with_tools: bool
) -> None:
    function = {"name": "f", "description": "<d>", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}, {"name": "g"}] if with_tools else None
    options = {"enable_thinking": thinking, "truncate_history_thinking": truncate, "tools": tools}
    ours = render(messages, add_generation_prompt=prompt, **options)
    assert ours == jinja_render(messages, add_generation_prompt=prompt, **options)
    assert "".join(segment for segment, _ in render_with_mask(messages, **options)) == ours.removesuffix(
        generation_prompt(thinking) if prompt else ""
    )


@settings(deadline=None)
@given(conversation)
def test_every_trained_segment_follows_a_generation_prompt(messages: list[dict[str, Any]]) -> None:
    before = ""
    for segment, trained in render_with_mask(messages):
        if trained:
            assert before.endswith((generation_prompt(True), generation_prompt(False)))
            assert segment.endswith("<|im_end|>")
        before += segment


def test_transformers_applies_the_same_template() -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [USER, THOUGHT, USER]
    rendered, _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=template_source(), add_generation_prompt=True
    )
    assert rendered == [render(messages, add_generation_prompt=True)]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("two and two\n</think>\n4<|im_end|>", ("two and two", "4")),
        ("<think>\ntwo\n</think>\n4", ("two", "4")),
        ("4<|im_end|>", (None, "4")),
        ("<think></think>4", (None, "4")),
        ("<think>\nstill at it", ("still at it", "")),
        ("a</think>b</think>c", ("a", "b</think>c")),
        ("4<|im_end|>\n<|im_start|>user\n5", (None, "4")),
        ("", (None, "")),
    ],
)
def test_parse_response(response: str, expected: tuple[str | None, str]) -> None:
    assert parse_response(response) == expected


@settings(deadline=None)
@given(st.text("xyz \n", min_size=1), st.text("xyz \n"))
def test_parse_inverts_render(reasoning: str, answer: str) -> None:
    messages = [USER, {"role": "assistant", "content": answer, "reasoning_content": reasoning}]
    response = render(messages).removeprefix(render([USER], add_generation_prompt=True))
    assert parse_response(response) == (reasoning.strip() or None, answer.strip())


def test_misspelt_template_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown chat template 'nanno3', did you mean 'nano3'"):
        render([USER], template="nanno3")
    with pytest.raises(UserError, match="templates are nano3"):
        template_source("zzz")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "asistant", "content": "x"}], "message 0: unknown role 'asistant', did you mean 'assistant'"),
        ([{"content": "x"}], "message 0: unknown role None"),
        ([USER, {"role": "system", "content": "x"}], "message 1: a system message can only come first"),
        ([{"role": "user"}], "message 0 .user.: content must be text"),
        ([{"role": "user", "content": ["x"]}], "message 0 .user.: content must be text"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 3}], "reasoning_content must be text"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "a tool call needs a name"),
        (["hello"], "message 0 is not an object"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        render(messages)


def test_schema_lists_the_templates_there_are() -> None:
    schema = pytest.importorskip("nemotron.recipes.nano3.stage1_sft.data_schema")
    assert schema.SFTDataConfig.model_fields["chat_template"].annotation.__args__ == TEMPLATES
