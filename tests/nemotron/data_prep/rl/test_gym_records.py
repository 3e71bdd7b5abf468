"""Records as NeMo Gym's servers take them. The whole ones have the fields of the examples in its repository."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.data_prep.rl.gym_records import (
    NO_AGENT,
    NO_PROMPT,
    NOT_FOR_SERVER,
    agent_of,
    problem_of,
    prompt_key,
    question_key,
    server_of,
)


def record(agent: str = "my_simple_agent", **fields: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": "What is 2+2?"}]
    return {"agent_ref": {"name": agent}, "responses_create_params": {"input": asked}, **fields}


WHOLE = {
    "math": record("math_with_judge_simple_agent", question="What is 2+2?", expected_answer="4"),
    "mcqa": record("mcqa_simple_agent", expected_answer="B", options=[{"A": "three"}, {"B": "four"}]),
    "code": record("code_gen_simple_agent", verifier_metadata={"unit_tests": {"inputs": ["1"], "outputs": ["2"]}}),
    "instruction": record("instruction_following_simple_agent", id=7, instruction_id_list=[], prompt="x", kwargs=[]),
    "instruction, below": record(
        "instruction_following_simple_agent",
        id="7",
        verifier_metadata={"instruction_id_list": [], "prompt": "x", "kwargs": []},
    ),
    "structured": record("structured_outputs_simple_agent", schema_str="{}", schema_type="json"),
    "workplace": record(
        "workplace_assistant_simple_agent",
        id=0,
        ground_truth=[{"name": "send", "arguments": "{}"}],
        category="workbench_email",
        environment_name="workbench",
    ),
    "unknown": record("genrm_simple_agent"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_record_has_no_problem(name: str) -> None:
    assert problem_of(WHOLE[name]) is None


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("math", "question", None, "math_with_judge: question is missing"),
        ("math", "expected_answer", 4, "math_with_judge: expected_answer is not text"),
        ("mcqa", "expected_answer", None, "mcqa: expected_answer is missing"),
        ("mcqa", "options", "A", "mcqa: options is not a list, if anything"),
        ("code", "verifier_metadata", None, "code_gen: verifier_metadata.unit_tests.inputs is missing"),
        ("code", "verifier_metadata", {"unit_tests": {"inputs": [1], "outputs": []}}, "inputs is not a list of texts"),
        ("instruction", "id", None, "instruction_following: id is missing"),
        ("instruction", "id", "seven", "instruction_following: id is not a number"),
        ("structured", "schema_str", {}, "structured_outputs: schema_str is not text"),
        ("workplace", "ground_truth", None, "workplace_assistant: ground_truth is missing"),
        ("workplace", "category", None, "workplace_assistant: category is missing"),
    ],
)
def test_what_its_server_asks_for_is_named(name: str, field: str, value: Any, says: str) -> None:
    broken = {**copy.deepcopy(WHOLE[name]), field: value}
    reason, detail = problem_of(broken) or ("", "")
    assert reason == NOT_FOR_SERVER and detail.endswith(says)
    assert problem_of(broken, check_fields=False) is None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (None, "responses_create_params is missing"),
        ([], "responses_create_params is not an object"),
        ({}, "input is missing or empty"),
        ({"input": " "}, "input is empty"),
        ({"input": []}, "input is missing or empty"),
        ({"input": {"role": "user"}}, "input is neither text nor a list of messages"),
        ({"input": ["hello"]}, "input[0] is not an object"),
        ({"input": [{"role": "usr", "content": "x"}]}, "input[0].role is 'usr', not one of user, "),
        (
            {"input": [{"role": "user", "content": "x"}, {"role": "user"}]},
            "input[1].content is neither text nor a list",
        ),
        ({"input": [{"output": "x"}]}, "input[0] has neither role nor type"),
    ],
)
def test_a_record_without_a_prompt(params: Any, says: str) -> None:
    reason, detail = problem_of({**record(), "responses_create_params": params}) or ("", "")
    assert reason == NO_PROMPT and says in detail


@pytest.mark.parametrize("agent", [None, "mcqa_simple_agent", {}, {"name": ""}, {"name": 3}])
def test_a_record_of_no_agent(agent: Any) -> None:
    broken = {**record(), "agent_ref": agent}
    assert agent_of(broken) is None
    assert (problem_of(broken) or ("",))[0] == NO_AGENT


def test_the_field_that_was_meant_is_named() -> None:
    broken = {**record(), "agent_reff": {"name": "x"}}
    del broken["agent_ref"]
    assert problem_of(broken) == (NO_AGENT, "agent_ref.name is missing, did you mean 'agent_reff'?")


def test_servers_are_told_by_whole_words() -> None:
    assert server_of("mcqa_simple_agent") == server_of("mcqa") == "mcqa"
    assert server_of("mcqaplus_agent") is None
    assert server_of("structured_outputs_json_simple_agent") == "structured_outputs"


@given(st.text(min_size=1), st.text(min_size=1))
def test_keys_differ_where_prompts_do(one: str, two: str) -> None:
    """By words and case folding alone; text and the message that holds it are the same."""
    text = {"responses_create_params": {"input": one}}
    message = {"responses_create_params": {"input": [{"role": "user", "content": two}]}}
    same = one.casefold().split() == two.casefold().split()
    assert (prompt_key(text) == prompt_key(message)) == same
    parts = {"responses_create_params": {"input": [{"content": [{"type": "input_text", "text": two}], "role": "user"}]}}
    assert prompt_key(parts) == prompt_key(message)


def test_keys_see_all_messages_and_the_bare_question() -> None:
    asked = [{"role": "user", "content": "Go on."}]
    system = [{"role": "system", "content": "Be brief."}, *asked]
    call = [*asked, {"type": "function_call", "name": "f", "arguments": "{}"}]
    keys = {prompt_key({"responses_create_params": {"input": items}}) for items in (asked, system, call)}
    assert len(keys) == 3
    assert question_key({"question": "What  IS 2?"}) == question_key({"question": "what is 2?"}) is not None
    assert question_key({"question": " "}) is None and question_key({}) is None
