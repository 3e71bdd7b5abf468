# /// script
# [tool.runspec]
# docs = "Curate documents, train the tokenizer, write the token blend of the base model"
# name = "nano3/data/prep/pretrain"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# schema = "data_schema.py:PretrainDataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 0: raw text -> curated documents -> tokenizer -> Megatron token streams and their blend.

    nemotron nano3 data prep pretrain -c tiny
    python data_prep.py --config tiny 'sources=[{name: mine, paths: [my-folder], weight: 0.3}]'

The published model reads 25 T tokens of 15 categories (tech report 2.1 to 2.3); its long-context phase mixes documents
with questions and synthetic retrieval into the last of its blends (2.5): `long_context`, in the folder `long`. Here the
sources are those that every machine has: the standard library of the running Python as code and as prose, worked tasks
from the generators that the later stages use, and documents of your own.

Simplified against the paper: no crawled and no synthetic text, hence no language identification, no model-based quality
classifier and no rephrasing. What is done is done by the steps of `nemotron data curate` and `nemotron data tokenize`,
in the same order: shards, each of them written once, so that a run that was killed goes on. The published recipe's
phases of the blend are kept.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import hashlib
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.data_prep.curation import decontamination, heuristics
from nemotron.data_prep.curation.deduplication import exact, minhash
from nemotron.data_prep.curation.ingestion import MORE, NOT_READ, DocumentSource, ingest_documents, ingest_files
from nemotron.data_prep.curation.step import (
    Document,
    StepTable,
    collect,
    filter_shards,
    list_documents,
    plan_step,
    read_documents,
    source_rows,
    source_samples,
    source_table,
    tables_by_source,
)
from nemotron.data_prep.long_documents import LongPhase, by_hash, write_long_phase
from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.sources.documents import in_share
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import lineage_sources, list_files
from nemotron.data_prep.sources.planning import SourceInput, make_plan
from nemotron.data_prep.sources.questions import question_texts
from nemotron.data_prep.sources.reading import BEYOND_SCALE, EMPTY, NOT_ERRORS, Reading, check_kept, check_scale
from nemotron.data_prep.tokens import blend
from nemotron.data_prep.tokens import tokenizer as bpe
from nemotron.data_prep.tokens.blend import BLEND_FILE, Blend, Phase, write_blend_file
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset, token_dtype
from nemotron.data_prep.tokens.tokenization import (
    SourceRules,
    TokenizeJob,
    link_streams,
    skipped_table,
    tokenize_sources,
)
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.shards import discard, freeze
from nemotron.kit import PretrainBlend, Source, apply_scale, open_run, print_complete, share_of
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.schemas.curation import HeuristicSettings, MinHashSettings
from nemotron.kit.schemas.difficulty import Difficulty
from nemotron.stack.environments import (
    FAMILIES,
    evaluation_prompts,
    generate_tasks,
    make_difficulty,
    plain_text,
    prompt_tools,
    to_messages,
)
from nemotron.stack.evaluation.retrieval import SOURCE as RETRIEVAL
from nemotron.stack.evaluation.retrieval import Documents as RetrievalDocuments

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.data_schema import PretrainDataConfig

STDLIB_CODE, STDLIB_DOCS, TASKS = "stdlib_code", "stdlib_docs", "tasks"
TOKENIZED_BYTES = 64 << 20
"""Compressed, of what a stream of tokens is made of at most: training maps all streams of a split."""


