"""Answers in a format: what NeMo Gym's environment was recorded to say, formats by hand, and documents made to hang."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.recipes import nano3
from nemotron.stack.environments import Solution, Task, from_gym, generate_tasks, prompt_messages, verify
from nemotron.stack.environments.formats import FORMATS, MAX_DEPTH, read, typed
from nemotron.stack.environments.structured_output import strict_schema
from nemotron.stack.environments.validation import as_text, may_take_long

from .recorded_cases import cases

RECORDED = cases("gym_structured_outputs")
ERROR = "error"
# Recorded cases that score otherwise here: the flaw that each shows, and the reward here.
TWICE, NO_NUMBER = "a key twice is read as its last value", "NaN and infinity pass as numbers"
FORMAT, HEADER = "`format` is not checked", "a line of anything is a CSV header, whose empty list passes"
BROKEN = "a broken schema is one that no response meets"
DIFFERENT: dict[str, tuple[str, float | str]] = {
    **dict.fromkeys(("0015", "0104"), (TWICE, 0.0)),
    **dict.fromkeys(("0024", "0025"), (NO_NUMBER, 0.0)),
    **dict.fromkeys(("0039", "0128"), (FORMAT, 0.0)),
    **dict.fromkeys(("0075", "0078", "0164", "0167"), (HEADER, 0.0)),
    **dict.fromkeys(("0021", "0110"), (BROKEN, ERROR)),
}

PERSON = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}})
TABLE = json.dumps({"type": "array", "items": json.loads(PERSON)})
TOOLS = [{"type": "function", "function": {"name": "emit", "parameters": json.loads(PERSON)}}]


def task(**spec: Any) -> Task:
    return Task("structured_output", "", "", spec, Solution("", ""))


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the templates of the Nemotron 3 family write it."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"


def task_and_answer(case: dict[str, Any]) -> tuple[Task, str]:
    """A recorded case; its tool calls as the model would write them, the schema being that of the tool."""
    inputs, options = case["inputs"], case["options"]
    spec = {"schema_str": inputs["schema"]} | {name: options[name] for name in options if name != "xml_coerce_types"}
    if options.get("response_mode") != "tool_call":
        return task(**spec), inputs["text"]
    parameters = json.loads(inputs["schema"])
    if "tool_payload_key" in options:
        parameters = {"type": "object", "properties": {options["tool_payload_key"]: parameters}}
    names = {each["name"] for each in inputs["tool_calls"]}
    spec["tools"] = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
    answer = inputs["text"]
    for each in inputs["tool_calls"]:
        try:
            answer += "\n" + call(each["name"], json.loads(each["arguments"]))
        except ValueError:  # arguments that are no JSON: here, a call whose tags do not close
            answer += f"\n<tool_call>\n<function={each['name']}>\n<parameter=a>\n"
    return task(**spec), answer


def test_recorded_rewards_but_for_the_flaws() -> None:
    assert len(RECORDED) == 174
    differing = {}
    for case in RECORDED:
        if not case["options"]["xml_coerce_types"]:  # an option of no recipe
            continue
        verdict = verify(*task_and_answer(case))
        assert math.isnan(verdict.score) == (verdict.status == "error")
        assert (verdict.score > 0) == (verdict.status == "score")
        ours = ERROR if verdict.status == "error" else verdict.score
        if ours != case["outputs"]["reward"]:
            differing[case["id"][-4:]] = ours
    assert differing == {number: reward for number, (_, reward) in DIFFERENT.items()}


GOOD = {
    "json": '{"name": "Ann", "age": 3}',
    "yaml": "# a person\nname: Ann\nage: 3\n",
    "toml": 'name = "Ann"\nage = 3',
    "xml": '<?xml version="1.0"?>\n<p><!-- a person --><name>Ann</name><age> 3 </age></p>',
    "csv": 'name,age\nAnn,3\n"B, C",4\n',
}
SCHEMAS = {"xml": json.dumps({"type": "object", "properties": {"p": json.loads(PERSON)}}), "csv": TABLE}


def in_format(form: str) -> Task:
    return task(schema_str=SCHEMAS.get(form, PERSON), schema_type=form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_right_answer_in_each_format_is_right_in_that_format_alone(form: str) -> None:
    for other, answer in GOOD.items():
        reads_as_well = (form, other) == ("yaml", "json")  # of which it is a subset
        assert verify(in_format(form), answer).status == ("score" if form == other or reads_as_well else "wrong")


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("json", '{"name": "Ann", "age": 1e999}'),
        ("json", '{"name": "Ann", "age": 3} '.rstrip() + "{}"),
        ("json", "[" * 100_000),
        ("json", '{"name": "' + "a" * 300_000 + '", "age": 3}'),
        ("yaml", "name: Ann\nage: 3\nname: Bob"),
        ("yaml", "name: Ann\nage: .nan"),
        ("yaml", "name: Ann\n---\nname: Bob\nage: 3"),
        ("yaml", "!!python/object/apply:os.system ['true']"),
        ("yaml", "name: !!python/name:os.system\nage: 3"),
        ("yaml", "name: 2024-13-45\nage: 3"),
        ("yaml", "&a [*a]"),
        ("yaml", "1: Ann\nage: 3"),
        ("yaml", "? [a]\n: 3"),
        ("yaml", "!!set {a, b}"),
        ("yaml", "name: Ann\nage: !!bool maybe"),
        ("yaml", "name: Ann\nage: !!int ''"),
        ("yaml", "name: !!timestamp foo\nage: 3"),
        ("yaml", "[" * 100_000),
        ("yaml", f"a: &a [{'1,' * 4000}]\nb: [{'*a,' * 4000}]"),
        ("toml", 'name = "Ann"\nage = nan'),
        ("toml", 'name = "Ann"\nage = 3\nage = 3'),
        ("toml", "a = " + "[" * 50_000),
        ("toml", "a." * 90_000 + "a = 1"),
        ("toml", "[" + " 'a' ." * 30_000 + "a]\nage = 3"),
        ("toml", "b = {c = 1, " + '"a"  .' * 30_000 + "a = 1}"),
        ("xml", '<!DOCTYPE p [<!ENTITY a "Ann">]><p><name>&a;</name><age>3</age></p>'),
        ("xml", '<!DOCTYPE p SYSTEM "file:///etc/passwd"><p><name>Ann</name><age>3</age></p>'),
        ("xml", "<p><name>Ann</name><age>3</age></p><p/>"),
        ("xml", "<p><name>Ann</name><age>1_0</age></p>"),
        ("xml", "<p><name>Ann</name><age>\u0663</age></p>"),  # int() reads it
        ("xml", "<p><name>Ann</name><age>" + "9" * 5_000 + "</age></p>"),
        ("xml", "<p>" * 40_000 + "</p>" * 40_000),
        ("csv", "name,age,age\nAnn,3,3"),
        ("csv", 'name,age\n"Ann,3'),
        ("csv", "name,age\nAnn,1e999"),
        ("csv", "name,age\n" + "Ann,3\n" * 25_000),
    ],
)
def test_documents_that_parsers_take_or_choke_on_are_wrong(form: str, answer: str) -> None:
    assert verify(in_format(form), answer).status == "wrong"


def merges(levels: int, width: int = 10) -> str:
    """Mappings, each of which merges the one before `width` times."""
    lines = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * width)}], c{i}: {i}}}" for i in range(1, levels + 1)]
    return "\n".join(["a0: &a0 {b: 1}", *lines])


def test_merge_keys_are_read_and_do_not_multiply_without_end() -> None:
    assert read(merges(2), "yaml")["a2"] == {"b": 1, "c1": 1, "c2": 2}
    assert read("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: {<<: &f {<<: *a, c: 4}}\ng: *f", "yaml") == {
        "a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": {"b": 1, "c": 4}, "g": {"b": 1, "c": 4}
    }  # fmt: skip
    for text in (merges(5), merges(30), merges(400, width=1), f"a: &a {{}}\nb: {{{'<<: *a, ' * 2000}}}"):
        with pytest.raises(ValueError, match=r"keys|twice"):
            read(text, "yaml")


def test_dotted_keys_of_toml_are_read_as_deep_as_data_may_be() -> None:
    value: Any = read(f"{'a.' * (MAX_DEPTH - 2)}a = '{'b.' * 100}'", "toml")
    for _ in range(MAX_DEPTH - 1):
        value = value["a"]
    assert value == "b." * 100
    with pytest.raises(ValueError, match="a key of more than 64 parts"):
        read(f"x = 1\n[[{'a.' * MAX_DEPTH}a]]", "toml")


def test_a_number_beyond_any_float_is_a_wrong_answer() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 0.01}}}
    long = task(schema_str=json.dumps(schema), schema_type="json")
    assert verify(long, f'{{"n": {"9" * 400}}}').status == "wrong" and verify(long, '{"n": 1.5}').status == "score"


def test_an_integer_too_long_to_be_shown_is_a_wrong_answer() -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "string"}}})
    long = f"0x{'f' * 4000}"
    for form, document in (("yaml", f"n: {long}"), ("toml", f"n = {long}"), ("yaml", f"n: 1{':0' * 90_000}")):
        verdict = verify(task(schema_str=schema, schema_type=form), document)
        assert verdict.reason == f"not {form.upper()}: an integer of more than 4300 digits"
    assert read("n: 0x1f\nm: 1:30", "yaml") == {"n": 31, "m": 90}


def test_names_of_xml_are_not_multiplied_by_that_of_their_namespace() -> None:
    elements = "".join(f"<a:n{number}/>" for number in range(5000))
    attributes = "".join(f" a:n{number}=''" for number in range(5000))
    for body in (f">{elements}", f"{attributes}>"):
        with pytest.raises(ValueError, match="namespaces with long names"):
            read(f"<r xmlns:a = '{'u' * 50_000}'{body}</r>", "xml")
    assert read("<r xmlns='http://a.example/b'><n>1</n></r>", "xml") == {
        "{http://a.example/b}r": {"{http://a.example/b}n": "1"}
    }


def test_a_regular_expression_that_nests_too_deep_is_a_wrong_answer() -> None:
    nested = task(schema_str='{"type": "string", "format": "regex"}')
    assert verify(nested, json.dumps("(" * 5000)).status == "wrong"
    assert verify(nested, '"(a|b)+"').status == "score"
    assert may_take_long(as_text({"format": "regex"}))


def test_expansion_is_refused_before_it_costs_anything() -> None:
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    entities = "".join(f'<!ENTITY a{i} "&a{i - 1};&a{i - 1};">' for i in range(1, 40))
    documents = {"yaml": aliases, "xml": f'<!DOCTYPE p [<!ENTITY a0 "x">{entities}]><p>&a39;</p>'}
    for form, document in documents.items():
        assert verify(task(schema_str="{}", schema_type=form), document).status == "wrong"


def test_text_that_aliases_repeat_is_refused_before_a_message_shows_it() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {}, "b": {"type": "string"}}})
    for long in ("x" * 30_000, f"{{{'x' * 1000}: 1}}"):  # 120 MB, 4 MB
        document = f"a: &a {long}\nb: [{'*a, ' * 4000}]"
        verdict = verify(task(schema_str=schema, schema_type="yaml"), document)
        assert verdict.reason == "not YAML: more than 2000000 characters in its keys and values"


def test_depth_is_limited_in_every_format_alike() -> None:
    for depth, is_read in ((MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False)):
        nested = "[" * depth + "]" * depth
        for form in ("json", "yaml"):
            assert (verify(task(schema_str="{}", schema_type=form), nested).status == "score") == is_read


def test_xml_is_read_as_xmltodict_documents_it() -> None:
    # The first three are the examples of its README.
    assert read('<mydocument has="an attribute"><and><many>elements</many><many>more elements</many></and>'
                '<plus a="complex">element as well</plus></mydocument>', "xml") == {
        "mydocument": {
            "@has": "an attribute",
            "and": {"many": ["elements", "more elements"]},
            "plus": {"@a": "complex", "#text": "element as well"},
        }
    }  # fmt: skip
    assert read("<a><b/></a>", "xml") == {"a": {"b": None}}


@pytest.mark.parametrize(
    ("kind", "xml", "value"),
    [
        ({"type": "array", "items": {"type": "integer"}}, "<i>1</i><i>2</i>", [1, 2]),
        ({"type": "array", "items": {"type": "string"}}, "<i>1</i>", ["1"]),
        ({"type": "array", "items": {"type": "object", "properties": {"n": {}}}}, "<i><n>1</n></i>", [{"n": "1"}]),
        ({"type": "array", "items": {"type": "object", "properties": {"n": {}}}}, "<n>1</n>", [{"n": "1"}]),
        ({"type": "number"}, "-.5e1", -5.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "no", "no"),
        ({"type": ["integer", "null"]}, "", None),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "", None),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"enum": ["1", 5]}, "5", 5),
        ({"enum": ["1", 5]}, "1", "1"),
        ({"enum": ["1", 5]}, "6", "6"),
        ({"const": True}, "true", True),
        ({"type": "number", "enum": [1, 2.5]}, "1.0", 1.0),
        ({"type": ["string", "null"], "enum": ["a", None]}, "", None),
        ({}, "5", "5"),
    ],
)
def test_text_of_xml_has_the_type_that_the_schema_says(kind: dict[str, Any], xml: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"r": kind}, "$defs": {"n": {"type": "integer"}}}
    assert typed(read(f"<r>{xml}</r>", "xml"), schema) == {"r": value}


def test_a_schema_is_strict_at_every_level() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {
        "properties": {"a": {"anyOf": [inner, {"type": "array", "items": inner}]}, "properties": {"const": inner}}
    }
    closed = {**inner, "required": ["b"], "additionalProperties": False}
    assert strict_schema(schema) == {
        "properties": {"a": {"anyOf": [closed, {"type": "array", "items": closed}]}, "properties": {"const": inner}},
        "required": ["a", "properties"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"schema_str": '{"type": "objekt"}'},
        {"schema_str": "{"},
        {"schema_str": '{"$ref": "http://localhost:9/schema.json"}'},  # never fetched
        {"schema_str": '{"allOf": [{"$ref": "file:///etc/passwd"}]}'},
        {"schema_str": '{"$ref": "#/$defs/missing"}'},
        {"schema_str": '{"$ref": "#"}'},
        {"schema_str": "{}", "schema_type": "ini"},
        {"schema_str": "{}", "response_mode": "tools"},
        {"schema_str": "{}", "response_mode": "tool_call"},  # without declarations
    ],
)
def test_a_broken_record_is_an_error(spec: dict[str, Any]) -> None:
    assert verify(task(**spec), "{}").status == "error"


def test_a_call_has_to_be_the_one_and_of_the_tool() -> None:
    spec = {"schema_str": PERSON, "response_mode": "tool_call", "tools": TOOLS, "tool_name": "emit"}
    good = call("emit", {"name": "Ann", "age": 3})
    assert verify(task(**spec), f"Here it is.\n{good}").status == "score"
    for bad in (
        GOOD["json"],
        good + good,
        call("omit", {"name": "Ann", "age": 3}),
        call("emit", {"name": "Ann", "age": "three"}),
        call("emit", {"name": "Ann"}),
        good.replace("</function>", ""),
        f"<think>{good}</think>",
    ):
        assert verify(task(**spec), bad).status == "wrong"


def test_a_published_record_keeps_all_messages_of_its_prompt() -> None:
    items = [
        {"role": "developer", "content": "Answer in TOML."},
        {"role": "user", "content": [{"type": "input_text", "text": "Ann is 3."}]},
    ]
    each = from_gym(
        "structured_outputs",
        {"responses_create_params": {"input": items}, "schema_str": PERSON, "schema_type": "toml", "num_turns": 1},
    )
    assert prompt_messages(each) == [
        {"role": "system", "content": "Answer in TOML."},
        {"role": "user", "content": "Ann is 3."},
    ]
    assert Task.from_dict(each.to_dict()) == each
    assert "messages" not in generate_tasks("structured_output", "train", 1)[0].to_dict()
    assert [verify(each, GOOD[form]).status for form in ("toml", "json")] == ["score", "wrong"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"schema_str": '{"type": "objekt"}'}, "'objekt' is not valid"),
        ({"schema_str": '{"$ref": "http://localhost:9/a.json"}'}, "refers to another document"),
        ({"schema_type": "ini"}, "unknown response_mode 'text' or schema_type 'ini'"),
        ({"response_mode": "tool_call"}, "only records that are answered in text"),
        ({"responses_create_params": {"input": [{"type": "function_call"}]}}, "function_call, which is no message"),
    ],
)
def test_a_published_record_that_cannot_be_checked_is_refused(fault: dict[str, Any], message: str) -> None:
    record = {"responses_create_params": {"input": "Ann is 3."}, "schema_str": PERSON}
    with pytest.raises(UserError, match=message):
        from_gym("structured_outputs", record | fault)


def test_the_records_in_the_readme_pass_their_own_check() -> None:
    readme = (Path(nano3.__file__).parent / "README.md").read_text(encoding="utf-8")
    block = readme.split('```json\n{"family"')[1].split("```")[0]
    records = [json.loads(record) for record in re.split(r"\n(?=\{)", '{"family"' + block)]
    assert [record["family"] for record in records] == ["instruction_following", "structured_output"]
    for each in map(Task.from_dict, records):
        assert verify(each, each.solution.answer, thinking=False).score == 1.0
        assert verify(each, "Tom, Felix", thinking=False).score < 1.0


def _broken(text: str, rng: random.Random) -> list[str]:
    """Answers that come near a right one."""
    position = rng.randrange(len(text))
    digit = next(index for index, char in enumerate(text) if char == "3")
    return [
        text[:digit]
        + rng.choice(["three", "3.5", "NaN", "Infinity", "\uff13", "3 4", "null", "true"])
        + text[digit + 1 :],
        text.replace("age", rng.choice(["Age", "аge", "ages", "agë"])),
        text[: text.index("Ann")],
        f"```\n{text}\n```",
        f"<think>{text}</think>",
        f"<think>{text}",
        f"{text}\n\n{text}",
        f"Answer: {text}" if not text.startswith("name") else f"{text}\n\tx\n: y",
        text[:position] + "\x00" + text[position:],
        "\u200b" + text.replace("name", "na\u200bme"),
    ]


def test_no_false_pass_on_1000_adversarial_answers() -> None:
    rng = random.Random(0)
    pairs = [(in_format(form), bad) for form in FORMATS for _ in range(20) for bad in _broken(GOOD[form], rng)]
    pairs += [
        (in_format(form), bad) for form in FORMATS for bad in ("", " \n", "NaN", "null", "[]", "{}", "()", "x" * 10_000)
    ]
    generated = generate_tasks("structured_output", "train", 150)
    pairs += [(each, other.solution.answer) for each, other in pairwise(generated)
              if each.canonical != other.canonical]  # fmt: skip
    assert len(pairs) >= 1000
    assert [(each.spec, answer) for each, answer in pairs if verify(each, answer).status != "wrong"] == []
