# /// script
# [tool.runspec]
# docs = "Verifiable tasks as prompts for reinforcement learning"
# name = "nano3/data/prep/rl"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# schema = "data_schema.py:RLDataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 2: verifiable tasks -> prompts as JSONL, all environment families in one file.

    nemotron nano3 data prep rl -c tiny
    python data_prep.py --config tiny 'sources=[{name: mine, paths: [tasks.jsonl]}]'

One line a prompt: `messages` up to where the model answers, and `task`, the record that its answer is verified against.
No task occurs twice, and none of the evaluation split occurs at all. A record of your own is such a task, or a question
with its answer (`match` says how a response is held against it), or a record as published for NeMo Gym, of an
environment that is here; it must pass its own check, and is dropped where its prompt is that of an evaluation task.
An environment of your own (docs/guides/environments.md) gives tasks as the families here do:

    python data_prep.py --config tiny 'environments={halves: halves.py:Halves}'

Simplified against the paper (tech report 3.2): generated families instead of its collections of math, code,
science, instruction, long-context and tool-use prompts. Pass rates, which its curriculum goes by, need a model:
data_prep_curriculum.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.data_prep.chat.conversations import ConversationTable
from nemotron.data_prep.rl.gym_records import agent_of, problem_of, server_of
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.sources.files import RECORD_FORMATS, SourceFile, redact
from nemotron.data_prep.sources.locations import check_not_empty, lineage_sources, list_files
from nemotron.data_prep.sources.questions import read_questions
from nemotron.data_prep.sources.reader import read_piece, where, whole
from nemotron.data_prep.sources.reading import BEYOND_SCALE, EMPTY, Reading, ReadReport, check_kept, check_scale
from nemotron.data_prep.work.engines import Engine, open_engine
from nemotron.data_prep.work.progress import Progress
from nemotron.kit import RLPrompts, Source, apply_scale, open_run, print_complete, share_of
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.schemas.difficulty import Difficulty
from nemotron.stack.environments import (
    FAMILIES,
    Environment,
    Split,
    Task,
    evaluation_prompts,
    from_gym,
    iter_tasks,
    load_environments,
    make_difficulty,
    own,
    prompt_messages,
    prompt_tools,
    runs_programs,
    split_of,
    verify,
)
from nemotron.stack.environments.gym import is_published
from nemotron.stack.environments.questions import PREFIX as QUESTIONS
from nemotron.stack.environments.questions import make_task, match_of
from nemotron.stack.environments.sandbox import check_sandbox

READ, KEPT = "read", "kept"
EVALUATION_SPLIT, EVALUATION_PROMPT = "belongs to the evaluation split", "equals evaluation prompt"
DUPLICATE, NOT_READ = "exact duplicate", "not read: "
TASK_FIELDS = ("family", "prompt", "canonical", "spec", "solution")
_REMEDIES = {
    EVALUATION_SPLIT: "a tenth of all tasks, by the hash of `canonical`, is for evaluation and never trained on",
    EVALUATION_PROMPT: "what evaluation asks is never trained on, evaluation_tasks of each family",
    DUPLICATE: "tasks of one `canonical` are one task: give different tasks different ones",
}

if TYPE_CHECKING:
    from nemotron.kit.schemas.questions import QuestionsConfig
    from nemotron.recipes.nano3.stage2_rl.data_schema import RLDataConfig, SourceConfig


