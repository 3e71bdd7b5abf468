"""Tool comparison: which call of a tool comes next, with which arguments, in a conversation of a coding agent.

A generated task is a step of a `repository_repair`: the conversation up to there, and the call that its demonstration
makes next, or the message with which it ends. Published ones (`from_gym`) are those of two resources servers. The
answer is compared with what is expected (`call_comparison`) and nothing is run.

`spec`: `tools`, as chat templates take them; `expected`, calls as {name, arguments}, none where a message is expected;
`threshold` of `equal_calls`; `comparison` is "step" where it is `equal_step` that compares.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from nemo_runspec.errors import UserError
from nemotron.kit.chat import parse_tool_calls
from nemotron.kit.schemas.difficulty import RepairStep, ToolComparisonDifficulty
from nemotron.stack.environments import repository_repair
from nemotron.stack.environments.call_comparison import WORD_THRESHOLD, equal_calls, equal_step
from nemotron.stack.environments.formats import refuse_constant
from nemotron.stack.environments.gym import canonical_of, conversation_of
from nemotron.stack.environments.task import Call, Solution, Task, Verdict, answer_of, in_split_of, right, wrong
from nemotron.stack.environments.workplace_assistant import call_text

FAMILY = "tool_comparison"
ARGUMENTS, SWE_PIVOT = "single_step_tool_use_with_argument_comparison", "swe_pivot"
# Where one sign more or less is another function, texts have to be equal.
_EQUAL = 0.5
_STEPS = get_args(RepairStep)


@dataclass(frozen=True, slots=True)
class Problem:
    """A step of a repair."""

    repair: repository_repair.Problem
    step: RepairStep

    @property
    def canonical(self) -> str:
        """One string for a step of all repairs of a function, in the split of these repairs."""
        return in_split_of(self.repair.canonical, f"{FAMILY}|{self.repair.canonical}|{self.step}")


def draw(rng: random.Random, difficulty: ToolComparisonDifficulty) -> Problem:
    """Draw one problem."""
    return Problem(repository_repair.draw(rng, difficulty), rng.choice(difficulty.steps))


def build(problem: Problem, difficulty: ToolComparisonDifficulty, rng: random.Random) -> Task:
    """Draw the repository, and demonstrate its repair up to the step and the step itself."""
    repair = repository_repair.build(problem.repair, difficulty, rng)
    turns = repository_repair.demonstration(repair, thinking=True)
    place = 2 * _STEPS.index(problem.step)  # a turn of the model, and a result
    turn, history = turns[place], [{"role": "user", "content": repair.prompt}, *turns[:place]]
    expected: list[Call] = turn.get("tool_calls", [])
    spec = {"tools": repository_repair.tools(repair.spec), "expected": expected, "threshold": _EQUAL}
    answer = "".join(map(call_text, expected)) or turn["content"]
    solution = Solution(turn["reasoning_content"], answer, repair.solution.style)
    messages = history if place else None
    return Task(FAMILY, repair.prompt, problem.canonical, spec, solution, messages=messages)


def space_size(difficulty: ToolComparisonDifficulty) -> int:
    """Number of different canonical tasks, exact."""
    return repository_repair.space_size(difficulty) * len(set(difficulty.steps))


def from_gym(server: str, record: Mapping[str, Any]) -> Task:
    """A record for one of the two resources servers, compared by the server's defaults.

    UserError: it expects nothing that can be compared, or its conversation cannot be read.
    """
    action = record.get("expected_action")
    calls = [_expected_call(each) for each in _calls_of(action)]
    if not calls and server == SWE_PIVOT:
        raise UserError("expected_action is no call of a tool")
    messages, tools = conversation_of(record)
    prompt = "\n\n".join(str(message["content"]) for message in messages)
    spec: dict[str, Any] = {"tools": tools, "expected": calls}
    spec |= {"comparison": "step"} if server == SWE_PIVOT else {"threshold": WORD_THRESHOLD}
    answer = "".join(map(call_text, calls)) if all(map(_is_plain, calls)) else ""
    canonical = canonical_of(FAMILY, json.dumps([messages, tools]))
    return Task(FAMILY, prompt, canonical, spec, Solution("", answer), messages=messages)


def _calls_of(action: Any) -> list[Any]:
    match action:
        case {"type": "message"}:
            return []
        case {"type": "function_call"}:
            return [action]
        case {"type": "function_call_batch", "calls": [_, *_] as calls}:
            return list(calls)
    raise UserError("expected_action is neither a message nor calls of tools")


def _expected_call(call: Any) -> Call:
    try:
        arguments = json.loads(call["arguments"], parse_constant=refuse_constant)
        if isinstance(call["name"], str) and isinstance(arguments, dict):
            return {"name": call["name"], "arguments": arguments}
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise UserError("expected_action has a call without a name and an object of arguments")


def _is_plain(call: Call) -> bool:
    """Whether `call_text` shows the call as it is: arguments of one line of text."""
    return all(isinstance(value, str) and value.strip() == value for value in call["arguments"].values())


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """The verdict on an answer, with its calls as chat templates write them."""
    text, calls = parse_tool_calls(answer, spec["tools"])
    return verify_calls(spec, text, calls)


def verify_calls(spec: dict[str, Any], text: str, calls: list[Call]) -> Verdict:
    """The verdict on calls and the text beside them. Where a message is expected it is any text without a call."""
    if not spec["expected"]:
        return right() if text.strip() and not calls else wrong("a call of a tool" if calls else "no message")
    if spec.get("comparison") == "step":
        equal = equal_step(spec["expected"][0], calls)
    else:
        equal = equal_calls(spec["expected"], calls, spec["threshold"])
    return right() if equal else wrong("calls differ" if calls else "no call")


def demonstration(task: Task, thinking: bool) -> dict[str, Any]:
    """The turn that is expected."""
    turn: dict[str, Any] = {"role": "assistant", "content": "" if task.spec["expected"] else task.solution.answer}
    if task.spec["expected"]:
        turn["tool_calls"] = task.spec["expected"]
    return turn | ({"reasoning_content": task.solution.reasoning} if thinking else {})


class ComparisonEpisode:
    """An `Episode` of one response: so its calls are read with the tools that the prompt declares."""

    has_turns = False

    def __init__(self, task: Task, thinking: bool | None) -> None:
        self.spec, self.thinking = task.spec, thinking
        self.tools: list[dict[str, Any]] = task.spec["tools"]
        self.answer = ""

    def respond(self, response: str) -> None:
        """The end, whatever the response is: no call is answered."""
        self.answer = answer_of(response, self.thinking)

    def verdict(self) -> Verdict:
        """Of the response."""
        return verify_answer(self.spec, self.answer)
