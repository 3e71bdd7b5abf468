# /// script
# [tool.runspec]
# docs = "Preference pairs of your own: a chosen and a rejected answer to the same prompt"
# name = "nano3/data/prep/dpo"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep_dpo"
# schema = "pairs_schema.py:PairsConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 2: preference pairs of your own -> one JSONL in one form, which dpo.py trains on.

    nemotron nano3 data prep dpo -c own 'sources=[pairs.jsonl]'
    python data_prep_pairs.py --config own 'sources=[{name: mine, paths: [pairs.jsonl]}]'

A record is `{"prompt": …, "chosen": …, "rejected": …}`, each text, a message or messages, or both answers as whole
conversations (`kit.chat_records.to_pair`). Beside them `tools` declares functions, and `category` is counted. The
chosen answer is held to the rules of a conversation that is trained on: it calls no tool that is not declared. The
rejected one may.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.data_prep.chat.conversations import Conversation, ConversationTable, ProtectedPrompts
from nemotron.data_prep.sources.documents import split_of, stable_hash
from nemotron.data_prep.sources.files import RECORD_FORMATS, SourceFile, redact
from nemotron.data_prep.sources.locations import check_not_empty, lineage_sources, list_files
from nemotron.data_prep.sources.questions import question_texts
from nemotron.data_prep.sources.reader import read_piece, where, whole
from nemotron.data_prep.sources.reading import BEYOND_SCALE, EMPTY, Reading, ReadReport, check_kept, check_scale
from nemotron.data_prep.work.progress import Progress
from nemotron.kit import Preferences, open_run, print_complete, share_of
from nemotron.kit.chat import UntrainableError, check_conversation, check_messages
from nemotron.kit.chat_records import normalize_tools, to_pair
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.stack.environments import evaluation_prompts

READ, KEPT = "read", "kept"
OVERLAPS, DUPLICATE, NOT_READ = "overlaps evaluation prompt", "exact duplicate", "not read: "

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.pairs_schema import PairsConfig, SourceConfig


def main() -> None:
    """Prepare the data and publish it."""
    cfg: PairsConfig = load_script_config(__file__)
    files = {source.name: list_files(source.paths, RECORD_FORMATS, on_error=source.on_error) for source in cfg.sources}
    for name, listed in files.items():
        check_not_empty(name, listed)
    protected = ProtectedPrompts(evaluation_prompts(cfg.evaluation_tasks) + question_texts(cfg.questions))

    with open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        table = ConversationTable()
        parts: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "valid": {}}

        # --- Pairs in one form, none twice, and none whose prompt is that of an evaluation ----------------------------
        with run.phase("collect"):
            for source in cfg.sources:
                report = ReadReport()
                for pair in _read_pairs(cfg, source, files[source.name], report, table):
                    table.count(source.name, READ)
                    key = json.dumps({**pair, "category": ""}, sort_keys=True, ensure_ascii=False)
                    # Pairs of one prompt are on one side.
                    split = split_of(json.dumps(pair["prompt"]), source.valid_fraction, cfg.seed)
                    if protected.overlap(Conversation(source.name, pair["prompt"], "train")):
                        table.count(source.name, OVERLAPS)
                    elif key in parts[split]:
                        table.count(source.name, DUPLICATE)
                    else:
                        table.count(source.name, KEPT)
                        parts[split][key] = pair
                _check_source(cfg, source, table, report)
        print(table, file=sys.stderr)
        if not parts["train"]:
            raise UserError("no pair to train on is left", "the table above says what was dropped and why")

        # --- Write in an order that mixes the sources -----------------------------------------------------------------
        with run.phase("write"):
            for part, pairs in parts.items():
                ordered = sorted(pairs, key=lambda key: stable_hash("dpo", str(cfg.seed), key))
                write_jsonl(run.output_dir / f"{part}.jsonl", (pairs[key] for key in ordered))

        # --- Publish --------------------------------------------------------------------------------------------------
        categories = Counter(pair.get("category", "") for pair in parts["train"].values())
        dataset = Preferences(
            path=run.output_dir,
            num_examples=len(parts["train"]),
            train_path=run.output_dir / "train.jsonl",
            valid_path=run.output_dir / "valid.jsonl" if parts["valid"] else None,
            metrics={"curation": table.rows(), "categories": dict(sorted(categories.items()))},
            sources=[file for name, listed in files.items() for file in lineage_sources(listed, f"source {name}")],
        )
        dataset.save(move=True)
        published = counted(len(parts["train"]), "pair")
        print(f"{dataset.ref}: {published}, {len(parts['valid']):,} for validation", file=sys.stderr)
        print_complete({"data": dataset})


