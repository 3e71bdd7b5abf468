# /// script
# [tool.runspec]
# docs = "Curate documents, train the tokenizer, write the token blend of the base model"
# name = "nano3/data/prep/pretrain"
# setup = "pip install nemotron"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# default = "tiny"
# schema = "data_schema.py:PretrainDataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron 3 Nano, stage 0: raw text -> curated documents -> tokenizer -> Megatron token streams and their blend.

    nemotron nano3 data prep pretrain -c tiny
    python data_prep.py --config tiny 'sources=[{name: mine, paths: [my-folder], weight: 0.3}]'

The published model reads 25 T tokens of 15 categories (tech report 2.1 to 2.3). Here the sources are those that every
machine has: the standard library of the running Python as code and as prose, worked tasks from the generators that the
later stages use, and documents of your own.

Simplified against the paper: no crawled and no synthetic text, hence no language identification, no model-based quality
classifier and no rephrasing; near-duplicates are found by MinHash on one machine. The order of steps, the two-phase
blend and the files are the same.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.curation import corpus as curation
from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.sources.documents import Document, Part, Skipped
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import file_digests
from nemotron.data_prep.sources.user import UserSource, user_documents
from nemotron.data_prep.tokens import blend
from nemotron.data_prep.tokens import tokenizer as bpe
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.jsonl import write_jsonl
from nemotron.kit import PretrainBlend, Source, apply_scale, open_run, print_complete
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once
from nemotron.stack.environments import FAMILIES, evaluation_prompts, generate_tasks, make_difficulty, plain_text

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.data_schema import PretrainDataConfig


def main() -> None:
    """Prepare the data and publish it."""
    cfg: PretrainDataConfig = load_script_config(__file__)
    if cfg.stdlib.python != platform.python_version():
        raise UserError(f"this config is for Python {cfg.stdlib.python}, this is {platform.python_version()}")
    difficulties = {family: make_difficulty(family, cfg.tasks.difficulty.get(family)) for family in FAMILIES}

    # --- Sources: what is read, with digests, before any work is done -----------------------------------------------
    user_sources = [
        UserSource(
            source.name,
            tuple(source.paths),
            source.kind,
            source.text_field,
            source.valid_fraction,
            source.max_documents,
            source.on_error,
        )
        for source in cfg.sources
    ]
    user_files = {source.name: source.files() for source in user_sources}
    files = stdlib.module_files() if cfg.stdlib.enabled else []
    tasks_per_family = apply_scale(cfg.tasks.num_tasks, cfg.scale) if cfg.tasks.num_tasks else 0
    names = ["stdlib_code", "stdlib_docs"] * bool(files) + ["tasks"] * bool(tasks_per_family)
    names += [source.name for source in user_sources]

    phases = _phases(cfg, names)
    tasks = [
        task
        for family in (FAMILIES if tasks_per_family else ())
        for task in generate_tasks(family, "train", tasks_per_family, cfg.tasks.seed, difficulties.get(family))
    ]
    task_documents = [
        Document("tasks", f"{task.family}:{i}", plain_text(task), "task", "train") for i, task in enumerate(tasks)
    ]
    raw = [Source(**digest) for digest in _digests(cfg, files, task_documents, user_files)]

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        work_dir = run.dir / "work"

        # --- Curate: normalise, judge, deduplicate, decontaminate ---------------------------------------------------
        # The evaluation prompts are protected, besides being held out by the hash of the task itself.
        with run.phase("curate"):
            protected = evaluation_prompts(cfg.curation.evaluation_tasks, difficulties)
            documents: Iterator[Document | Part | Skipped] = chain(
                # Yours first: what is wrong with a file is said at once. The order of sources changes nothing.
                *(user_documents(source, user_files[source.name], cfg.seed) for source in user_sources),
                stdlib.parts(files, cfg.stdlib.max_code_chars, cfg.stdlib.max_docs_chars),
                task_documents,
            )
            settings = curation.CurationSettings(seed=cfg.seed, **cfg.curation.model_dump(exclude={"evaluation_tasks"}))
            limits = {source.name: source.max_documents for source in user_sources if source.max_documents}
            corpus = curation.curate(documents, work_dir, protected, settings, engine, limits)
        print(corpus.table, file=sys.stderr)
        for source in user_sources:
            if source.name not in corpus.table.read:
                raise UserError(f"source {source.name!r} is empty: no document in {', '.join(source.paths)}")
        blend.check_documents(corpus, phases)

        # --- Tokenizer: BPE on a sample mixed as the model will see it ----------------------------------------------
        with run.phase("tokenizer"):
            sample = blend.sample_texts(corpus, blend.average_weights(phases), cfg.tokenizer.sample_bytes)
            tokenizer = bpe.train_tokenizer(sample, cfg.tokenizer.vocab_size)
            tokenizer_dir = run.output_dir / "tokenizer"
            bpe.save_tokenizer(tokenizer, tokenizer_dir, model_max_length=cfg.tokenizer.model_max_length)

        # --- Token streams, one a source and split, and the blend that says how to mix them -------------------------
        with run.phase("tokenize"):
            written = blend.write_blend(corpus, tokenizer, phases, run.output_dir, engine)
            # Which tasks the model may have met: what evaluation checks for leaks and measures novelty against.
            write_jsonl(run.output_dir / "tasks.jsonl", (task.to_dict() for task in tasks))
        shutil.rmtree(work_dir)

        # --- Publish ------------------------------------------------------------------------------------------------
        dataset = PretrainBlend(
            path=run.output_dir,
            num_examples=sum(source["documents"] for source in written["sources"].values()),
            num_tokens=sum(source["tokens"] for source in written["sources"].values()),
            tokenizer_path=tokenizer_dir,
            blend_path=run.output_dir / blend.BLEND_FILE,
            metrics={
                "vocab_size": written["vocab_size"],
                "blend": written["phases"],
                "sources": written["sources"],
                "curation": corpus.table.rows(),
                "dropped_samples": corpus.table.samples,
            },
            sources=raw,
        )
        dataset.save(move=True)
        print(f"{dataset.ref}: {dataset.num_examples} documents, {dataset.num_tokens} tokens", file=sys.stderr)
        print_complete({"data": dataset})


