"""A calculator as a tool of math tasks: its declaration, what it answers, and the conversation that uses it.

A share of the generated problems (`MathDifficulty.tool_share`) declares it; their `spec` has, beside the result, the
`expression` and `tools`, the names that the prompt declares. Another share declares a tool of no use instead, and is
answered as if there were none. The answer is verified as that of any other problem, whether a tool was called or not. A
problem that declares no tool is verified by its one response, and a call in it is no answer: a model that calls what is
not declared has hallucinated the tool.
"""

from __future__ import annotations

import re
from typing import Any

from nemotron.kit.chat import parse_tool_calls
from nemotron.stack.environments import math
from nemotron.stack.environments.task import Task, Verdict, answer_of, turns

CALCULATOR: dict[str, Any] = {
    "name": math.CALCULATOR,
    "description": "Sum, difference or product of two integers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
_OTHER: dict[str, Any] = {
    "name": math.WEATHER,
    "description": "Weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
NAMES = (math.CALCULATOR, math.WEATHER)
_THOUGHTS = ("calculator", "done")
_EXPRESSION = re.compile(r"\s*(-?[0-9]{1,18})\s*([-+*])\s*(-?[0-9]{1,18})\s*")


def tools(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The declarations in the prompt of a math task."""
    return [tool for tool in (CALCULATOR, _OTHER) if tool["name"] in spec.get("tools", ())]


def call(name: str, arguments: dict[str, Any], offered: tuple[str, ...] = (math.CALCULATOR,)) -> str:
    """The result of a call as text. What cannot be calculated, or is not offered, is an error that says why."""
    if name not in offered:
        return f"Error: no tool is called {name}."
    if name == math.WEATHER:
        return "Error: the weather is not known there."
    if set(arguments) != {"expression"}:
        return f"Error: {name} takes expression, and nothing else."
    match = _EXPRESSION.fullmatch(str(arguments["expression"]))
    if match is None:
        return "Error: expression must be two integers with +, - or * between them."
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str(left + right if operator == "+" else left - right if operator == "-" else left * right)


def demonstration(task: Task, thinking: bool) -> list[dict[str, Any]]:
    """What follows a problem with the calculator: a call, its result, and the answer."""
    only = {"name": math.CALCULATOR, "arguments": {"expression": task.spec["expression"]}}
    return turns([only], lambda each: call(**each), task.solution.answer, _THOUGHTS if thinking else None)


class CalculatorEpisode:
    """An `Episode`: a response with calls is answered by their results; one without is the answer."""

    has_turns = True

    def __init__(self, task: Task, thinking: bool | None) -> None:
        self.spec, self.thinking = task.spec, thinking
        self.tools = tools(task.spec)
        self.answer = ""

    def respond(self, response: str) -> list[dict[str, Any]] | None:
        """The results of the calls in a response, in order; None where it has none."""
        self.answer, calls = parse_tool_calls(answer_of(response, self.thinking), self.tools)
        offered = tuple(self.spec["tools"])
        results = [call(each["name"], each["arguments"], offered) for each in calls]
        return [{"role": "tool", "content": result} for result in results] or None

    def verdict(self) -> Verdict:
        """Of the last response, beside its calls."""
        return math.verify_answer(self.spec, self.answer)
