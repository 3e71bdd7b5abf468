"""All task families: generate, verify and count tasks, and turn them into conversations or plain text."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import xxhash
from pydantic import ValidationError

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.schemas.difficulty import (
    CodeGenerationDifficulty,
    Difficulty,
    InstructionFollowingDifficulty,
    MathDifficulty,
    MultipleChoiceDifficulty,
    RepairDifficulty,
    StructuredOutputDifficulty,
    ToolComparisonDifficulty,
    WorkplaceDifficulty,
)
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import (
    calculator,
    code_generation,
    instruction_following,
    math,
    multiple_choice,
    own,
    questions,
    repository_repair,
    structured_output,
    tool_comparison,
    workplace_assistant,
)
from nemotron.stack.environments.sandbox import program_slots, sandbox_failure
from nemotron.stack.environments.task import SPLITS, Split, Task, Verdict, answer_of, error, split_of

FAMILIES = (
    math.FAMILY,
    multiple_choice.FAMILY,
    instruction_following.FAMILY,
    structured_output.FAMILY,
    code_generation.FAMILY,
    workplace_assistant.FAMILY,
    tool_comparison.FAMILY,
    repository_repair.FAMILY,
)
# Families whose verdicts run a program that a model wrote.
SANDBOXED = (code_generation.FAMILY, repository_repair.FAMILY)
Name = TypeVar("Name", bound=str)
# A split that yields no new task in this many draws one after the other is exhausted.
_MAX_FRUITLESS_DRAWS = 20_000


def _family(family: str) -> tuple[ModuleType, type[Difficulty]]:
    """The module of a family and its difficulty class; an unknown family raises UserError."""
    match family:
        case math.FAMILY:
            return math, MathDifficulty
        case multiple_choice.FAMILY:
            return multiple_choice, MultipleChoiceDifficulty
        case instruction_following.FAMILY:
            return instruction_following, InstructionFollowingDifficulty
        case structured_output.FAMILY:
            return structured_output, StructuredOutputDifficulty
        case code_generation.FAMILY:
            return code_generation, CodeGenerationDifficulty
        case workplace_assistant.FAMILY:
            return workplace_assistant, WorkplaceDifficulty
        case tool_comparison.FAMILY:
            return tool_comparison, ToolComparisonDifficulty
        case repository_repair.FAMILY:
            return repository_repair, RepairDifficulty
    raise UserError(f"unknown task family '{family}'", did_you_mean(family, FAMILIES))


def make_difficulty(family: str, difficulty: Mapping[str, Any] | Difficulty | None = None) -> Difficulty:
    """The difficulty of a family from its fields, as a config gives them; fields left out keep their defaults.

    An unknown family, an unknown field or a value out of range raises UserError.
    """
    _, difficulty_type = _family(family)
    if isinstance(difficulty, difficulty_type):
        return difficulty
    if not isinstance(difficulty, Mapping | None):
        raise UserError(f"{family}: the difficulty must be a mapping, not {type(difficulty).__name__}")
    try:
        # By way of JSON, as configs are checked: strict about types, and a list is good for a tuple.
        return difficulty_type.model_validate_json(json.dumps(dict(difficulty or {})), strict=True)
    except ValidationError as failure:
        fault = failure.errors(include_url=False)[0]
    reason = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        raise UserError(f"{family}: {reason}")
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        raise UserError(f"{family}: unknown difficulty '{name}'", did_you_mean(name, difficulty_type.model_fields))
    raise UserError(f"{family}: difficulty {name} = {fault['input']!r}: {reason}")


def iter_tasks(
    family: str,
    split: Split,
    seed: int,
    difficulty: Mapping[str, Any] | Difficulty | None = None,
    *,
    distinct: bool = False,
) -> Iterator[Task]:
    """Tasks of one split without end, the same ones for the same arguments in every process.

    Args:
        distinct: never yield a canonical task twice; ends when a long run of draws finds no new one.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'", did_you_mean(str(split), SPLITS))
    module, _ = _family(family)
    settings = make_difficulty(family, difficulty)
    # A string seed goes through sha512, which, unlike hash(), is the same in every process.
    draws = random.Random(f"{family}/{split}/{seed}")
    style = random.Random()
    seen: set[str] = set()
    index = fruitless = 0
    while not distinct or fruitless < _MAX_FRUITLESS_DRAWS:
        problem = module.draw(draws, settings)
        canonical = problem.canonical
        if split_of(canonical) != split or canonical in seen:
            fruitless += 1
            continue
        fruitless = 0
        if distinct:
            seen.add(canonical)
        # Wording and demonstration have a seed of their own per task, so that they do not depend on the draws before.
        style.seed(xxhash.xxh64_intdigest(f"{seed}/{index}/{canonical}".encode()))
        index += 1
        yield module.build(problem, settings, style)


