# /// script
# [tool.runspec]
# docs = "Conversations with reasoning control, packed into rows with a loss mask"
# name = "nano3/data/prep/sft"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
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
content and optionally reasoning_content and tool_calls; beside them `tools`, which declares what is called). Passages
of pretraining's text among them keep the model from forgetting it.

Simplified against the paper: every source counts by its size, without the paper's domain weights; nothing is generated
by a teacher model or filtered by a judge. Template, mask, packing and the shares of reasoning control are the paper's.
What is done is done by the steps of `nemotron data pack`: shards, so that a run that was killed goes on.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import hashlib
import json
import math
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, did_you_mean
from nemotron.data_prep.chat import pack, spool
from nemotron.data_prep.chat.spool import ChatSettings, ChatSource
from nemotron.data_prep.sources.files import RECORD_FORMATS, SourceFile
from nemotron.data_prep.sources.locations import check_not_empty, lineage_sources, list_files
from nemotron.data_prep.sources.questions import question_texts
from nemotron.data_prep.sources.reading import BEYOND_SCALE, Reading, check_kept, check_scale
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset
from nemotron.data_prep.tokens.tokenizer import find_tokenizer, template_with, tokenizer_from
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.shards import discard, freeze
from nemotron.kit import SFTPack, Source, apply_scale, open_run, print_complete, share_of
from nemotron.kit.chat_template import keep_template, load_template
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.open_files import allow_open_files
from nemotron.recipes.nano3.stage1_sft.data_schema import MULTI_TURN, PASSAGES, SFTDataConfig, TasksConfig
from nemotron.stack.environments import (
    FAMILIES,
    Task,
    evaluation_prompts,
    generate_tasks,
    make_difficulty,
    prompt_tools,
    to_messages,
)

FILE_TOKENS = 1 << 24
SYSTEM_MESSAGES = ("You are a helpful assistant.", "You answer questions.", "Be brief.", "Read the question with care.")
Split = Literal["train", "valid"]  # tasks of the third split are for evaluation only
SHORT = "short"  # the style of a demonstration that does not work step by step


def main() -> None:
    """Prepare the data and publish it."""
    cfg: SFTDataConfig = load_script_config(__file__)
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}
    tokenizer_files = find_tokenizer(cfg.tokenizer)
    tokenizer = tokenizer_files.json_text()
    template = template_with(tokenizer_files, cfg.chat_template)
    if cfg.reasoning.low_effort_share:
        load_template(template).check_switch("low_effort")
    scale = cfg.scale_all or cfg.scale
    per_family: dict[Split, int] = {
        "train": apply_scale(cfg.tasks.num_tasks, scale),
        "valid": apply_scale(cfg.tasks.num_valid_tasks, scale),
    }
    own_files = {
        source.name: list_files(source.paths, RECORD_FORMATS, on_error=source.on_error) for source in cfg.sources
    }
    for name, listed in own_files.items():
        check_not_empty(name, listed)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        work = run.dir / "work"  # plans, receipts, and what the shards wrote: a killed run goes on from here

        # --- Conversations: generated ones as files, your own as they are ---------------------------------------------
        with run.phase("collect"):
            tasks = list(_tasks(cfg, per_family))
            generated = _write_generated(cfg, tasks, work / "generated")
            settings = ChatSettings(
                tokenizer=tokenizer,
                template=template,
                seq_len=cfg.packing.seq_length,
                too_long=cfg.packing.too_long,
                # Reasoning off in some, cut in some; then one sequence per span that the template keeps whole.
                reasoning_off=cfg.reasoning.off_share,
                reasoning_truncated=cfg.reasoning.truncated_share,
                seed=cfg.seed,
                sources=_sources(cfg),
                protected=tuple(evaluation_prompts(cfg.evaluation_tasks, difficulties) + question_texts(cfg.questions))
                if cfg.sources or cfg.text.path
                else (),
            )
            files = generated | own_files
            plan = spool.plan_tokenize(settings, files, shard_bytes(files))
            freeze(plan, work / "spool")

        # --- Template, mask, token ids --------------------------------------------------------------------------------
        with run.phase("tokenize"):
            conversations = spool.tokenize_conversations(plan, work / "spool", settings, engine)
            sequences = pack.read_sequences(work / "spool", plan, list(settings.sources))
            chosen = pack.choose(sequences, list(settings.sources), weights=None, repeats={}, num_tokens=None)
        print(conversations.table, file=sys.stderr)
        print(f"exact duplicates among those kept, left out: {chosen.duplicates}", file=sys.stderr)
        for note in conversations.notes(settings):
            print(note, file=sys.stderr)
        for source in cfg.sources:
            counts = conversations.table.counts.get(source.name, {})
            beyond = counts.get(BEYOND_SCALE, 0)
            check_scale(source.name, cfg.scale_all, records=counts[spool.READ], beyond=beyond)
            conversations.check_own(source.name, settings)
            kept, equal = counts[spool.KEPT], chosen.equal[source.name]
            check_kept(source.name, read=kept, kept=kept - equal, dropped={"exact duplicate": equal}, unit="sequences")
        if not len(chosen.splits["train"]):
            raise UserError("no training conversation is left", "the table above says what was dropped and why")

        # --- Pack: which conversations in which row, by lengths alone; then the rows ----------------------------------
        with run.phase("pack"):
            packing = pack.Packing(
                cfg.packing.seq_length, cfg.packing.algorithm, cfg.seed, FILE_TOKENS, cfg.packing.conversation_tokens
            )
            packed = pack.pack_rows(plan, sequences, chosen.splits, packing, work, engine)
        for split, rows in packed.items():
            print(f"{split}: {rows.report}", file=sys.stderr)

        # --- Publish --------------------------------------------------------------------------------------------------
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir()
        paths = pack.publish_rows(packed, work, run.output_dir)
        # Which tasks the model meets: what evaluation checks for leaks and measures novelty against.
        write_jsonl(run.output_dir / "tasks.jsonl", (task.to_dict() for split, task in tasks if split == "train"))
        # It travels with the data: training compares it with the model's, wherever this one may be by then.
        tokenizer_files.copy_to(run.output_dir / "tokenizer")
        dataset = SFTPack(
            path=run.output_dir,
            num_examples=packed["train"].counts.sequences,
            num_tokens=packed["train"].counts.tokens,
            num_loss_tokens=packed["train"].counts.trained_tokens,
            train_path=paths["train"],
            valid_path=paths.get("valid"),
            tokenizer_path=run.output_dir / "tokenizer",
            seq_len=cfg.packing.seq_length,
            chat_template=keep_template(template, run.output_dir),
            metrics={
                "curation": conversations.table.rows(),
                "duplicates": chosen.duplicates,
                "not_read_samples": list(islice(chain.from_iterable(conversations.samples.values()), 100)),
                "packs": {split: rows.metrics() for split, rows in packed.items()},
            },
            reasoning=conversations.reasons(settings),
            sources=list(_lineage(cfg.tasks, generated, own_files)),
        )
        dataset.save(move=True)
        discard(work)
        print_complete({"data": dataset})


