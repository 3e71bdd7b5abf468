"""Workplace assistant: a request that is carried out by calling tools, over several turns.

The databases and their tools are those of `workplace`. A task is solved where the calls leave the databases as the
right calls do: both run in fresh workplaces, and the final states are compared, as in NeMo Gym. So reading is free, and
so is a call that is refused; what counts is what was written. The model is shown the result of every call, refusals
included. Half of the generated requests say what they mean by a name: its id has to be looked up by a first call.

`spec`: `seed` and `rows` of the tables; `tools`, the names of those in the prompt, and whether their
`optional_parameters` are listed there; `calls`, right ones that write, as {name, arguments}.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nemotron.kit.chat import parse_tool_calls
from nemotron.kit.schemas.difficulty import WorkplaceDifficulty, WorkplaceKind
from nemotron.stack.environments.task import Call, Solution, Task, Verdict, answer_of, right, turns, wrong
from nemotron.stack.environments.words import word_list
from nemotron.stack.environments.workplace import (
    LISTS,
    MAX_TABLE_SEED,
    NUM_IDS,
    STATUSES,
    WORDS_PER_CATEGORY,
    Tables,
    Workplace,
    draw_tables,
    tool_definition,
    tool_names,
)

FAMILY = "workplace_assistant"
FINAL_ANSWER = "Done."
# A demonstration is one line of reasoning and one of calls, as of every family; turns follow from them.
BETWEEN_TURNS = "; "


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests about one database. `update`: the tool, the field and the values of a change, where there is one."""

    table: str
    id_column: str
    name_column: str
    noun: str
    delete: str
    search: tuple[str, str]
    update: tuple[str, str, tuple[str, ...]] | None = None


