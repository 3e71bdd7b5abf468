# /// script
# [tool.runspec]
# docs = "A published blend of RL prompts, its placeholders filled in, as JSONL for NeMo-RL with NeMo Gym"
# name = "nano3/data/prep/rl/blend"
# setup = "nemotron-cookbook[hf]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# schema = "blend_schema.py:BlendConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 2: the published blend of RL prompts -> train.jsonl and valid.jsonl for NeMo-RL with NeMo Gym.

    nemotron nano3 data prep rl -c published
    python data_prep_blend.py --config published on_error=skip valid_rows=0 valid_fraction=0.01
    python data_prep_blend.py --config published 'paths=[tasks.jsonl]' 'references={mine: {location: my-folder}}'

The blend holds records of two collections that are published elsewhere as placeholders; here they get their questions
and answers. Records stay in the blend's order, which is that of its curriculum. What is for validation is trained on
nowhere: a training record with the prompt or the question of a held-out one is left out, and counted.

`data.train.data_path` and `data.validation.data_path` of a NeMo-RL config are the two files of the artifact:
train.jsonl and valid.jsonl. It goes on after a kill, and asks the Hub for nothing twice.

Simplified against the paper (tech report 3.2): the blend is taken as it was published, with its own order; domains are
not mixed anew by pass rate.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.data_prep.rl.gym_records import server_of
from nemotron.data_prep.rl.placeholders import PUBLISHED, Reference
from nemotron.data_prep.rl.steps import (
    KEYS,
    RECORDS,
    FetchCounts,
    FetchWork,
    PromptsJob,
    ReadCounts,
    ResolveWork,
    fetch_shard,
    read_shard,
    resolve_shard,
)
from nemotron.data_prep.sources.documents import split_of
from nemotron.data_prep.sources.files import RECORD_FORMATS
from nemotron.data_prep.sources.locations import lineage_sources, list_files
from nemotron.data_prep.sources.planning import inputs_of
from nemotron.data_prep.sources.reader import pieces_of
from nemotron.data_prep.sources.reading import BEYOND_SCALE, Reading, ReadReport, check_scale
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Receipt, Shard, discard, freeze, run_shards
from nemotron.kit import RLPrompts, open_run, print_complete, share_of
from nemotron.kit.commands import run_data_script
from nemotron.kit.lineage import write_json
from nemotron.kit.tables import aligned

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.blend_schema import BlendConfig

PROMPT_HELD, QUESTION_HELD = "prompt is held out", "question is held out"
OUTCOMES = ("train", "valid", PROMPT_HELD, QUESTION_HELD)