def generate_tasks(
    family: str,
    split: Split,
    n: int,
    seed: int = 0,
    difficulty: Mapping[str, Any] | Difficulty | None = None,
    *,
    distinct: bool | None = None,
) -> list[Task]:
    """The first `n` tasks of a split, deterministic in all arguments; a longer list begins with the shorter one.

    Args:
        difficulty: fields of the family's difficulty class; those left out keep their defaults.
        distinct: never the same canonical task twice; by default on for `valid` and `eval`, off for `train`, whose
            tasks are drawn with replacement as a stream of practice would be.

    Raises:
        UserError: unknown family, split or difficulty, or fewer than `n` distinct tasks found.
    """
    unique = split != "train" if distinct is None else distinct
    stream = iter_tasks(family, split, seed, difficulty, distinct=unique)
    tasks = list(islice(stream, n))
    if len(tasks) < n:
        raise UserError(
            f"{family}: only {len(tasks)} distinct tasks in split '{split}', {n} were asked for",
            "ask for fewer, or widen the difficulty",
        )
    return tasks


def evaluation_prompts(
    per_family: int, difficulties: Mapping[str, Mapping[str, Any] | Difficulty | None] | None = None
) -> list[str]:
    """Prompts of the first `per_family` evaluation tasks (seed 0) of every family: what no training text may contain.

    All of them for a family that has fewer.
    """
    chosen = difficulties or {}
    return [
        task.prompt
        for family in FAMILIES
        for task in islice(iter_tasks(family, "eval", 0, chosen.get(family), distinct=True), per_family)
    ]


def verifiable_families(
    families: Iterable[Name], sandbox: Sandbox = "bubblewrap", failure: str | None = None
) -> list[Name]:
    """Those of `families` whose answers can be verified: those of `SANDBOXED` are left out where no sandbox starts.

    A line on stderr says so. UserError where no family remains. `failure`: the `sandbox_failure` to go by, of several
    machines for instance; by default that of this one.
    """
    asked = list(families)
    if not runs_programs(asked):
        return asked
    if failure is None:
        failure = sandbox_failure(sandbox)
    if not failure:
        return asked
    remaining = [family for family in asked if family not in SANDBOXED]
    if not remaining:
        raise UserError(*failure.split("\n", 1))
    left_out = [family for family in asked if family in SANDBOXED]
    verb = "is" if len(left_out) == 1 else "are"
    _note_once(f"{' and '.join(left_out)} {verb} left out: {'; '.join(failure.splitlines())}")
    return remaining


def runs_programs(families: Iterable[str]) -> bool:
    """Whether verdicts on tasks of these families take a sandbox."""
    return any(family in SANDBOXED for family in families)