def main() -> None:
    """Prepare the data and publish it."""
    cfg: PretrainDataConfig = load_script_config(__file__)
    if cfg.stdlib.python != platform.python_version():
        raise UserError(f"this config is for Python {cfg.stdlib.python}, this is {platform.python_version()}")
    bpe.check_trained_tokens(cfg.tokenizer.chat_template)
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}

    # --- Sources: what is read, before any work is done ---------------------------------------------------------------
    scale, share = cfg.scale_all or cfg.scale, share_of(cfg.scale_all)
    own_sources = {
        source.name: DocumentSource(
            source.name,
            Reading(source.on_error, columns={"text": "text"} | source.columns, share=share, seed=cfg.seed),
            source.kind,
            source.valid_fraction,
            source.max_documents,
        )
        for source in cfg.sources
    }
    own_files = {source.name: list_files(source.paths, on_error=source.on_error) for source in cfg.sources}
    modules = stdlib.module_files() if cfg.stdlib.enabled else []
    tasks_per_family = apply_scale(cfg.tasks.num_tasks, scale) if cfg.tasks.num_tasks else 0
    names = [STDLIB_CODE, STDLIB_DOCS] * bool(modules) + [TASKS] * bool(tasks_per_family) + [*own_sources]
    phases = _phases(cfg, names)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        work = run.dir / "work"

        # --- Documents: yours first, what is wrong with a file is said at once ----------------------------------------
        with run.phase("documents"):
            for name, source in own_sources.items():
                table = ingest_files(source, own_files[name], cfg.seed, work / "documents" / name, engine)
                unread = sum(tally.documents for why, tally in table.dropped.items() if why != NOT_READ + EMPTY)
                records = table.read.documents + unread
                beyond = table.dropped.get(NOT_READ + BEYOND_SCALE)
                check_scale(name, cfg.scale_all, records=records, beyond=beyond.documents if beyond else 0)
            tasks = [
                task
                for family in (cfg.tasks.families if tasks_per_family else ())
                for task in generate_tasks(family, "train", tasks_per_family, cfg.tasks.seed, difficulties.get(family))
            ]
            generated: dict[str, list[Document]] = {}
            if modules:
                generated[STDLIB_CODE] = list(stdlib.code_documents(modules, cfg.stdlib.max_code_chars, STDLIB_CODE))
                generated[STDLIB_DOCS] = list(stdlib.prose_documents(modules, cfg.stdlib.max_docs_chars, STDLIB_DOCS))
            if tasks:
                generated[TASKS] = [
                    {
                        "id": f"{task.family}:{i}",
                        "text": plain_text(task),
                        "source": TASKS,
                        "kind": "task",
                        "split": "train",
                    }
                    for i, task in enumerate(tasks)
                ]
            for name in sorted(generated.keys() - {TASKS}):  # their number is that of the scale already
                whole = generated[name]
                generated[name] = [d for d in whole if in_share(d["text"], share, cfg.seed)]
                beyond_scale = len(whole) - len(generated[name])
                check_scale(name, cfg.scale_all, records=len(whole), beyond=beyond_scale)
            for name, documents in generated.items():
                ingest_documents(name, documents, work / "documents" / name)
            files = list(chain.from_iterable(list_documents(work / "documents" / name) for name in names))

        # --- Curate: quality, duplicates, near duplicates, overlap with what is held out ------------------------------
        with run.phase("curate"):
            filters = cfg.curation.model_dump(include={"prose", "code"})
            limits = {kind: HeuristicSettings(limits=of_kind) for kind, of_kind in filters.items()}
            plan = plan_step(files, {"step": "heuristics", **filters})
            filter_shards(plan, work / "filtered", heuristics.judge_by_kind, limits, engine)
            exact.deduplicate(list_documents(work / "filtered"), "whitespace", work / "exact", engine)
            # Instances of one template are near duplicates of each other by design.
            unique = list_documents(work / "exact")
            templates = [path for path in unique if path.name.startswith(f"{TASKS}-")]
            texts = [path for path in unique if path not in templates]
            if texts:
                minhash_settings = MinHashSettings(**cfg.curation.minhash.model_dump(), seed=cfg.seed)
                minhash.deduplicate(texts, minhash_settings, work / "fuzzy", engine)
                texts = list_documents(work / "fuzzy")

            # The evaluation prompts are protected, besides being held out by the hash of the task itself.
            questions = question_texts(cfg.questions)
            prompts = evaluation_prompts(cfg.curation.evaluation_tasks, difficulties) + questions
            held_out = (d["text"] for d in chain.from_iterable(map(read_documents, texts)) if d["split"] == "valid")
            protected = decontamination.protect(chain(prompts, held_out), cfg.curation.ngram)
            digest = hashlib.sha256()
            for _, of_length in sorted(protected.items()):
                digest.update(of_length.data)
            plan = plan_step([*texts, *templates], {"step": "decontaminate", "protected": digest.hexdigest()})
            grams = decontamination.save_grams(protected, work / "hits" / "grams")
            collect(plan, work / "hits", decontamination.hit_shard, grams, engine)
            boilerplate = cfg.curation.boilerplate_documents
            leaks = decontamination.leaks_of(plan, work / "hits", protected, boilerplate, never_boilerplate=questions)
            collect(plan, work / "curated", decontamination.drop_shard, leaks, engine)
            curated = list_documents(work / "curated")
        steps = [work / "documents" / name for name in names]
        steps += [work / name for name in ("filtered", "exact", "fuzzy", "curated")]
        tables = tables_by_source(steps)
        print(source_table(tables), file=sys.stderr)
        if short := [text for text in questions if len(decontamination.words(text)) < decontamination.MIN_WORDS]:
            print(
                f"questions: {counted(len(short), 'question')} of fewer than {decontamination.MIN_WORDS} words may "
                f"stand in the text, as {short[0]!r}",
                file=sys.stderr,
            )
        for name, table in tables.items():
            if MORE in table.noted:
                print(
                    f"max_documents: the first {counted(table.read.documents, 'document')} of {name}; more are there",
                    file=sys.stderr,
                )

        for own_source in own_sources.values():
            _check_own(own_source, tables[own_source.name], filters)
        _check_documents(phases, {name: table.kept.documents for name, table in tables.items()})

        # --- Tokenizer: BPE on a sample mixed as the model will see it ------------------------------------------------
        with run.phase("tokenizer"):
            shares = blend.average_weights(phases)
            sample = blend.sample_texts(curated, tables, shares, cfg.tokenizer.sample_bytes, cfg.seed)
            conversations = _conversations(cfg, difficulties)
            sample = chain(sample, bpe.chat_texts(conversations, cfg.tokenizer.chat_template))
            tokenizer_dir = work / "tokenizer"
            tokenizer = bpe.train_tokenizer(sample, cfg.tokenizer.vocab_size, cfg.tokenizer.chat_template)
            bpe.save_tokenizer(
                tokenizer,
                tokenizer_dir,
                model_max_length=cfg.tokenizer.model_max_length,
                template=cfg.tokenizer.chat_template,
            )

        # --- Token streams of every source and split, and the blend that says how to mix them -------------------------
        with run.phase("tokenize"):
            tokenizer_files = bpe.find_tokenizer(str(tokenizer_dir))
            vocab_size = tokenizer.get_vocab_size()
            dtype = token_dtype(vocab_size).__name__
            inputs = [
                SourceInput(name, list_files([str(path) for path in curated if path.name.startswith(f"{name}-")]))
                for name in names
            ]
            versions = {"tokenizer": tokenizer_files.digest, "tokenizers": tokenizers.__version__, "dtype": dtype}
            token_plan = make_plan(versions, inputs, shard_bytes=TOKENIZED_BYTES)
            freeze(token_plan, work / "tokens")
            # Escapes and fields make a record longer than its text, of which the limit was that of the sources.
            reading = Reading(columns={"split": "split", "id": "id"}, max_record_bytes=2**30)
            rules = dict.fromkeys(names, SourceRules(reading, split_column="split"))
            for own in cfg.sources:
                rules[own.name] = SourceRules(replace(reading, on_error=own.on_error), split_column="split")
            job = TokenizeJob(tokenizer_files.json_text(), None, bpe.EOS_ID, dtype, cfg.seed, rules)
            streams = tokenize_sources(token_plan, work / "tokens", job, engine)
        if any(of_source.read.errors() for of_source in streams.values()):  # shards that curation emptied are none
            print(skipped_table(streams), file=sys.stderr)

        # --- Publish --------------------------------------------------------------------------------------------------
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir()
        link_streams(streams, work / "tokens", run.output_dir)
        written: Blend = {
            "phases": phases,
            "sources": {name: streams[name].files for name in sorted(streams)},
            "vocab_size": vocab_size,
            "eos_id": bpe.EOS_ID,
        }
        _check_documents(phases, {name: source["documents"] for name, source in written["sources"].items()})
        write_blend_file(written, run.output_dir)
        if cfg.long_context is not None:
            write_long_context(cfg, run.output_dir, written, tokenizer, curated)
        tokenizer_files.copy_to(run.output_dir / "tokenizer")
        # Which tasks the model may have met: what evaluation checks for leaks and measures novelty against.
        write_jsonl(run.output_dir / "tasks.jsonl", (task.to_dict() for task in tasks))
        num_documents = sum(source["documents"] for source in written["sources"].values())
        num_tokens = sum(source["tokens"] for source in written["sources"].values())
        dataset = PretrainBlend(
            path=run.output_dir,
            num_examples=num_documents,
            num_tokens=num_tokens,
            tokenizer_path=run.output_dir / "tokenizer",
            blend_path=run.output_dir / BLEND_FILE,
            metrics={
                "vocab_size": vocab_size,
                "blend": phases,
                "sources": written["sources"],
                "curation": source_rows(tables),
                "dropped_samples": source_samples(tables),
            },
            sources=list(_lineage(cfg, modules, generated.get(TASKS, []), own_files)),
        )
        dataset.save(move=True)
        discard(work)
        num_held_out = sum(source["valid_documents"] for source in written["sources"].values())
        to_train = f"{counted(num_documents, 'document')}, {counted(num_tokens, 'token')} to train on"
        print(f"{dataset.ref}: {to_train}; {counted(num_held_out, 'document')} held out", file=sys.stderr)
        print_complete({"data": dataset})