_KINDS: dict[WorkplaceKind, Kind] = {
    "email": Kind(
        "emails", "email_id", "subject", "email", "email_delete_email", ("email_search_emails", "query")
    ),
    "calendar": Kind(
        "events", "event_id", "event_name", "event", "calendar_delete_event", ("calendar_search_events", "query")
    ),
    "project_management": Kind(
        "tasks", "task_id", "task_name", "task", "project_management_delete_task",
        ("project_management_search_tasks", "task_name"), ("project_management_update_task", "list_name", LISTS),
    ),
    "customers": Kind(
        "customers", "customer_id", "customer_name", "customer", "customer_relationship_manager_delete_customer",
        ("customer_relationship_manager_search_customers", "customer_name"),
        ("customer_relationship_manager_update_customer", "status", STATUSES),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """A request: what becomes of row `row` of the table of `kind`. `value`: what is written; empty: it is deleted."""

    kind: WorkplaceKind
    seed: int
    row: int
    row_id: str
    row_name: str
    value: str
    lookup: bool

    @property
    def canonical(self) -> str:
        """One string for all tables that the row may stand in; its name counts only where the request has no id."""
        return f"{FAMILY}|{self.kind}|{self.row_id}|{self.row_name if self.lookup else ''}|{self.value}"


def draw(rng: random.Random, difficulty: WorkplaceDifficulty) -> Problem:
    """Draw one problem. A change writes another value than there was: else doing nothing would be right."""
    name, seed, row = rng.choice(difficulty.kinds), rng.randrange(MAX_TABLE_SEED), rng.randrange(difficulty.rows)
    kind = _KINDS[name]
    record = draw_tables(seed, difficulty.rows)[kind.table][row]
    value = ""
    if kind.update and rng.random() < 0.5:
        _, column, values = kind.update
        value = rng.choice([each for each in values if each != record[column]])
    lookup = rng.random() < difficulty.lookup_share
    return Problem(name, seed, row, record[kind.id_column], record[kind.name_column], value, lookup)


def build(problem: Problem, difficulty: WorkplaceDifficulty, rng: random.Random) -> Task:
    """Word the request, choose the tools of the prompt, and demonstrate: one call a turn, the look-up first."""
    kind = _KINDS[problem.kind]
    write = _write(kind, problem)
    calls, reasoning = [write], [problem.row_id, FINAL_ANSWER.lower()]
    if problem.lookup:
        search, parameter = kind.search
        calls.insert(0, {"name": search, "arguments": {parameter: problem.row_name}})
        reasoning.insert(0, f"which {kind.noun} is {problem.row_name}?")
    needed = [call["name"] for call in calls]
    others = [name for name in tool_names() if name not in needed]
    offered = needed + rng.sample(others, max(0, difficulty.num_tools - len(needed)))
    rng.shuffle(offered)
    what = f"the {kind.noun} {problem.row_name}" if problem.lookup else f"{kind.noun} {problem.row_id}"
    prompt = f"Delete {what}."
    if problem.value and kind.update:
        prompt = f"Set {kind.update[1].replace('_name', '')} of {what} to {problem.value}."
    spec = {
        "seed": problem.seed, "rows": difficulty.rows, "tools": offered,
        "optional_parameters": difficulty.optional_parameters, "calls": [write],
    }  # fmt: skip
    solution = Solution(BETWEEN_TURNS.join(reasoning), "".join(map(call_text, calls)))
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def _write(kind: Kind, problem: Problem) -> Call:
    """The call that does what the request asks for."""
    arguments = {kind.id_column: problem.row_id}
    if problem.value and kind.update:
        tool, column, _ = kind.update
        return {"name": tool, "arguments": {**arguments, "field": column, "new_value": problem.value}}
    return {"name": kind.delete, "arguments": arguments}


def call_text(call: Call) -> str:
    """A call in one line, as `parse_tool_calls` reads it."""
    arguments = "".join(f"<parameter={key}>{value}</parameter>" for key, value in call["arguments"].items())
    return f"<tool_call><function={call['name']}>{arguments}</function></tool_call>"


def space_size(difficulty: WorkplaceDifficulty) -> int:
    """Number of different canonical tasks, exact: with an id alone, and with an id and a name."""
    values = [
        1 + (len(kind.update[2]) if kind.update else 0) for kind in (_KINDS[name] for name in set(difficulty.kinds))
    ]
    names = (difficulty.lookup_share < 1) + (difficulty.lookup_share > 0) * len(word_list(WORDS_PER_CATEGORY))
    return sum(values) * NUM_IDS * names


def tools(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Definitions of the tools in the prompt."""
    return [tool_definition(name, spec["optional_parameters"]) for name in spec["tools"]]


@lru_cache(maxsize=1024)
def _tables(seed: int, rows: int) -> Tables:
    return draw_tables(seed, rows)


def open_workplace(spec: dict[str, Any]) -> Workplace:
    """The databases of a task as they are before the first call."""
    return Workplace(_tables(spec["seed"], spec["rows"]))


def verify_calls(spec: dict[str, Any], calls: list[Call]) -> Verdict:
    """Right if `calls` and those of the task lead to the same state, each run in a workplace of its own."""
    predicted, truth = open_workplace(spec), open_workplace(spec)
    for call in calls:
        predicted.call(call["name"], call["arguments"], tuple(spec["tools"]))
    for call in spec["calls"]:
        result = truth.call(call["name"], call["arguments"])
        if result.startswith("Error:"):
            raise ValueError(f"a right call fails: {result}")
    return right() if predicted.state() == truth.state() else wrong("the databases are in another state")


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """`verify_calls` of all calls in one text, as if the model had made them without seeing a result."""
    return verify_calls(spec, parse_tool_calls(answer, tools(spec))[1])


def demonstration(task: Task, thinking: bool) -> list[dict[str, Any]]:
    """What follows the request where it is carried out: calls, their results, and an answer without a call."""
    workplace = open_workplace(task.spec)
    _, calls = parse_tool_calls(task.solution.answer, tools(task.spec))
    thoughts = task.solution.reasoning.split(BETWEEN_TURNS) if thinking else None
    return turns(calls, lambda call: workplace.call(call["name"], call["arguments"]), FINAL_ANSWER, thoughts)


class WorkplaceEpisode:
    """An `Episode`: a response with calls is answered by their results, one without ends it."""

    has_turns = True

    def __init__(self, task: Task, thinking: bool | None) -> None:
        self.spec, self.thinking = task.spec, thinking
        self.tools = tools(task.spec)
        self.workplace = open_workplace(task.spec)
        self.calls: list[Call] = []

    def respond(self, response: str) -> list[dict[str, Any]] | None:
        """The results of the calls in a response, in order; None where it has none."""
        _, calls = parse_tool_calls(answer_of(response, self.thinking), self.tools)
        self.calls += calls
        offered = tuple(self.spec["tools"])
        results = [self.workplace.call(call["name"], call["arguments"], offered) for call in calls]
        return [{"role": "tool", "content": result} for result in results] or None

    def verdict(self) -> Verdict:
        """By the state in which all calls so far have left the databases."""
        return verify_calls(self.spec, self.calls)