def main() -> None:
    """Prepare the prompts and publish them."""
    cfg: BlendConfig = load_script_config(__file__)
    references = known_references(cfg)
    reading = Reading(cfg.on_error, cfg.max_record_bytes, required=(), share=share_of(cfg.scale_all), seed=cfg.seed)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        work = run.dir / "work"
        job = PromptsJob(references, reading, cfg.check_fields, work / "read", work / "fetched")

        # --- Plan: the blend's files at one commit, cut into pieces; changed inputs are refused ----------------------
        with run.phase("plan"):
            files = list_files(cfg.paths, RECORD_FORMATS)
            pieces = [piece for file in files for piece in pieces_of(file, cfg.shard_bytes)]
            shards = [Shard(f"{i:05d}", piece) for i, piece in enumerate(pieces)]
            read_plan = Plan({"reading": reading, "references": references}, inputs_of(files), shards)
            freeze(read_plan, job.read_dir)
        total_bytes = sum(piece.size for piece in pieces)

        # --- Read: the blend comes here, and with it which rows of other collections it points to --------------------
        with run.phase("read"), Progress("read", total_bytes, "record") as progress:
            read_receipts: list[Receipt[ReadCounts]] = []
            receipts = run_shards(read_plan, job.read_dir, read_shard, job, engine, ReadCounts)
            for piece, (receipt, was_done) in zip(pieces, receipts, strict=True):
                progress.add(rows=receipt.counts.report.records, bytes=piece.size, was_done=was_done)
                read_receipts.append(receipt)
        row_numbers: dict[str, set[int]] = {}
        for receipt in read_receipts:
            for location, numbers in receipt.counts.rows.items():
                row_numbers.setdefault(location, set()).update(numbers)

        # --- Fetch: those rows, each collection once, at one commit --------------------------------------------------
        with run.phase("fetch"):
            collections = {location: list_files([location], RECORD_FORMATS) for location in sorted(row_numbers)}
            fetch_plan = Plan(
                {"locations": sorted(row_numbers)},
                inputs_of(file for listed in collections.values() for file in listed),
                [
                    Shard(f"collection-{i}", FetchWork(listed, sorted(row_numbers[location])))
                    for i, (location, listed) in enumerate(collections.items())
                ],
            )
            freeze(fetch_plan, job.fetched_dir)
            fetches = run_shards(fetch_plan, job.fetched_dir, fetch_shard, job, engine, FetchCounts)
            for location, (fetch, _) in zip(collections, fetches, strict=True):
                rows = f"{fetch.counts.num_present} of the {fetch.counts.num_wanted} rows"
                print(f"{location}: {rows} that are pointed to", file=sys.stderr)

        # --- Resolve: every record whole, and checked for what its environment asks for ------------------------------
        fetched = {location: RECORDS.format(f"collection-{i}") for i, location in enumerate(collections)}
        resolve_plan = Plan(
            {"read": read_plan.digest, "fetched": fetch_plan.digest, "check_fields": cfg.check_fields},
            [],
            [
                Shard(receipt.shard, ResolveWork(piece, receipt.counts.rows, fetched))
                for receipt, piece in zip(read_receipts, pieces, strict=True)
            ],
        )
        resolved_dir = work / "resolved"
        freeze(resolve_plan, resolved_dir)
        with run.phase("resolve"), Progress("resolve", total_bytes, "record") as progress:
            resolve_receipts: list[Receipt[ReadReport]] = []
            results = run_shards(resolve_plan, resolved_dir, resolve_shard, job, engine, ReadReport)
            for piece, (result, was_done) in zip(pieces, results, strict=True):
                progress.add(rows=result.counts.records, bytes=piece.size, was_done=was_done)
                resolve_receipts.append(result)

        # --- Split: the last rows, or a share by hash; what is held out keeps its like out of training ----------------
        report = ReadReport()
        for part in [r.counts.report for r in read_receipts] + [r.counts for r in resolve_receipts]:
            report.add(part)
        report.records = num_records = sum(receipt.counts.records for receipt in resolve_receipts)
        print(f"{report}", file=sys.stderr)
        beyond = report.skipped.get(BEYOND_SCALE, 0)
        check_scale("blend", cfg.scale_all, records=num_records + sum(report.skipped.values()), beyond=beyond)
        if num_records <= cfg.valid_rows:
            raise UserError(f"valid_rows={cfg.valid_rows} leaves nothing to train on: there are {num_records} records")

        def is_valid(index: int, prompt: str) -> bool:
            if cfg.valid_rows:
                return index >= num_records - cfg.valid_rows
            return split_of(prompt, cfg.valid_fraction, cfg.seed) == "valid"

        held_prompts: set[str] = set()
        held_questions: set[str] = set()
        for index, (_, prompt, question) in enumerate(keys_of(resolve_receipts, resolved_dir)):
            if is_valid(index, prompt):
                held_prompts.add(prompt)
                if question is not None:
                    held_questions.add(question)

        # --- Write, in the blend's order -----------------------------------------------------------------------------
        with run.phase("write"):
            shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
            run.output_dir.mkdir()
            outcomes: dict[str, Counter[str]] = {}
            with (
                (run.output_dir / "train.jsonl").open("wb") as train,
                (run.output_dir / "valid.jsonl").open("wb") as valid,
            ):
                lines = zip(
                    keys_of(resolve_receipts, resolved_dir), lines_of(resolve_receipts, resolved_dir), strict=True
                )
                for index, ((agent, prompt, question), line) in enumerate(lines):
                    if is_valid(index, prompt):
                        outcome = "valid"
                        valid.write(line)
                    elif prompt in held_prompts:
                        outcome = PROMPT_HELD
                    elif question in held_questions:
                        outcome = QUESTION_HELD
                    else:
                        outcome = "train"
                        train.write(line)
                    outcomes.setdefault(agent, Counter())[outcome] += 1
        print(table_of(outcomes), file=sys.stderr)
        totals = sum(outcomes.values(), Counter[str]())
        for split in ("train", "valid"):
            if not totals[split]:
                raise UserError(f"no record is left for {split}.jsonl", "the lines above say what was left out and why")
        unchecked = [agent for agent in sorted(outcomes) if not cfg.check_fields or server_of(agent) is None]
        if unchecked:
            print(f"checked for prompt and agent only: {', '.join(unchecked)}", file=sys.stderr)
        environments = {agent: {name: outcomes[agent][name] for name in OUTCOMES} for agent in sorted(outcomes)}
        write_json(run.output_dir / "environments.json", environments)

        # --- Publish -------------------------------------------------------------------------------------------------
        dataset = RLPrompts(
            path=run.output_dir,
            num_examples=totals["train"],
            train_path=run.output_dir / "train.jsonl",
            valid_path=run.output_dir / "valid.jsonl",
            families=[agent for agent in sorted(outcomes) if outcomes[agent]["train"]],
            metrics={
                "records": num_records,
                "environments": environments,
                "unchecked": unchecked,
                "skipped": report.skipped,
                "samples": report.samples,
            },
            sources=[
                *lineage_sources(files, "blend"),
                *(source for location, listed in collections.items() for source in lineage_sources(listed, location)),
            ],
        )
        dataset.save(move=True)
        discard(work)
        prompts = counted(totals["train"], "prompt")
        print(f"{dataset.ref}: {prompts}, {totals['valid']:,} for validation", file=sys.stderr)
        print_complete({"data": dataset})


def known_references(cfg: BlendConfig) -> dict[str, Reference]:
    """What records write in `dataset` -> the collection: the config's, else the published ones."""
    references = dict(PUBLISHED)
    for name, own in cfg.references.items():
        stated = {key: value for key, value in own.model_dump().items() if value is not None}
        references[name] = replace(PUBLISHED.get(name, Reference(own.location)), **stated)
    return references


def keys_of(receipts: Iterable[Receipt[ReadReport]], folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """(agent, key of the prompt, key of the question) of every record, in order."""
    for receipt in receipts:
        with (folder / KEYS.format(receipt.shard)).open(encoding="utf-8") as file:
            for line in file:
                agent, prompt, question = json.loads(line)
                yield agent, prompt, question


def lines_of(receipts: Iterable[Receipt[ReadReport]], folder: Path) -> Iterator[bytes]:
    """Every record as it is written, in order."""
    for receipt in receipts:
        with (folder / RECORDS.format(receipt.shard)).open("rb") as file:
            yield from file


def table_of(outcomes: Mapping[str, Counter[str]]) -> str:
    """For people: records by environment and by what became of them."""
    rows = [["environment", *OUTCOMES]]
    rows += [[agent, *(str(outcomes[agent][name]) for name in OUTCOMES)] for agent in sorted(outcomes)]
    return "\n".join(aligned(rows, "<" + ">" * len(OUTCOMES)))


if __name__ == "__main__":
    run_data_script(main)
