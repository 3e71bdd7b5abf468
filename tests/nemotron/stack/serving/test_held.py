"""What an answer is held to is what the templates write, and nothing that the parsers could not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nemotron.kit.chat import parse_tool_calls, render
from nemotron.stack.serving.grammar import Grammar
from nemotron.stack.serving.held import calls_in_a_list, calls_in_xml, json_answer

TOOLS = [
    {
        "name": "book",
        "parameters": {
            "properties": {
                "room": {"type": "string"},
                "seats": {"type": "integer"},
                "size": {"type": "string", "enum": ["small", "large"]},
                "names": {"type": "array", "items": {"type": "string"}},
                "note": {},
            },
            "required": ["room"],
        },
    },
    {"name": "stop"},
]
BOOK = {"room": "a < b\n\nc", "seats": 3, "size": "large", "names": ["é"], "note": "no\n"}
ROOM = "<tool_call>\n<function=book>\n<parameter=room>\nx\n</parameter>\n"

Accepts = Callable[[str, str], bool]


@pytest.fixture
def accepts(tokenizer_folder: Path) -> Accepts:
    """Whether a grammar takes a text, token by token, and lets it end there."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    stop = tokenizer.token_to_id("</s>")

    def accepts(lark: str, text: str) -> bool:
        constraint = Grammar(lark, tokenizer_folder / "tokenizer.json").begin(tokenizer.get_vocab_size(), (stop,))
        for token in (*tokenizer.encode(text, add_special_tokens=False).ids, stop):
            if not constraint.allowed()[token]:
                return False
            constraint.take(token)
        return True

    return accepts


def written(calls: list[dict[str, Any]], template: str) -> str:
    """Calls as the template writes them."""
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = render([{"role": "user", "content": "QUESTION"}, turn], template=template).partition("QUESTION")[2]
    begin, end = ("<TOOLCALL>", "</TOOLCALL>") if template == "nano2" else ("<tool_call>", "</tool_call>\n")
    return text[text.index(begin) :].rpartition(end)[0] + end


@pytest.mark.parametrize("template", ["super3", "nano2"])
@pytest.mark.parametrize(
    "calls",
    [
        [{"name": "book", "arguments": BOOK}],
        [{"name": "book", "arguments": {"room": "x"}}, {"name": "stop", "arguments": {}}],
    ],
)
def test_calls_as_the_template_writes_them(accepts: Accepts, template: str, calls: list[dict[str, Any]]) -> None:
    grammar = calls_in_a_list if template == "nano2" else calls_in_xml
    text = written(calls, template)
    assert parse_tool_calls(text, TOOLS)[1] == calls
    assert accepts(grammar(TOOLS, "\n", False), "\n" + text) and accepts(grammar(TOOLS, "", False), text)
    assert accepts(grammar(TOOLS, "", True), text) == (len(calls) == 1)


@pytest.mark.parametrize(
    "wrong",
    [
        "<tool_call>\n<function=book>\n</function>\n</tool_call>",  # without what is required
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        f"{ROOM}<parameter=seats>\nmany\n</parameter>\n</function>\n</tool_call>",
        f"{ROOM}<parameter=size>\nhuge\n</parameter>\n</function>\n</tool_call>",
        "text",
        "",
    ],
)
def test_other_calls_are_not_possible(accepts: Accepts, wrong: str) -> None:
    assert not accepts(calls_in_xml(TOOLS, "\n", False), wrong)


CHOICES = {
    "name": "choose",
    "parameters": {
        "$defs": {
            "Unit": {"type": "string", "enum": ["C", "°F", "🌡"]},
            "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
        "properties": {
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/Unit"},
            "other": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
            "point": {"$ref": "#/$defs/Point"},
            "label": {"oneOf": [{"type": "string"}, {"type": "null"}]},
            "mode": {"const": "fast"},
            "level": {"enum": ["low", 1, None]},
        },
    },
}
CHOSEN: list[tuple[dict[str, Any], bool]] = [
    ({"days": 3, "unit": "°F", "other": None, "point": {"x": 1}, "label": "3", "mode": "fast", "level": 1}, True),
    ({"days": None, "unit": "🌡", "other": "C", "label": None, "level": None}, True),
    ({"label": '"quoted"\n{}', "level": "low"}, True),
    ({"days": "3 or so"}, False),
    ({"unit": "K"}, False),
    ({"other": "K"}, False),
    ({"point": {"y": 1}}, False),
    ({"mode": "slow"}, False),
    ({"level": 2}, False),
]


@pytest.mark.parametrize(("arguments", "fits"), CHOSEN)
def test_values_that_are_declared_without_a_type(accepts: Accepts, arguments: dict[str, Any], fits: bool) -> None:
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    shown = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=choose>\n{shown}</function>\n</tool_call>"
    assert accepts(calls_in_xml([CHOICES], "", True), text) == fits
    assert parse_tool_calls(text, [CHOICES]) == ("", [{"name": "choose", "arguments": arguments}])
    listed = written([{"name": "choose", "arguments": arguments}], "nano2")
    assert accepts(calls_in_a_list([CHOICES], "", True), listed) == fits


def test_json(accepts: Accepts) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lark = json_answer(schema, "\n")
    assert accepts(lark, json.dumps({"a": 1})) and accepts(lark, "\n" + json.dumps({"a": 1}))
    assert not any(accepts(lark, text) for text in ('{"a": "x"}', '{"a": 1', "{}", "\n\n" + json.dumps({"a": 1})))
    assert accepts(json_answer({"type": "object"}, ""), json.dumps({"any": [1, {"thing": None}]}))