def shard_bytes(files: Mapping[str, Sequence[SourceFile]]) -> int:
    """Bytes of a shard, which becomes three files: 1 MiB; of more than 1 GiB in all a 1,024th, at most 32 MiB."""
    stored = sum(file.size for listed in files.values() for file in listed)
    return min(32 << 20, max(1 << 20, stored >> 10))


def _tasks(cfg: SFTDataConfig, per_family: dict[Split, int]) -> Iterator[tuple[Split, Task]]:
    """Tasks of every family for both splits, in a fixed order."""
    splits: tuple[Split, ...] = ("train", "valid")
    for family in cfg.tasks.families:
        for split in splits:
            difficulty = cfg.tasks.difficulty.get(family)
            count = math.ceil(per_family[split] * cfg.tasks.shares.get(family, 1.0))
            for task in generate_tasks(family, split, count, cfg.tasks.seed, difficulty):
                yield split, task


def _write_generated(
    cfg: SFTDataConfig, tasks: Sequence[tuple[Split, Task]], folder: Path
) -> dict[str, list[SourceFile]]:
    """A file of conversations for every family, one of those with several turns, and one of passages of text.

    One that is there is left as it is, since a plan knows its time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in cfg.generated_names:
        path = folder / f"{name}.jsonl"
        if not path.exists():
            part = path.with_suffix(".part")
            if name == PASSAGES:
                write_jsonl(part, _passages(cfg))
            else:
                write_jsonl(part, _with_system(cfg.tasks, name, _generated(cfg, name, tasks)))
            if not part.stat().st_size:
                share = cfg.tasks.multi_turn_share
                raise UserError(
                    f"tasks.multi_turn_share = {share} gives no conversation of {len(tasks)} tasks",
                    "a larger share, or more tasks of families without tools; 0 for none",
                )
            part.replace(path)
        files[name] = list_files([str(path)])
    return files


def _generated(cfg: SFTDataConfig, name: str, tasks: Sequence[tuple[Split, Task]]) -> Iterator[dict[str, Any]]:
    """The conversations of a family, each task by itself; or those with several turns, a task after the other.

    The latter are of tasks without tools, since what a prompt declares holds for its whole conversation. Of the former
    a share asks for little reasoning, all of them with a short demonstration.
    """
    if name != MULTI_TURN:
        of_family = [(split, task) for split, task in tasks if task.family == name]
        counts = Counter(split for split, _ in of_family)
        remaining = {split: round(cfg.reasoning.low_effort_share * count) for split, count in counts.items()}
        for split, task in of_family:
            low_effort = remaining[split] > 0 and task.solution.style == SHORT
            remaining[split] -= low_effort
            effort = {"low_effort": True} if low_effort else {}
            yield {"messages": to_messages(task), **_declared(task), **effort, "split": split}
        return
    rng = random.Random(f"{MULTI_TURN}/{cfg.tasks.seed}")
    for split in get_args(Split):
        without_tools = [task for task_split, task in tasks if task_split == split and not prompt_tools(task)]
        for _ in range(round(cfg.tasks.multi_turn_share * len(without_tools)) if len(without_tools) >= 3 else 0):
            turns = rng.sample(without_tools, rng.randint(2, 3))
            yield {"messages": [message for task in turns for message in to_messages(task)], "split": split}


def _with_system(cfg: TasksConfig, name: str, conversations: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same conversations, a share of them with a system message."""
    rng = random.Random(f"system/{name}/{cfg.seed}")
    for conversation in conversations:
        if rng.random() < cfg.system_share and conversation["messages"][0]["role"] != "system":
            system = {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}
            conversation = {**conversation, "messages": [system, *conversation["messages"]]}
        yield conversation