def main() -> None:
    """Prepare the data and publish it."""
    cfg: RLDataConfig = load_script_config(__file__)
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}
    scale = cfg.scale_all or cfg.scale
    per_family: dict[Split, int] = {
        "train": apply_scale(cfg.tasks.num_tasks, scale),
        "valid": apply_scale(cfg.tasks.num_valid_tasks, scale),
    }
    files = {source.name: list_files(source.paths, RECORD_FORMATS, on_error=source.on_error) for source in cfg.sources}
    for name, listed in files.items():
        check_not_empty(name, listed)
    reports = {name: ReadReport() for name in files}
    environments = load_environments(cfg.environments)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        table = ConversationTable(unit="tasks")

        # --- Tasks: a family that has fewer different ones than asked for gives all it has --------------------------
        with run.phase("collect"):
            tasks: dict[str, dict[str, Task]] = {"train": {}, "valid": {}}
            # What comes from outside may carry a canonical form that says nothing: its prompt is compared too.
            protected = evaluation_prompts(cfg.evaluation_tasks, difficulties) if cfg.sources or environments else []
            questions = {_spoken(question) for question in _evaluation_questions(cfg)}
            evaluated = questions | {_spoken(prompt) for prompt in protected}
            generated = hashlib.sha256()
            of_environments = {name: hashlib.sha256() for name in environments}
            candidates = chain(
                # Yours first: a file that cannot be read stops the run at once, and of equal tasks yours stays.
                _own_tasks(cfg, files, reports, table),
                _environment_tasks(cfg, environments, per_family),
                _generated_tasks(cfg, per_family, difficulties, engine),
            )
            for name, split, task in candidates:
                table.count(name, READ)
                if name in cfg.tasks.families:
                    generated.update(f"{task.prompt}\0{task.canonical}\0".encode())
                if name in environments:
                    of_environments[name].update(f"{task.prompt}\0{json.dumps(task.spec)}\0".encode())
                if split == "eval":
                    table.count(name, EVALUATION_SPLIT)
                elif _spoken(task.prompt) in (questions if name in cfg.tasks.families else evaluated):
                    table.count(name, EVALUATION_PROMPT)
                elif task.canonical in tasks[split]:
                    table.count(name, DUPLICATE)
                else:
                    table.count(name, KEPT)
                    tasks[split][task.canonical] = _with_effort(cfg, task) if split == "train" else task
            for name, report in reports.items():
                for reason, count in report.skipped.items():
                    table.count(name, f"{NOT_READ}{reason}", count)
        print(table, file=sys.stderr)
        for name, report in reports.items():
            beyond = report.skipped.get(BEYOND_SCALE, 0)
            records = report.records + sum(report.skipped.values()) - report.skipped.get(EMPTY, 0)
            check_scale(name, cfg.scale_all, records=records, beyond=beyond)
            _check_own(name, table.counts[name], reports[name])
        for name in environments:
            if table.counts[name].get(KEPT, 0) < sum(per_family.values()):  # else what it says twice is no loss
                _check_own(name, table.counts[name], ReadReport())
        if not tasks["train"]:
            raise UserError("no training prompt is left", "the table above says what was dropped and why")

        # --- Write in an order that mixes the families and does not depend on that of the sources -------------------
        with run.phase("write"):
            for part, chosen in tasks.items():
                ordered = sorted(chosen.values(), key=lambda task: stable_hash("rl", str(cfg.seed), task.canonical))
                write_jsonl(
                    run.output_dir / f"{part}.jsonl",
                    map(_prompt_record, ordered),
                )

        # --- Publish ------------------------------------------------------------------------------------------------
        dataset = RLPrompts(
            path=run.output_dir,
            num_examples=len(tasks["train"]),
            train_path=run.output_dir / "train.jsonl",
            valid_path=run.output_dir / "valid.jsonl" if tasks["valid"] else None,
            families=sorted({task.family for task in tasks["train"].values()}),
            metrics={
                "curation": table.rows(),
                "not_read_samples": {name: report.samples for name, report in reports.items() if report.samples},
            },
            sources=[
                Source(
                    name="task-generators",
                    sha256=generated.hexdigest(),
                    detail=f"families: {', '.join(cfg.tasks.families) or 'none'}; seed {cfg.tasks.seed}",
                ),
                *(file for name, listed in files.items() for file in lineage_sources(listed, f"source {name}")),
                *(
                    Source(name=f"environment {name}", sha256=digest.hexdigest(), detail=cfg.environments[name])
                    for name, digest in of_environments.items()
                ),
            ],
        )
        dataset.save(move=True)
        prompts = counted(len(tasks["train"]), "prompt")
        print(f"{dataset.ref}: {prompts}, {len(tasks['valid']):,} for validation", file=sys.stderr)
        if yours := [name for name in dataset.families if name.startswith(QUESTIONS) or name in environments]:
            words = [f"'env.families={{{', '.join(f'{family}: 1' for family in yours)}}}'"]
            if environments:
                code = ", ".join(f"{name}: {reference}" for name, reference in cfg.environments.items())
                words.append(f"'env.environments={{{code}}}'")
            print(f"nemotron nano3 rl draws of them with {' '.join(words)}", file=sys.stderr)
        print_complete({"data": dataset})