def _phases(cfg: PretrainDataConfig, names: list[str]) -> list[blend.Phase]:
    """A source that is switched off takes its weight with it; your own sources take their share from all phases."""
    switched_off = {"stdlib_code", "stdlib_docs", "tasks"} - set(names)
    requested: list[blend.Phase] = [
        {
            "name": phase.name,
            "until": phase.until,
            "weights": {name: weight for name, weight in phase.weights.items() if name not in switched_off},
        }
        for phase in cfg.blend
    ]
    return blend.resolve_phases(blend.add_shares(requested, {s.name: s.weight for s in cfg.sources}), names)


def _digests(
    cfg: PretrainDataConfig,
    files: list[stdlib.ModuleFile],
    task_documents: list[Document],
    user: dict[str, list[SourceFile]],
) -> Iterator[dict[str, str | None]]:
    """Name, sha256 and description of everything raw that goes in, for the lineage."""
    if files:
        held_out = sorted({file.top for file in files if file.split == "valid"})
        yield {
            "name": "python-standard-library",
            "sha256": stdlib.digest(files),
            "detail": f"{platform.python_implementation()} {platform.python_version()}, {len(files)} files of "
            f"{len({file.top for file in files})} modules; held out: {', '.join(held_out)}",
        }
    if task_documents:
        total = hashlib.sha256()
        for document in task_documents:
            total.update(document.text.encode() + b"\0")
        yield {
            "name": "task-generators",
            "sha256": total.hexdigest(),
            "detail": f"{len(task_documents)} tasks of {', '.join(FAMILIES)}; seed {cfg.tasks.seed}",
        }
    for name, found in user.items():
        for digest in file_digests(found):
            yield {**digest, "detail": f"source {name}, {digest['detail']}"}


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main, command_hint))
