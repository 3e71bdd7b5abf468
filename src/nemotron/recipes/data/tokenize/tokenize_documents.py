# /// script
# [tool.runspec]
# docs = "Tokenise documents of any source into Megatron token streams, with the blend that says how to mix them"
# name = "data/tokenize"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config"
# schema = "schema.py:TokenizeConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Documents -> Megatron .bin/.idx token streams and blend.json, at the speed of the tokenizer.

    nemotron data tokenize -c own 'sources=[my-folder]' tokenizer=my-tokenizer
    python tokenize_documents.py --config own 'sources=[notes/*.jsonl, {paths: [wiki], repeats: 2}]' tokenizer=PATH

Sources are folders, globs, stores and data sets of the Hugging Face Hub; config/ has the published blends with their
names there. What each shard reads is written down in a plan before the first is begun, and depends on the inputs and
the config only: the same command goes on after a kill and writes the same bytes, on a process pool and on Ray alike.

Simplified against the paper: the documents are taken as they come (`nemotron data curate` is for what is before), and
are not shuffled on disk, since the loaders of both stacks draw them in random order.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, cast

import tokenizers

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import expanded
from nemo_runspec.words import counted
from nemotron.data_prep.sources.files import FORMATS, redact
from nemotron.data_prep.sources.locations import check_not_empty, list_files, not_read
from nemotron.data_prep.sources.planning import SourceInput, make_plan
from nemotron.data_prep.sources.reading import BEYOND_SCALE, Reading, check_kept, check_scale, check_skipped, places
from nemotron.data_prep.sources.warc import require_extra
from nemotron.data_prep.tokens.blend import BLEND_FILE, Phase, write_blend_file
from nemotron.data_prep.tokens.encoding import plain_tokenizer, vocab_size_of
from nemotron.data_prep.tokens.indexed_dataset import token_dtype
from nemotron.data_prep.tokens.mixture import MIXTURE_FILE, SourceTokens, plan_mixture
from nemotron.data_prep.tokens.tokenization import (
    BEYOND_CAP,
    NOT_UNREADABLE,
    SourceRules,
    TokenizeJob,
    link_streams,
    skipped_table,
    tokenize_sources,
)
from nemotron.data_prep.tokens.tokenizer import TokenizerFiles, check_covers, find_tokenizer
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.shards import discard, freeze
from nemotron.kit import PretrainBlend, Source, open_run, print_complete, share_of
from nemotron.kit.commands import run_data_script
from nemotron.kit.lineage import write_json

if TYPE_CHECKING:
    from nemotron.recipes.data.tokenize.schema import TokenizeConfig