@functools.cache
def _note_once(line: str) -> None:
    """Print a line to stderr, once a process; of those under torchrun only the first prints."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def verify(task: Task, response: str, thinking: bool | None = None, sandbox: Sandbox = "bubblewrap") -> Verdict:
    """Check a generated response against its task.

    Args:
        response: what the model wrote after the generation prompt, reasoning included (see `answer_of`).
        thinking: whether the generation prompt opened `<think>`; then a response that never closes it is wrong.
        sandbox: where a program is run, if the response is one.

    Returns:
        right, wrong, or `error` where the check itself failed (a broken task record); never raises for either.
    """
    try:
        if task.environment is not None:
            return own.verify_answer(task.environment, task.spec, answer_of(response, thinking))
        if task.family.startswith(questions.PREFIX):
            return questions.verify_answer(task.spec, answer_of(response, thinking))
        if task.family == code_generation.FAMILY:
            return code_generation.verify_answer(task.spec, answer_of(response, thinking), sandbox)
        if task.family == repository_repair.FAMILY:
            return repository_repair.verify_answer(task.spec, answer_of(response, thinking), sandbox)
        module, _ = _family(task.family)
        verdict: Verdict = module.verify_answer(task.spec, answer_of(response, thinking))
        return verdict
    except Exception as failure:
        return error(f"{type(failure).__name__}: {failure}")


def from_gym(server: str, record: Mapping[str, Any]) -> Task:
    """The task of a record that is published for a resources server of NeMo Gym.

    UserError: no family here does what that server does, or the record cannot be verified.
    """
    match server:
        case "math_with_judge":
            return math.from_gym(record)
        case "mcqa":
            return multiple_choice.from_gym(record)
        case "instruction_following":
            return instruction_following.from_gym(record)
        case "structured_outputs":
            return structured_output.from_gym(record)
        case "code_gen":
            return code_generation.from_gym(record)
        case tool_comparison.ARGUMENTS | tool_comparison.SWE_PIVOT:
            return tool_comparison.from_gym(server, record)
    raise UserError(f"no environment here for records of the resources server '{server}'")


def verify_all(
    tasks: Sequence[Task],
    responses: Sequence[str],
    thinking: bool | None = None,
    sandbox: Sandbox = "bubblewrap",
) -> list[Verdict]:
    """`verify` of each task with its response, in their order; programs run side by side, one a processor,
    and equal programs for one task once, whatever was reasoned before them."""
    pairs = list(zip(tasks, responses, strict=True))
    if not runs_programs(task.family for task in tasks):
        return [verify(task, response, thinking) for task, response in pairs]
    programs = [  # many samples of a prompt are equal: each is run once
        (id(task), answer_of(response, thinking)) if task.family in SANDBOXED else None for task, response in pairs
    ]
    with ThreadPoolExecutor(program_slots()) as pool:
        runs: dict[tuple[int, str], Future[Verdict]] = {}
        for (task, response), program in zip(pairs, programs, strict=True):
            if program and program not in runs:
                runs[program] = pool.submit(verify, task, response, thinking, sandbox)
        return [
            runs[program].result() if program else verify(task, response, thinking)
            for (task, response), program in zip(pairs, programs, strict=True)
        ]


def task_space_size(family: str, difficulty: Mapping[str, Any] | Difficulty | None = None) -> int:
    """Exact number of different canonical tasks, over all splits; about 85 % of them belong to `train`."""
    module, _ = _family(family)
    size: int = module.space_size(make_difficulty(family, difficulty))
    return size


def prompt_messages(task: Task) -> list[dict[str, Any]]:
    """The conversation up to where the model is to answer."""
    return list(task.messages) if task.messages else [{"role": "user", "content": task.prompt}]


def prompt_tools(task: Task) -> list[dict[str, Any]]:
    """The tools that the prompt declares, as chat templates take them; empty for a task without."""
    if task.environment is not None:
        return list(task.spec.get("tools", []))
    if task.family == workplace_assistant.FAMILY:
        return workplace_assistant.tools(task.spec)
    if task.family == tool_comparison.FAMILY:
        return list(task.spec["tools"])
    if task.family == repository_repair.FAMILY:
        return repository_repair.tools(task.spec)
    return calculator.tools(task.spec) if task.family == math.FAMILY else []


def to_messages(task: Task, thinking: bool = True) -> list[dict[str, Any]]:
    """The conversation with its demonstration: with the reasoning trace, or (thinking off) the answer only.

    Where the task has tools, the demonstration has several turns, with their calls and the results of those.
    """
    if task.family == workplace_assistant.FAMILY:
        return [*prompt_messages(task), *workplace_assistant.demonstration(task, thinking)]
    if task.family == tool_comparison.FAMILY:
        return [*prompt_messages(task), tool_comparison.demonstration(task, thinking)]
    if task.family == repository_repair.FAMILY:
        return [*prompt_messages(task), *repository_repair.demonstration(task, thinking)]
    if task.family == math.FAMILY and math.CALCULATOR in task.spec.get("tools", ()):
        return [*prompt_messages(task), *calculator.demonstration(task, thinking)]
    answer: dict[str, Any] = {"role": "assistant", "content": task.solution.answer}
    if thinking:
        answer["reasoning_content"] = task.solution.reasoning
    return [*prompt_messages(task), answer]


def plain_prompt(task: Task) -> str:
    """The prompt as plain text for a model that knows no chat template: `plain_text` up to the demonstration.

    A question of the user's own looks as questions do in text from anywhere.
    """
    if task.family.startswith(questions.PREFIX):
        return f"Question: {task.prompt}\nAnswer:"
    return f"{task.prompt}\n"


def plain_text(task: Task) -> str:
    """A task as a document of three lines for pretraining: prompt, reasoning, answer."""
    return f"{plain_prompt(task)}{task.solution.reasoning}\n{task.solution.answer}\n"


def plain_answer(continuation: str, family: str) -> str:
    """The answer in what a model wrote after `plain_prompt`, its stop token aside.

    The second line, after the one of the reasoning, or empty; to a question of the user's own the first one.
    """
    if family.startswith(questions.PREFIX):
        return continuation.strip().split("\n")[0].strip()
    lines = continuation.split("\n")
    return lines[1].strip() if len(lines) > 1 else ""


def read_tasks(directory: Path) -> list[Task]:
    """The training tasks that a data artifact lists, in file order; none where it lists none.

    They stand in `tasks.jsonl` or, for RL prompts, `train.jsonl`: one record a line, `Task.to_dict()` itself or under
    the key `task`. A line that holds no task raises UserError with file and line number, but a file of preference pairs
    is passed over: what tasks they are about stands in `tasks.jsonl`.
    """
    tasks = []
    for path in (directory / "tasks.jsonl", directory / "train.jsonl"):
        if not path.is_file():
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                except ValueError as failure:
                    raise UserError(f"{path}:{number}: not a task record: {failure}") from None
                if isinstance(record, dict) and {"chosen", "rejected"} <= record.keys():
                    break
                try:
                    tasks.append(Task.from_dict(record.get("task", record) if isinstance(record, dict) else record))
                except UserError as failure:
                    raise UserError(f"{path}:{number}: {failure.message}", failure.hint) from None
    return tasks
