# /// script
# [tool.runspec]
# docs = "Conversations with reasoning control, packed into rows with a loss mask"
# name = "nano3/data/prep/sft"
# setup = "pip install nemotron"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# default = "tiny"
# schema = "data_schema.py:SFTDataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 1: conversations -> reasoning control -> chat template and loss mask -> packed Parquet.

    nemotron nano3 data prep sft -c tiny
    python data_prep.py --config tiny 'sources=[{name: chats, paths: [chats.jsonl]}]'

The published model is tuned on 18 M conversations of 12 domains (tech report 3.1). Here they come from the generators
of verifiable tasks, held out by the hash of the canonical task, and from files of your own (`messages` with role,
content and optionally reasoning_content and tool_calls; beside them `tools`, which declares what is called).

Simplified against the paper: every source counts by its size, without the paper's domain weights; nothing is generated
by a teacher model or filtered by a judge. Template, mask, packing and the shares of reasoning control are the paper's.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.chat import conversations as conv
from nemotron.data_prep.chat import packing
from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.sources.documents import Split
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import file_digests, list_files
from nemotron.data_prep.sources.reading import ReadReport
from nemotron.data_prep.tokens.tokenizer import load_tokenizer
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.jsonl import write_jsonl
from nemotron.kit import SFTPack, Source, apply_scale, open_run, print_complete
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once
from nemotron.stack.environments import FAMILIES, Task, evaluation_prompts, generate_tasks, make_difficulty, to_messages

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage1_sft.data_schema import SFTDataConfig


def main() -> None:
    """Prepare the data and publish it."""
    cfg: SFTDataConfig = load_script_config(__file__)
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}
    tokenizer = load_tokenizer(cfg.tokenizer)
    per_family: dict[Split, int] = {
        "train": apply_scale(cfg.tasks.num_tasks, cfg.scale),
        "valid": apply_scale(cfg.tasks.num_valid_tasks, cfg.scale),
    }
    files = {source.name: list_files(source.paths, conv.CONVERSATION_FORMATS) for source in cfg.sources}
    reports = {name: ReadReport() for name in files}

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        table = conv.ConversationTable()

        # --- Conversations: generated ones as they are, your own curated --------------------------------------------
        with run.phase("collect"):
            tasks = list(_tasks(cfg, per_family))
            generated = [Conversation(task.family, to_messages(task), split) for split, task in tasks]
            for conversation in generated:
                table.count(conversation.source, "read")
            own = chain.from_iterable(
                table.first(
                    source.name,
                    conv.read_conversations(
                        source.name,
                        files[source.name],
                        source.messages_field,
                        source.valid_fraction,
                        cfg.seed,
                        source.on_error,
                        reports[source.name],
                    ),
                    source.max_conversations,
                    "max_conversations",
                )
                for source in cfg.sources
            )
            protected = evaluation_prompts(cfg.evaluation_tasks, difficulties) if cfg.sources else []
            curated = [*generated, *conv.curate_conversations(own, protected, table)]
            for name, report in reports.items():
                for reason, count in report.skipped.items():
                    table.count(name, f"not read: {reason}", count)

        # --- Reasoning off in 10 %, cut in 3 %; then one sequence per span that the template keeps whole ------------
        controlled = conv.control_reasoning(
            curated,
            off_share=cfg.reasoning.off_share,
            truncated_share=cfg.reasoning.truncated_share,
            seed=cfg.seed,
        )
        spans = chain.from_iterable(conv.training_spans(conversation) for conversation in controlled)

        # --- Template, mask, token ids ------------------------------------------------------------------------------
        with run.phase("tokenize"):
            rows: dict[str, list[packing.TokenizedConversation]] = {"train": [], "valid": []}
            for item in packing.tokenize_conversations(
                spans, tokenizer, template=cfg.chat_template, seed=cfg.seed, engine=engine
            ):
                if len(item.input_ids) > cfg.packing.seq_length:
                    table.count(item.source, "longer than seq_length")
                elif not item.loss_mask.any():
                    table.count(item.source, "nothing to train on")
                else:
                    table.count(item.source, "kept")
                    rows[item.split].append(item)
        print(table, file=sys.stderr)
        if not rows["train"]:
            raise UserError("no training conversation is left", "the table above says what was dropped and why")

        # --- Pack ---------------------------------------------------------------------------------------------------
        with run.phase("pack"):
            packs = {
                split: packing.pack(
                    items,
                    cfg.packing.seq_length,
                    run.output_dir / f"{split}.parquet",
                    algorithm=cfg.packing.algorithm,
                    seed=cfg.seed,
                )
                for split, items in rows.items()
                if items
            }
            # Which tasks the model meets: what evaluation checks for leaks and measures novelty against.
            trained = (task.to_dict() for split, task in tasks if split == "train")
            write_jsonl(run.output_dir / "tasks.jsonl", trained)
        for split, pack in packs.items():
            print(f"{split}: {pack}", file=sys.stderr)

        # --- Publish ------------------------------------------------------------------------------------------------
        dataset = SFTPack(
            path=run.output_dir,
            num_examples=packs["train"].conversations,
            num_tokens=packs["train"].tokens,
            num_loss_tokens=packs["train"].trained_tokens,
            train_path=run.output_dir / "train.parquet",
            valid_path=run.output_dir / "valid.parquet" if "valid" in packs else None,
            tokenizer_path=cfg.tokenizer,
            seq_len=cfg.packing.seq_length,
            chat_template=cfg.chat_template,
            metrics={
                "curation": table.rows(),
                "not_read_samples": {name: report.samples for name, report in reports.items() if report.samples},
                "packs": {split: asdict(pack) for split, pack in packs.items()},
            },
            sources=list(_raw(cfg, generated, files)),
        )
        dataset.save(move=True)
        print_complete({"data": dataset})


def _tasks(cfg: SFTDataConfig, per_family: dict[Split, int]) -> Iterator[tuple[Split, Task]]:
    """Tasks of every family for both splits, in a fixed order."""
    splits: tuple[Split, ...] = ("train", "valid")
    for family in cfg.tasks.families:
        for split in splits:
            difficulty = cfg.tasks.difficulty.get(family)
            for task in generate_tasks(family, split, per_family[split], cfg.tasks.seed, difficulty):
                yield split, task


def _raw(cfg: SFTDataConfig, generated: list[Conversation], files: dict[str, list[SourceFile]]) -> Iterator[Source]:
    """Name, sha256 and description of everything raw that went in, for the lineage."""
    if generated:
        total = hashlib.sha256()
        for conversation in generated:
            total.update(conversation.key().encode() + b"\0")
        yield Source(
            name="task-generators",
            sha256=total.hexdigest(),
            detail=f"{len(generated)} conversations of {', '.join(cfg.tasks.families)}; seed {cfg.tasks.seed}",
        )
    for name, found in files.items():
        for digest in file_digests(found):
            yield Source(name=digest["name"], sha256=digest["sha256"], detail=f"source {name}, {digest['detail']}")


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main, command_hint))