def main() -> None:
    """Tokenise and publish."""
    cfg: TokenizeConfig = load_script_config(__file__)
    # One that is here is read before the workers are forked, who so have it from the start.
    tokenizer_files = find_tokenizer(cfg.tokenizer) if expanded(cfg.tokenizer).exists() else None
    if tokenizer_files:
        plain_tokenizer(tokenizer_files.json_text())

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        # --- Tokenizer: pinned, and what stands around every document -----------------------------------------------
        tokenizer_files = tokenizer_files or find_tokenizer(cfg.tokenizer)
        tokenizer_json = tokenizer_files.json_text()
        tokenizer = plain_tokenizer(tokenizer_json)
        check_covers(tokenizer, tokenizer_files.location)
        vocab_size = vocab_size_of(tokenizer)
        dtype = token_dtype(vocab_size).__name__
        eos_id = special_id(tokenizer_files, "eos_token") if cfg.add_eos else None
        bos_id = special_id(tokenizer_files, "bos_token") if cfg.add_bos else None

        # --- Plan: which task reads what; another run's plan, or changed inputs, are refused -------------------------
        with run.phase("plan"):
            rules: dict[str, SourceRules] = {}
            inputs: list[SourceInput] = []
            passed_over: Counter[str] = Counter()
            for source in cfg.sources:
                reading = Reading(
                    cfg.on_error(source),
                    cfg.max_record_bytes(source),
                    {"text": "text"} | source.columns,
                    share=share_of(cfg.scale_all),
                    seed=cfg.seed,
                )
                rules[source.name] = SourceRules(reading, cfg.valid_fraction(source), cfg.test_fraction(source))
                formats = source.formats or FORMATS
                listed = list_files(source.paths, formats, passed_over, on_error=cfg.on_error(source))
                check_not_empty(source.name, listed)
                require_extra(listed)
                inputs.append(SourceInput(source.name, listed, source.max_documents, source.max_tokens))
            settings = {
                "tokenizer": tokenizer_files.digest,
                "tokenizer_revision": tokenizer_files.revision,
                "tokenizers": tokenizers.__version__,
                "dtype": dtype,
                "eos_id": eos_id,
                "bos_id": bos_id,
                "seed": cfg.seed,
                "sources": {
                    name: {"reading": rule.reading, "valid": rule.valid, "test": rule.test}
                    for name, rule in rules.items()
                },
            }
            plan = make_plan(settings, inputs, shard_bytes=cfg.shard_bytes, num_shards=cfg.num_shards)
            work_dir = run.dir / "work"
            freeze(plan, work_dir)
        if passed_over:
            formats_read = {name for source in cfg.sources for name in source.formats or FORMATS}
            print(not_read(passed_over, formats_read), file=sys.stderr)

        # --- Tokenise: every shard once, and never again once it has its receipt -------------------------------------
        job = TokenizeJob(tokenizer_json, bos_id, eos_id, dtype, cfg.seed, rules)
        with run.phase("tokenize"):
            streams = tokenize_sources(plan, work_dir, job, engine)
        print(skipped_table(streams), file=sys.stderr)
        sizes = {source.name: sum(file.size for file in source.files) for source in inputs}
        for name, source_streams in streams.items():
            read = source_streams.read
            skipped = read.errors()
            errors = {reason: count for reason, count in skipped.items() if reason not in NOT_UNREADABLE}
            records, beyond = read.records + sum(skipped.values()), read.skipped.get(BEYOND_SCALE, 0)
            if not records + beyond:  # a header alone, a table without rows, a crawl without pages
                raise UserError(f"source {name!r} is empty: no document in {places(read.samples)}")
            check_scale(name, cfg.scale_all, records=records + beyond, beyond=beyond)
            unread = read.unread_bytes / sizes[name]
            check_skipped(name, records, errors, read.samples, cfg.reading.max_skipped, unread)
            # What a cap leaves out is asked for, unless it is all.
            unusable = {reason: n for reason, n in skipped.items() if reason != BEYOND_CAP or not read.records}
            too_small = {BEYOND_CAP: "no document fits into the max_tokens of the source: raise it"}
            check_kept(name, read=records, kept=read.records, dropped=unusable, remedies=too_small)

        # --- Mixture: what the blend asks for, against what there is -------------------------------------------------
        available = {
            source.name: SourceTokens(
                streams[source.name].files["documents"], streams[source.name].files["tokens"], source.repeats
            )
            for source in cfg.sources
            if not cfg.held_out(source)
        }
        phases = cast("list[Phase] | None", cfg.requested_phases())
        mixture = plan_mixture(available, phases, seq_length=cfg.seq_length, train_tokens=cfg.train_tokens)
        print(mixture.table(), file=sys.stderr)
        for warning in mixture.repetitions():
            print(f"warning: {warning}", file=sys.stderr)

        # --- Publish: streams, blend, mixture, counts and the tokenizer ----------------------------------------------
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir()
        link_streams(streams, work_dir, run.output_dir)
        files = {name: source.files for name, source in streams.items()}
        write_blend_file(
            {"phases": mixture.phases, "sources": files, "vocab_size": vocab_size, "eos_id": eos_id}, run.output_dir
        )
        write_json(run.output_dir / MIXTURE_FILE, mixture.to_json())
        counts = {
            name: {"lengths": source.sorted_lengths(), "skipped": dict(sorted(source.read.skipped.items()))}
            for name, source in streams.items()
        }
        write_json(run.output_dir / "counts.json", counts)
        tokenizer_files.copy_to(run.output_dir / "tokenizer")
        num_documents = sum(source["documents"] for source in files.values())
        num_tokens = sum(source["tokens"] for source in files.values())
        dataset = PretrainBlend(
            path=run.output_dir,
            num_examples=num_documents,
            num_tokens=num_tokens,
            tokenizer_path=run.output_dir / "tokenizer",
            blend_path=run.output_dir / BLEND_FILE,
            metrics={
                "vocab_size": vocab_size,
                "tokenizer": {"location": cfg.tokenizer, "revision": tokenizer_files.revision},
                "mixture": mixture.to_json(),
                "sources": {
                    name: {
                        "shards": source.shards,
                        "shards_at_cap": source.capped,
                        "records": source.read.records,
                        "skipped": source.read.skipped,
                        "samples": source.read.samples,
                        "train_documents": source.files["documents"],
                        "valid_documents": source.files["valid_documents"],
                        "test_documents": source.files["test_documents"],
                    }
                    for name, source in streams.items()
                },
                "not_read": dict(passed_over),
            },
            sources=[
                Source(
                    name=", ".join(map(redact, source.paths)),
                    detail=f"source {source.name}: {len(source_input.files)} files, "
                    f"{sum(file.size for file in source_input.files)} bytes",
                )
                for source, source_input in zip(cfg.sources, inputs, strict=True)
            ],
        )
        dataset.save(move=True)
        discard(work_dir)
        print(f"{dataset.ref}: {counted(num_documents, 'document')}, {counted(num_tokens, 'token')}", file=sys.stderr)
        print_complete({"data": dataset})


def special_id(files: TokenizerFiles, name: str) -> int:
    """Id of the token that the tokenizer names as its eos_token or bos_token. UserError if there is none."""
    token = files.special_token(name)
    token_id = None if token is None else plain_tokenizer(files.json_text()).token_to_id(token)
    if token_id is None:
        what = f"names no {name}" if token is None else f"has no id for its {name} {token!r}"
        raise UserError(f"tokenizer {files.location} {what}", f"add_{name.removesuffix('_token')}=false goes without")
    return int(token_id)


if __name__ == "__main__":
    run_data_script(main)
