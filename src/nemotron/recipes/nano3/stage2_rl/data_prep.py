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
# default = "tiny"
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
No task occurs twice, and none of the evaluation split occurs at all. A record of your own must pass its own check, and
is dropped where its prompt is that of an evaluation task.

Simplified against the paper (tech report 3.2): four generated families instead of its collections of math, code,
science, instruction, long-context and tool-use prompts. The curriculum by pass rate needs the model, so it belongs to
the training script.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.conversations import ConversationTable
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import lineage_sources, list_files
from nemotron.data_prep.sources.reader import read_piece, row_id, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.work.engines import Engine, open_engine
from nemotron.data_prep.work.jsonl import write_jsonl
from nemotron.kit import RLPrompts, Source, apply_scale, open_run, print_complete
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.difficulty import Difficulty
from nemotron.stack.environments import (
    FAMILIES,
    Split,
    Task,
    evaluation_prompts,
    iter_tasks,
    make_difficulty,
    prompt_messages,
    split_of,
    verify,
)

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.data_schema import RLDataConfig, SourceConfig


def main() -> None:
    """Prepare the data and publish it."""
    cfg: RLDataConfig = load_script_config(__file__)
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}
    per_family: dict[Split, int] = {
        "train": apply_scale(cfg.tasks.num_tasks, cfg.scale),
        "valid": apply_scale(cfg.tasks.num_valid_tasks, cfg.scale),
    }
    files = {source.name: list_files(source.paths, ("jsonl", "parquet", "arrow")) for source in cfg.sources}
    reports = {name: ReadReport() for name in files}

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        table = ConversationTable()

        # --- Tasks: a family that has fewer different ones than asked for gives all it has --------------------------
        with run.phase("collect"):
            tasks: dict[str, dict[str, Task]] = {"train": {}, "valid": {}}
            # What comes from outside may carry a canonical form that says nothing: its prompt is compared too.
            protected = evaluation_prompts(cfg.evaluation_tasks, difficulties) if cfg.sources else []
            evaluated = {_spoken(prompt) for prompt in protected}
            generated = hashlib.sha256()
            candidates = chain(
                _generated_tasks(cfg, per_family, difficulties, engine), _own_tasks(cfg, files, reports, table)
            )
            for name, split, task in candidates:
                table.count(name, "read")
                if name in cfg.tasks.families:
                    generated.update(f"{task.prompt}\0{task.canonical}\0".encode())
                if split == "eval":
                    table.count(name, "belongs to the evaluation split")
                elif _spoken(task.prompt) in evaluated:
                    table.count(name, "equals evaluation prompt")
                elif task.canonical in tasks[split]:
                    table.count(name, "exact duplicate")
                else:
                    table.count(name, "kept")
                    tasks[split][task.canonical] = task
            for name, report in reports.items():
                for reason, count in report.skipped.items():
                    table.count(name, f"not read: {reason}", count)
        print(table, file=sys.stderr)
        if not tasks["train"]:
            raise UserError("no training prompt is left", "the table above says what was dropped and why")

        # --- Write in an order that mixes the families and does not depend on that of the sources -------------------
        with run.phase("write"):
            for part, chosen in tasks.items():
                ordered = sorted(chosen.values(), key=lambda task: stable_hash("rl", str(cfg.seed), task.canonical))
                write_jsonl(
                    run.output_dir / f"{part}.jsonl",
                    ({"messages": prompt_messages(task), "task": task.to_dict()} for task in ordered),
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
            ],
        )
        dataset.save(move=True)
        print(f"{dataset.ref}: {len(tasks['train'])} prompts, {len(tasks['valid'])} for validation", file=sys.stderr)
        print_complete({"data": dataset})


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
        tasks = _read_tasks(source, files[source.name], reports[source.name])
        yield from table.first(source.name, tasks, source.max_tasks, "max_tasks")
        if reports[source.name].records == 0:
            raise UserError(f"source {source.name!r} is empty: no task in {', '.join(source.paths)}")


def _read_tasks(source: SourceConfig, files: list[SourceFile], report: ReadReport) -> Iterator[tuple[str, Split, Task]]:
    """(source, split, task) of the records of one source; `report` counts what is skipped."""
    columns = {name: source.columns.get(name, name) for name in source.fields} if source.columns else {}
    reading = Reading(source.on_error, columns=columns, required=())
    for piece in map(whole, files):
        for row in read_piece(piece, reading, report):
            try:
                task = _own_task(row_id(piece, row.index), row.value)
            except UserError as error:
                if source.on_error == "stop":
                    raise
                report.records -= 1
                report.skip("not a valid task", row_id(piece, row.index), error.message)
                continue
            yield source.name, split_of(task.canonical), task


def _generate(order: tuple[str, Split, int], shared: tuple[int, dict[str, Difficulty]]) -> list[Task]:
    """A task of the engine: the first `count` different tasks of a family and split, or as many as there are."""
    (family, split, count), (seed, difficulties) = order, shared
    return list(islice(iter_tasks(family, split, seed, difficulties[family], distinct=True), count))


def _own_task(place: str, row: dict[str, Any]) -> Task:
    """A user's record as a task; UserError with file and line unless its own solution passes its own check."""
    try:
        task = Task.from_dict(row)
        make_difficulty(task.family)  # knows the families
    except UserError as error:
        raise UserError(f"{place}: {error.message}", error.hint) from error
    verdict = verify(task, task.solution.answer, thinking=False)
    if verdict.status != "score":
        fault = "is wrong under its own spec" if verdict.status == "wrong" else "cannot be verified"
        raise UserError(
            f"{place}: solution.answer {fault}: {verdict.reason}",
            f"spec must be what family {task.family} verifies; compare train.jsonl of generated tasks",
        )
    return task


def _spoken(prompt: str) -> str:
    """A prompt without differences of case and spacing."""
    return " ".join(prompt.casefold().split())


if __name__ == "__main__":
    run_data_script(main)