def _evaluation_questions(cfg: RLDataConfig) -> list[str]:
    """The questions of `cfg.questions`, and the prompts of those that are asked with choices."""

    def texts(source: QuestionsConfig, row: dict[str, Any]) -> list[str]:
        is_choice = match_of(row, source.match) == "choice"
        return [row["question"], *([make_task(source.name, row, source.match).prompt] if is_choice else [])]

    return list(chain.from_iterable(read_questions(cfg.questions, texts)))


def _generated_tasks(
    cfg: RLDataConfig, per_family: dict[Split, int], difficulties: dict[str, Difficulty], engine: Engine
) -> Iterator[tuple[str, Split, Task]]:
    """(family, split, task) of the generators' tasks."""
    orders = [(family, split, count) for family in cfg.tasks.families for split, count in per_family.items()]
    streams = engine.map_ordered(_generate, orders, (cfg.tasks.seed, difficulties))
    for (family, split, _), tasks in zip(orders, streams, strict=True):
        yield from ((family, split, task) for task in tasks)


def _own_tasks(
    cfg: RLDataConfig, files: dict[str, list[SourceFile]], reports: dict[str, ReadReport], table: ConversationTable
) -> Iterator[tuple[str, Split, Task]]:
    """(source, split, task) of the user's tasks; their split goes by the hash of the task, too."""
    for source in cfg.sources:
        columns = {name: source.columns.get(name, name) for name in source.fields} if source.columns else {}
        share = share_of(cfg.scale_all)
        reading = Reading(source.on_error, columns=columns, required=(), share=share, seed=cfg.seed)
        tasks = _read_tasks(source, files[source.name], reading, reports[source.name])
        with Progress(f"read {source.name}", unit="task") as progress:
            for task in table.first(source.name, tasks, source.max_tasks, "max_tasks"):
                progress.add(rows=1)
                yield task
        if not reports[source.name].records and not reports[source.name].skipped:
            raise UserError(f"source {source.name!r} is empty: no task in {', '.join(map(redact, source.paths))}")


def _environment_tasks(
    cfg: RLDataConfig, environments: Mapping[str, Environment], per_family: Mapping[Split, int]
) -> Iterator[tuple[str, Split, Task]]:
    """(environment, split, task) of the user's environments, until there are as many different ones as of a family, or
    of endless ones until a long run without one that is missing."""
    for name, environment in environments.items():
        missing, fruitless = dict(per_family), 0
        seen: dict[str, Split] = {}
        for task in own.read_tasks(name, environment):
            split = split_of(task.canonical)
            is_missing = task.canonical not in seen and missing.get(split, 0) > 0
            seen.setdefault(task.canonical, split)
            fruitless = 0 if is_missing else fruitless + 1
            if missing.get(split, 1) > 0:
                yield name, split, task
            if is_missing:
                missing[split] -= 1
            if not any(missing.values()) or fruitless == own.MAX_FRUITLESS:
                break
        if not seen:
            raise UserError(f"environment {name} gave no task", f"tasks() of {cfg.environments[name]} is empty")
        if missing["train"] == per_family["train"]:
            fell = ", ".join(f"{split} {count:,}" for split, count in Counter(seen.values()).items())
            raise UserError(
                f"environment {name} gave no task to train on",
                f"its {counted(len(seen), 'different task')}, by the hash of their prompts: {fell}",
            )


def _check_own(name: str, outcomes: Mapping[str, int], report: ReadReport) -> None:
    """UserError if no task of a source of the user's is left."""
    unread = {reason: count for reason, count in report.skipped.items() if reason != BEYOND_SCALE}
    reasons = {outcome: count for outcome, count in outcomes.items() if outcome in _REMEDIES}
    reasons |= {f"{NOT_READ}{reason}": count for reason, count in unread.items()}
    read = outcomes.get(READ, 0) + sum(unread.values())
    examples = {f"{NOT_READ}{reason}": report.samples_of(reason)[0] for reason in unread}
    remedies = _REMEDIES | {outcome: f"{each['where']}: {each['reason']}" for outcome, each in examples.items()}
    check_kept(name, read=read, kept=outcomes.get(KEPT, 0), dropped=reasons, remedies=remedies)


