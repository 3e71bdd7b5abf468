"""Records of conversations in the forms that people publish, each written twice: as it comes, and as OpenAI has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemotron.kit.chat import UntrainableError, check_conversation
from nemotron.kit.chat_records import normalize_messages, normalize_tools, to_messages, to_pair, unused_keys

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
THOUGHT = {**ANSWER, "reasoning_content": "two and two"}
SYSTEM = {"role": "system", "content": "Be brief."}
ADD = {"name": "add", "parameters": {"type": "object"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"prompt": "x", "messages": [USER, ANSWER], "conversations": None}, [USER, ANSWER]),  # UltraChat
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "chatgpt", "value": "4"}]},
            [USER, ANSWER],
        ),
        (
            {"conversation": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "2+2?"}]},
            [SYSTEM, USER],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4", "weight": 1},
                ],
                "system": "Be brief.",
            },
            [
                SYSTEM,
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
                {"role": "tool", "content": "4"},
                ANSWER,
            ],
        ),
        (
            {"messages": [{"role": "developer", "content": "Be brief."}, USER, {**ANSWER, "weight": 0}]},
            [SYSTEM, USER, {**ANSWER, "weight": 0}],
        ),
        (
            {"messages": [SYSTEM, {"role": "developer", "content": "Be kind."}, USER]},
            [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER],
        ),
        ({"instruction": "2+2?", "input": "", "output": "4"}, [USER, ANSWER]),
        (
            {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief.", "history": [["2+2?", "4"]]},
            [SYSTEM, USER, ANSWER, {"role": "user", "content": "Add.\n\n2+2"}, ANSWER],
        ),
        ({"prompt": "2+2?", "completion": "4"}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"question": "2+2?", "answer": "4", "reasoning": "two and two"}, [USER, THOUGHT]),
        ({"question": "2+2?", "answer": "<think>two and two</think>4"}, [USER, THOUGHT]),
        ({"prompt": "[1, 2]?", "response": "4"}, [{"role": "user", "content": "[1, 2]?"}, ANSWER]),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, [USER, ANSWER]),
        ({"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER]}, [USER, ANSWER]),  # UltraFeedback
        ({"system": "", "question": "2+2?", "chosen": "4", "rejected": "5"}, [USER, ANSWER]),  # Orca DPO pairs
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]}, [USER, ANSWER]),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, [USER, ANSWER]),
    ],
)
def test_records_of_all_forms(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert to_messages(record) == messages


@pytest.mark.parametrize(
    ("record", "message", "hint"),
    [
        ({"text": "x"}, "its fields are 'text'", "{messages: [{role: user"),
        ({}, "its fields are none", "{messages: "),
        ({"instruction": [], "input": "x", "output": "y"}, "instruction is not text, but a list", ""),
        ({"instruction": [{"role": "user"}], "input": "x", "output": "y"}, "instruction is not text, but a list", ""),
        ({"id": 3, "talk": [USER]}, "its fields are 'id', 'talk'", "columns: {messages: talk}"),
        ({"q": "2+2?", "a": "4"}, "its fields are 'q', 'a'", "columns: {question: q, answer: a}"),
        (
            {"question": "2+2?", "solution": "4"},
            "'question', 'solution'",
            "columns: {question: question, answer: solution}",
        ),
        (
            {"id": "c1", "difficulty": "hard", "category": "hard"},
            "its fields are 'id'",
            "a conversation is {messages: ",
        ),
        ({"messages": []}, "messages is an empty list", ""),
        ({"instruction": "x", "output": "y", "history": "z"}, "history is not a list of pairs", ""),
    ],
)
def test_what_holds_no_conversation_says_its_fields_and_what_would_help(
    record: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UntrainableError) as raised:
        to_messages(record)
    assert message in raised.value.message and hint in (raised.value.hint or "")


def test_turns_of_neither_form_are_named_by_their_keys() -> None:
    with pytest.raises(UntrainableError, match="message 0 has no role; its keys are 'speaker', 'text'") as raised:
        check_conversation(to_messages({"messages": [{"speaker": "A", "text": "x"}]}), None)
    assert "{from, value}" in (raised.value.hint or "")


def test_keys_that_no_template_shows(tmp_path: Any) -> None:
    messages = [{**USER, "mood": "glad", "name": "Ann", "age": 3}, {**THOUGHT, "weight": 0}, "no object"]
    assert unused_keys(messages, "nano3") == {"mood", "name", "age"}
    (tmp_path / "own.jinja").write_text("{{ messages[0].name }}", encoding="utf-8")
    assert unused_keys(messages, str(tmp_path / "own.jinja")) == {"mood", "age"}  # `messages` is another word


def test_messages_as_they_are_published() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    assert normalize_messages(json.dumps([USER, {**CALL, "tool_calls": [called], "name": None}])) == [
        USER,
        {**CALL, "tool_calls": [{**called, "function": {"name": "add", "arguments": {"a": 2}}}]},
    ]
    for empty in ({"name": "add", "arguments": ""}, {"function": {"name": "add", "arguments": " "}}):
        ((call,),) = [turn["tool_calls"] for turn in normalize_messages([{**CALL, "tool_calls": [empty]}])]
        assert call.get("function", call) == {"name": "add", "arguments": {}}
    inline = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4", "tool_calls": []}
    assert normalize_messages([inline]) == [THOUGHT]
    assert normalize_messages([{**inline, "content": "<think></think>4"}]) == [{"role": "assistant", "content": "4"}]
    # As a model's answer stands behind a prompt that opened the tag; a field that is there and empty says nothing.
    assert normalize_messages([{**inline, "content": "two and two\n</think>\n4"}]) == [THOUGHT]
    assert normalize_messages([{**inline, "reasoning_content": ""}]) == [THOUGHT]
    quoted = {"role": "assistant", "content": "the tags <think> and </think>"}
    assert normalize_messages([quoted]) == [quoted]
    parts = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
    assert normalize_messages([parts]) == [USER]
    assert normalize_messages("no list") == "no list" and normalize_messages([3]) == [3]
    assert normalize_tools(json.dumps([json.dumps(ADD)])) == [ADD]
    wrapped = {"type": "function", "function": {**ADD, "parameters": json.dumps(ADD["parameters"])}}
    assert normalize_tools([wrapped]) == [{"type": "function", "function": ADD}]
    assert normalize_tools(None) is normalize_tools([]) is normalize_tools("null") is None


OTHER = {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    ("record", "pair"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, ([USER], [ANSWER], [OTHER])),
        (
            {"question": "2+2?", "system": "Be brief.", "chosen": "4", "rejected": "5"},
            ([SYSTEM, USER], [ANSWER], [OTHER]),
        ),
        ({"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [OTHER]}, ([SYSTEM, USER], [ANSWER], [OTHER])),
        ({"prompt": [USER], "chosen": ANSWER, "rejected": OTHER}, ([USER], [ANSWER], [OTHER])),
        (  # ShareGPT with preferences, as LLaMA-Factory reads it
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            ([USER], [ANSWER], [OTHER]),
        ),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, ([USER], [ANSWER], [OTHER])),
        # UltraFeedback as it is published: the prompt alone, and both conversations; or the chosen one twice
        ({"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, ([USER], [ANSWER], [OTHER])),
        (
            {"messages": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            ([USER], [ANSWER], [OTHER]),
        ),
        ({"messages": [USER], "chosen": "4", "rejected": "5"}, ([USER], [ANSWER], [OTHER])),
        # both begin with the same call, which is of the answers; an earlier answer is of the prompt
        (
            {"prompt": [USER, ANSWER, USER], "chosen": [CALL, ANSWER], "rejected": [CALL, OTHER]},
            ([USER, ANSWER, USER], [CALL, ANSWER], [CALL, OTHER]),
        ),
        (
            {"prompt": "2+2?", "chosen": "<think>two and two</think>4", "rejected": json.dumps([OTHER])},
            ([USER], [THOUGHT], [OTHER]),
        ),
    ],
)
def test_preference_pairs(record: dict[str, Any], pair: tuple[list[Any], list[Any], list[Any]]) -> None:
    assert to_pair(record) == pair


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "2+2?", "chosen": "4"}, "no field 'rejected'; its fields are 'prompt', 'chosen'"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "4"}, "chosen and rejected are equal"),
        ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, OTHER]}, "no user turn in common"),
        ({"chosen": "4", "rejected": "5"}, "no conversation in it"),
    ],
)
def test_what_is_no_pair(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UntrainableError, match=message):
        to_pair(record)


def test_an_answer_that_is_a_number_is_not_trained_on() -> None:
    prompt, chosen, _ = to_pair({"prompt": "2+2?", "chosen": 1, "rejected": 0})
    with pytest.raises(UntrainableError, match="content must be text"):
        check_conversation([*prompt, *chosen], None)
