"""Math with a calculator: who declares it, what it answers, demonstrations, episodes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nemotron.kit import chat
from nemotron.stack.environments import Task, generate_tasks, open_episode, prompt_tools, to_messages, verify
from nemotron.stack.environments.calculator import call

CALL = "<tool_call>\n<function=calculator>\n<parameter=expression>\n2+2\n</parameter>\n</function>\n</tool_call>"


def tasks(share: float, n: int = 200) -> list[Task]:
    return generate_tasks("math", "train", n, 5, {"tool_share": share, "multiply": 0.5})


def test_a_share_of_the_problems_declares_it_and_the_problems_are_the_same() -> None:
    without, half, always = tasks(0.0), tasks(0.5), tasks(1.0)
    assert [[t.prompt for t in some] for some in (half, always)] == [[t.prompt for t in without]] * 2
    assert [t.canonical for t in half] == [t.canonical for t in without]
    assert not any(map(prompt_tools, without)) and all(map(prompt_tools, always))
    assert 60 < sum(bool(prompt_tools(t)) for t in half) < 140
    assert without == generate_tasks("math", "train", 200, 5, {"multiply": 0.5})
    # What declares nothing is, to the letter, what it is without the tool.
    assert all(one == other for one, other in zip(half, without, strict=True) if not prompt_tools(one))


def test_a_tool_of_no_use_is_left_alone() -> None:
    some = generate_tasks("math", "train", 100, 5, {"tool_share": 0.3, "other_tool_share": 0.4})
    plain = generate_tasks("math", "train", 100, 5)
    names = [[tool["name"] for tool in prompt_tools(task)] for task in some]
    assert {tuple(each) for each in names} == {(), ("calculator",), ("weather",)}
    for task, other, declared in zip(some, plain, names, strict=True):
        assert (task.prompt, task.solution) == (other.prompt, other.solution)
        if declared == ["weather"]:
            assert to_messages(task) == to_messages(other)
            episode = open_episode(task, thinking=False)
            assert episode is not None
            assert episode.respond(CALL) == [{"role": "tool", "content": "Error: no tool is called calculator."}]
            assert episode.respond(task.solution.answer) is None and episode.verdict().score == 1.0


def test_it_calculates() -> None:
    rng = random.Random(0)
    for _ in range(200):
        left, right, operator = rng.randint(-999, 999), rng.randint(-99, 999), rng.choice("+-*")
        assert call("calculator", {"expression": f"{left} {operator}{right}"}) == str(
            eval(f"{left}{operator}({right})")
        )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("python", {"expression": "1+2"}, "Error: no tool is called python."),
        ("calculator", {"code": "1+2"}, "Error: calculator takes expression, and nothing else."),
        ("calculator", {}, "Error: calculator takes expression, and nothing else."),
        ("calculator", {"expression": "1+2+3"}, "Error: expression must be two integers with +, - or * between them."),
        ("calculator", {"expression": "9" * 5000 + "*2"}, "Error: expression must be two integers"),
        ("calculator", {"expression": "__import__('os')"}, "Error: expression must be two integers"),
    ],
)
def test_what_it_refuses(name: str, arguments: dict[str, Any], message: str) -> None:
    assert call(name, arguments).startswith(message)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_demonstration_is_what_its_episode_answers(thinking: bool) -> None:
    for task in tasks(1.0, 20):
        question, first, result, last = to_messages(task, thinking)
        assert question == {"role": "user", "content": task.prompt}
        assert ("reasoning_content" in first) == ("reasoning_content" in last) == thinking
        segments = chat.render_with_mask(
            [question, first], tools=prompt_tools(task), enable_thinking=thinking, template="nano3"
        )
        written = "".join(text for text, trained in segments if trained).removesuffix("<|im_end|>")
        episode = open_episode(task, thinking)
        assert episode is not None and episode.respond(written) == [result]
        assert result["content"] == str(task.spec["result"]) == last["content"]
        assert episode.verdict().score == 0.0  # a call is no answer
        closing = f"{last.get('reasoning_content', '')}\n</think>\n" if thinking else ""
        assert episode.respond(closing + last["content"]) is None
        assert episode.verdict().score == 1.0


def test_another_tool_is_refused_in_the_episode_and_the_model_may_go_on() -> None:
    (task,) = tasks(1.0, 1)
    episode = open_episode(task, thinking=False)
    assert episode is not None
    search = "<tool_call>\n<function=search>\n<parameter=query>\n2+2\n</parameter>\n</function>\n</tool_call>"
    assert episode.respond(search) == [{"role": "tool", "content": "Error: no tool is called search."}]
    assert episode.respond(task.solution.answer) is None
    assert episode.verdict().score == 1.0


def test_without_a_declaration_a_call_is_a_wrong_answer() -> None:
    (task,) = tasks(0.0, 1)
    assert open_episode(task) is None
    assert verify(task, CALL).score == 0.0
    assert verify(task, task.solution.answer).score == 1.0