def _read_tasks(
    source: SourceConfig, files: list[SourceFile], reading: Reading, report: ReadReport
) -> Iterator[tuple[str, Split, Task]]:
    """(source, split, task) of the records of one source; `report` counts what is skipped."""
    for piece in map(whole, files):
        for row in read_piece(piece, reading, report):
            place = where(piece, row.index)
            try:
                # A line of this preparation's own train.jsonl holds its record under `task`; elsewhere it is a name.
                nested = row.value.get("task")
                record = nested if isinstance(nested, dict) else row.value
                of_gym = "responses_create_params" in record
                task = _published_task(place, record) if of_gym else _own_task(place, record, source)
            except UserError as error:
                if source.on_error == "stop":
                    raise
                report.records -= 1
                report.skip("not a valid task", place, error.message.removeprefix(f"{place}: "))
                continue
            split = split_of(task.canonical)
            # The third split is what the generators' evaluation asks; of questions and published records it asks none.
            is_asked = not task.family.startswith(QUESTIONS) and not is_published(task.canonical)
            yield source.name, "train" if split == "eval" and not is_asked else split, task


def _with_effort(cfg: RLDataConfig, task: Task) -> Task:
    """The task; for a share of those of some families, by hash, one whose user asks for little reasoning."""
    effort = cfg.tasks.low_effort
    if task.family not in effort.families or task.messages is not None:
        return task
    asks = stable_hash("low_effort", str(cfg.seed), task.canonical) < effort.share * 2**64
    return replace(task, prompt=f"{task.prompt}\n\n{effort.text}") if asks else task


def _generate(order: tuple[str, Split, int], shared: tuple[int, dict[str, Difficulty]]) -> list[Task]:
    """A task of the engine: the first `count` different tasks of a family and split, or as many as there are."""
    (family, split, count), (seed, difficulties) = order, shared
    return list(islice(iter_tasks(family, split, seed, difficulties[family], distinct=True), count))


def _published_task(place: str, row: Mapping[str, Any]) -> Task:
    """A record of NeMo Gym as a task; UserError with its place where its environment is not here or it is broken."""
    problem, server = problem_of(row), server_of(agent_of(row) or "")
    if problem is not None:
        raise UserError(f"{place}: {': '.join(problem)}")
    if server is None:
        raise UserError(f"{place}: no environment here for the agent {agent_of(row)!r}")
    try:
        return from_gym(server, row)
    except UserError as error:
        raise UserError(f"{place}: {server}: {error.message}", error.hint) from error


def _own_task(place: str, row: Any, source: SourceConfig) -> Task:
    """A user's record as a task; UserError with file and line unless its own solution passes its own check."""
    if isinstance(row, dict) and row.get("question") is not None and "family" not in row:
        try:
            return make_task(source.name, row, source.match)
        except UserError as error:
            raise UserError(f"{place}: {error.message}", error.hint) from error
    if isinstance(row, dict) and (missing := [name for name in TASK_FIELDS if name not in row]):
        raise UserError(
            f"{place}: not a task record: {', '.join(missing)} missing; fields there: {', '.join(row)}",
            "questions with an answer are tasks, too: `columns: {question: FIELD, answer: FIELD}` in the source",
        )
    try:
        # Where columns rename, `{prompt: question}` reads one field under both names.
        named = {name: row[name] for name in (*TASK_FIELDS, "messages") if row.get(name) is not None}
        task = Task.from_dict(named if source.columns else row)
        if task.family.startswith(QUESTIONS):  # whose answer may be a pattern, which does not match itself
            return task
        make_difficulty(task.family)  # knows the families
        if is_published(task.canonical) and not task.solution.answer:  # of contests only the tests are published
            return task
        if runs_programs([task.family]):
            check_sandbox("bubblewrap")
    except UserError as error:
        raise UserError(f"{place}: {error.message}", error.hint) from error
    verdict = verify(task, task.solution.answer, thinking=False)
    # A published record shows no right answer to hold against it.
    is_shown = not is_published(task.canonical) or task.solution.answer
    if verdict.status == "error" or (is_shown and verdict.score != 1.0):
        fault = "cannot be verified" if verdict.status == "error" else "is wrong under its own spec"
        raise UserError(
            f"{place}: solution.answer {fault}: {verdict.reason}",
            f"spec must be what family {task.family} verifies; compare train.jsonl of generated tasks",
        )
    return task


def _prompt_record(task: Task) -> dict[str, Any]:
    """A line of the prompt files; it has `tools` where the prompt declares some."""
    tools = {"tools": declared} if (declared := prompt_tools(task)) else {}
    return {"messages": prompt_messages(task), **tools, "task": task.to_dict()}


def _spoken(prompt: str) -> str:
    """A prompt without differences of case and spacing."""
    return " ".join(prompt.casefold().split())


if __name__ == "__main__":
    run_data_script(main)