def _read_pairs(
    cfg: PairsConfig, source: SourceConfig, files: list[SourceFile], report: ReadReport, table: ConversationTable
) -> Iterator[dict[str, Any]]:
    """The pairs of one source in the form that is written; `report` counts what is skipped."""
    reading = Reading(
        source.on_error, columns=source.columns, required=(), rest=True, share=share_of(cfg.scale_all), seed=cfg.seed
    )

    def pairs() -> Iterator[dict[str, Any]]:
        for piece in map(whole, files):
            for row in read_piece(piece, reading, report):
                try:
                    yield as_pair(row.value)
                except UntrainableError as error:
                    place = where(piece, row.index)
                    if source.on_error == "stop":
                        raise error.at(place) from None
                    report.records -= 1
                    report.skip(error.reason, place, error.message.removeprefix(f"{error.reason}: "))

    with Progress(f"read {source.name}", unit="pair") as progress:
        for pair in table.first(source.name, pairs(), source.max_pairs, "max_pairs"):
            progress.add(rows=1)
            yield pair


def as_pair(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it is written: prompt, chosen, rejected, and where there are any tools and category.

    UntrainableError: it is no pair, its messages cannot be rendered, or the chosen answer calls an undeclared tool.
    """
    prompt, chosen, rejected = to_pair(record)
    tools = normalize_tools(record.get("tools"))
    check_conversation([*prompt, *chosen], tools)
    try:
        check_messages([*prompt, *rejected])
    except UserError as error:
        raise UntrainableError("malformed messages", f"rejected: {error.message}", error.hint) from None
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise UntrainableError("no answer", f"{name} has no assistant turn after the prompt")
    category = {} if record.get("category") is None else {"category": str(record["category"])}
    pair = {"prompt": prompt, **({"tools": tools} if tools else {}), "chosen": chosen, "rejected": rejected, **category}
    try:
        json.dumps(pair)
    except TypeError as error:  # bytes of a table
        raise UntrainableError("malformed messages", f"messages must be JSON: {error}") from None
    return pair


def _check_source(cfg: PairsConfig, source: SourceConfig, table: ConversationTable, report: ReadReport) -> None:
    """UserError if no pair of a source is left; says what was dropped."""
    name = source.name
    for reason, count in report.skipped.items():
        table.count(name, f"{NOT_READ}{reason}", count)
    records = report.records + sum(report.skipped.values()) - report.skipped.get(EMPTY, 0)
    if not records:
        raise UserError(f"source {name!r} is empty: no pair in {', '.join(map(redact, source.paths))}")
    check_scale(name, cfg.scale_all, records=records, beyond=report.skipped.get(BEYOND_SCALE, 0))
    unread = {f"{NOT_READ}{reason}": count for reason, count in report.errors().items()}
    outcomes = table.counts.get(name, {})
    dropped = {outcome: outcomes[outcome] for outcome in (OVERLAPS, DUPLICATE) if outcome in outcomes} | unread
    examples = {f"{NOT_READ}{reason}": report.samples_of(reason)[0] for reason in report.errors()}
    remedies = {outcome: f"{sample['where']}: {sample['reason']}" for outcome, sample in examples.items()}
    read = outcomes.get(READ, 0) + sum(unread.values())
    check_kept(name, read=read, kept=outcomes.get(KEPT, 0), dropped=dropped, remedies=remedies)


if __name__ == "__main__":
    run_data_script(main)