def _passages(cfg: SFTDataConfig) -> Iterator[dict[str, Any]]:
    """Passages of documents that pretraining read, at random places, so that SFT keeps what they taught."""
    assert cfg.text.path is not None
    if not (cfg.text.path / "blend.json").is_file():
        raise UserError(f"text.path: {cfg.text.path} is no blend of pretraining", "text.path=null leaves the text out")
    tokenizer = tokenizer_from(find_tokenizer(str(cfg.text.path / "tokenizer")).json_text())  # not the model's
    sources = json.loads((cfg.text.path / "blend.json").read_text(encoding="utf-8"))["sources"]
    listed = {name: source for name, source in sources.items() if source["train"]}
    for source in cfg.text.weights:
        if source not in listed:
            what = "no training text of" if source in sources else "no source"
            raise UserError(f"text.weights: {cfg.text.path} has {what} {source!r}", did_you_mean(source, listed))
    allow_open_files()  # each of them stays mapped
    streams = {
        source: [IndexedDataset(cfg.text.path / prefix) for prefix in listed[source]["train"]]
        for source in cfg.text.weights
    }
    rng = random.Random(f"{PASSAGES}/{cfg.seed}")
    names, weights = list(cfg.text.weights), list(cfg.text.weights.values())
    for source in rng.choices(names, weights, k=apply_scale(cfg.text.num_passages, cfg.scale_all or cfg.scale)):
        stream = rng.choices(streams[source], [len(stream.tokens) for stream in streams[source]])[0]
        begin = rng.randrange(len(stream.tokens))
        document_end = int(stream.offsets[int(np.searchsorted(stream.offsets, begin, side="right"))])
        ids = stream.tokens[begin : min(begin + cfg.text.passage_tokens, document_end)].tolist()
        passage = tokenizer.decode(ids, skip_special_tokens=True).strip("\ufffd")  # part of a character
        if passage.strip():  # else the line end of a document, say, and nothing to train on
            yield {"text": passage, "split": "train", "loss_weight": cfg.text.loss_weight}


def _declared(task: Task) -> dict[str, Any]:
    """The field `tools` of a conversation, where there are some."""
    return {"tools": tools} if (tools := prompt_tools(task)) else {}


def _sources(cfg: SFTDataConfig) -> dict[str, ChatSource]:
    """Generated conversations know their split; your own are split by hash, and guarded against evaluation prompts."""
    columns = {name: name for name in ("messages", "tools", "low_effort", "split")}
    generated = Reading(columns=columns, required=())
    text_columns = {name: name for name in ("text", "split", "loss_weight")}
    passages = Reading(columns=text_columns, required=(), present=("text",))
    sources: dict[str, ChatSource] = {
        name: ChatSource(
            name,
            passages if name == PASSAGES else generated,
            split_column="split",
            effort_column="low_effort",
            guarded=name == PASSAGES,
        )
        for name in cfg.generated_names
    }
    for source in cfg.sources:
        sources[source.name] = ChatSource(
            source.name,
            replace(spool.chat_reading(source.columns, source.on_error), share=share_of(cfg.scale_all), seed=cfg.seed),
            valid_fraction=source.valid_fraction,
            max_records=source.max_conversations,
            guarded=True,
            train_on=source.train_on,
            loss_weights=source.loss_weights,
        )
    return sources


def _lineage(
    cfg: TasksConfig, generated: Mapping[str, list[SourceFile]], own_files: Mapping[str, list[SourceFile]]
) -> Iterator[Source]:
    """Everything raw that goes in. Generated conversations are one source, whatever the files that hold them."""
    generated = {name: listed for name, listed in generated.items() if name != PASSAGES}  # the tokenizer's artifact
    if generated:
        total = hashlib.sha256()
        for file in chain.from_iterable(generated.values()):
            total.update(Path(file.uri).read_bytes())
        detail = f"conversations of {', '.join(generated)}; seed {cfg.seed}"
        yield Source(name="task-generators", sha256=total.hexdigest(), detail=detail)
    for name, files in own_files.items():
        yield from lineage_sources(files, f"source {name}")


if __name__ == "__main__":
    run_data_script(main)