def write_long_context(
    cfg: PretrainDataConfig, folder: Path, written: Blend, tokenizer: tokenizers.Tokenizer, curated: Sequence[Path]
) -> None:
    """The folder `long`: curated code with questions about it, facts strewn over text, and the blend of both with the
    last phase's. Of both the training split, and for questions what is held out, too."""
    settings, scale = cfg.long_context, cfg.scale_all or cfg.scale
    assert settings is not None
    length = settings.length

    def long_code(split: str) -> Iterator[str]:
        for document in chain.from_iterable(map(read_documents, curated)):
            if document["kind"] == "code" and len(document["text"]) > length and document["split"] == split:
                yield document["text"]

    phase = LongPhase(length, length * 3 // 4, settings.share, apply_scale(settings.num_documents, scale))
    others = {}
    if settings.retrieval_share:
        weights = written["phases"][-1]["weights"]
        stream = written["sources"][max(weights, key=lambda name: weights[name])]["train"][0]
        count = apply_scale(settings.num_retrieval, scale)
        like = RetrievalDocuments(length, settings.facts, settings.words, bpe.EOS_ID, repeats=settings.repeats)
        documents = like.make(tokenizer, IndexedDataset(folder / stream).tokens, count, cfg.seed)
        others[RETRIEVAL] = settings.retrieval_share, [ids for ids, _ in documents]
    texts: dict[str, Iterable[str]] = {"train": (), "valid": ()}
    if settings.share:
        batch = max(1000, 4 * apply_scale(settings.num_documents, scale))  # not every text is long, and has an answer
        texts = {split: by_hash(partial(long_code, split), cfg.seed, batch) for split in texts}
    write_long_phase(folder, written, texts, tokenizer, phase, others)


def _phases(cfg: PretrainDataConfig, names: list[str]) -> list[Phase]:
    """A source that is switched off takes its weight with it; your own sources take their share from all phases."""
    switched_off = {STDLIB_CODE, STDLIB_DOCS, TASKS} - set(names)
    requested: list[Phase] = [
        {
            "name": phase.name,
            "until": phase.until,
            "weights": {name: weight for name, weight in phase.weights.items() if name not in switched_off},
        }
        for phase in cfg.blend
    ]
    return blend.resolve_phases(blend.add_shares(requested, {s.name: s.weight for s in cfg.sources}), names)


def _conversations(
    cfg: PretrainDataConfig, difficulties: Mapping[str, Difficulty]
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Messages and tools of tasks of the families that the tokenizer is to know."""
    for family in cfg.tokenizer.families:
        for task in generate_tasks(family, "train", cfg.tokenizer.conversations, cfg.tasks.seed, difficulties[family]):
            yield to_messages(task), prompt_tools(task)


def _check_own(source: DocumentSource, table: StepTable, filters: Mapping[str, Iterable[str]]) -> None:
    """UserError if curation leaves nothing of a source of the user's. `filters`: kind -> names of its limits."""
    dropped = {
        reason: tally.documents
        for reason, tally in table.dropped.items()
        if reason.removeprefix(NOT_READ) not in NOT_ERRORS
    }
    unread = sum(count for reason, count in dropped.items() if reason.startswith(NOT_READ))
    remedies = {name: f"curation.{source.kind}.{name}=null switches that filter off" for name in filters[source.kind]}
    check_kept(
        source.name,
        read=table.read.documents + unread,
        kept=table.kept.documents,
        dropped=dropped,
        remedies=remedies,
    )


def _check_documents(phases: Sequence[Phase], documents: Mapping[str, int]) -> None:
    """UserError for a source that has a weight but no training document left. `documents`: by source."""
    for phase in phases:
        for name, weight in phase["weights"].items():
            if weight > 0 and not documents.get(name):
                raise UserError(
                    f"source {name!r} has a weight in the blend but no training document is left after curation",
                    "the table above says what was dropped and why",
                )


def _lineage(
    cfg: PretrainDataConfig,
    modules: list[stdlib.ModuleFile],
    tasks: list[Document],
    own_files: Mapping[str, list[SourceFile]],
) -> Iterator[Source]:
    """Everything raw that goes in."""
    if modules:
        held_out = sorted({module.top for module in modules if module.split == "valid"})
        yield Source(
            name="python-standard-library",
            sha256=stdlib.digest(modules),
            detail=f"{platform.python_implementation()} {platform.python_version()}, {len(modules)} files of "
            f"{len({module.top for module in modules})} modules; held out: {', '.join(held_out)}",
        )
    if tasks:
        total = hashlib.sha256()
        for document in tasks:
            total.update(document["text"].encode() + b"\0")
        yield Source(
            name="task-generators",
            sha256=total.hexdigest(),
            detail=f"{len(tasks)} tasks of {', '.join(cfg.tasks.families)}; seed {cfg.tasks.seed}",
        )
    for name, files in own_files.items():
        yield from lineage_sources(files, f"source {name}")


if __name__ == "__main__":
    run_data_script(main)
