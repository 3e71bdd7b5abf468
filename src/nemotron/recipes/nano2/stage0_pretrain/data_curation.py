#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Curate text, train a tokenizer, write token streams and the blend of the three data phases."
# name = "nano2/pretrain"
# setup = "nemotron-cookbook"
# run.launch = "direct"
# config = {dir = "./config/data_curation", default = "tiny", schema = "data_curation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 0, step 1 of 3: from raw text to token streams.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python data_curation.py --scale tiny --sources my-folder more.jsonl > dataset.json

Simplified against the paper (arXiv 2508.14444, section 2): the text is this interpreter's standard library and
generated worked tasks in place of 20 T tokens of the web, and duplicates are exact ones, where the paper's are fuzzy.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.in_memory import filter_and_deduplicate
from nemotron.data_prep.long_documents import questions_about, write_long_phase
from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.sources.documents import split_of, stable_hash
from nemotron.data_prep.sources.reader import read_texts
from nemotron.data_prep.tokens.blend import Blend, Phase, add_shares, write_blend_file, write_source
from nemotron.data_prep.tokens.tokenizer import EOS_ID, chat_texts, save_tokenizer, train_tokenizer
from nemotron.kit import Dataset, PretrainBlend, Scale, Seed, Source, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.limits import LimitConfig
from nemotron.stack.environments import Task, generate_tasks, make_difficulty, plain_text, prompt_tools, to_messages

WHOLE = 10**9  # characters: more than any module has
FAMILIES = ("math", "multiple_choice", "instruction_following", "structured_output", "code_generation")
# Three phases that switch at 60 % and 90 % of the tokens, ever more of what is best (section 2.3): here worked tasks.
PHASES: tuple[Phase, ...] = (
    {"name": "diversity", "until": 0.6, "weights": {"code": 0.60, "docs": 0.20, "tasks": 0.20}},
    {"name": "quality", "until": 0.9, "weights": {"code": 0.45, "docs": 0.20, "tasks": 0.35}},
    {"name": "best", "until": 1.0, "weights": {"code": 0.30, "docs": 0.20, "tasks": 0.50}},
)
FILTERS = {  # a document outside one of these is dropped: Gopher's (arXiv 2112.11446, table A1), StarCoder's for lines
    "docs": {"word_count": LimitConfig(low=10), "alphabetic_words": LimitConfig(low=0.6)},
    "code": {"longest_line": LimitConfig(high=1000), "alphabetic_words": LimitConfig(low=0.25)},
}
FILTERS["long"] = FILTERS["code"]


@dataclass
class Config:
    """What to curate, and how much of it."""

    scale: Scale = "tiny"  # 1, 10, 30 or 100 % of each source; tiny takes at most 10,000 documents
    sources: tuple[UserPath, ...] = ()  # your files and folders: .txt, .jsonl with "text", ...
    source_weight: Annotated[float, Field(gt=0, lt=1)] = 0.3  # of all tokens, where there are such
    tasks_per_family: Annotated[int, Field(ge=100)] = 200_000  # worked tasks, at full scale
    vocab_size: Annotated[int, Field(ge=300, le=65_000)] = 2048  # of the tokenizer
    held_out: Annotated[int, Field(ge=2)] = 50  # documents of each source, at most, whatever the scale
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the files there


@step
def main(config: Config) -> Dataset:
    """Read, filter, remove duplicates, train the tokenizer, write the streams."""
    texts = {source: curate(source, documents, config) for source, documents in read_sources(config).items()}
    long = texts.pop("long")
    if empty := [source for source, by_split in texts.items() if not by_split["train"]]:
        raise UserError(f"source {empty[0]}: no document is left to train on", "--scale small takes more of it")

    # --- Tokenizer: byte-level BPE on what it will be used for, conversations of later stages included
    tasks = tasks_of((*FAMILIES, "workplace_assistant"), 400, config)
    chats = chat_texts(((to_messages(task), prompt_tools(task)) for task in tasks), "nano2")
    documents = chain(chats, *(by_split["train"] for by_split in texts.values()))
    tokenizer = train_tokenizer(documents, config.vocab_size, template="nano2")

    # --- Token streams, one for each source and split, as Megatron-Core reads them; and how they are to be mixed
    with output_folder(config.output_dir) as folder:
        save_tokenizer(tokenizer, folder / "tokenizer", model_max_length=131072, template="nano2")
        streams = {name: write_source(folder, name, by_split, tokenizer, EOS_ID) for name, by_split in texts.items()}
        phases = add_shares(PHASES, {"own": config.source_weight} if config.sources else {})
        vocab_size = tokenizer.get_vocab_size()
        blend: Blend = {"phases": phases, "sources": streams, "vocab_size": vocab_size, "eos_id": EOS_ID}
        write_long_phase(folder, blend, long, tokenizer)  # long/, for training_long.py
        dataset = PretrainBlend(
            path=folder,
            num_examples=sum(stream["documents"] for stream in streams.values()),
            num_tokens=sum(stream["tokens"] for stream in streams.values()),
            tokenizer_path=folder / "tokenizer",
            blend_path=write_blend_file(blend, folder),
            metrics={"scale": config.scale, "vocab_size": vocab_size},
            sources=[
                Source(name="python-standard-library", sha256=stdlib.digest(stdlib.module_files())),
                Source(name="task-generators", detail=f"{', '.join(FAMILIES)}; seed {config.seed}"),
                *(Source(name=str(path.absolute())) for path in config.sources),
            ],
        )
        return dataset.save()


def read_sources(config: Config) -> dict[str, Iterator[tuple[str, str]]]:
    """Raw documents by source: text and, where it is known, the split. A task in other words is on its side."""
    modules = stdlib.module_files()  # whole modules are held out, not single passages of them
    each = apply_scale(config.tasks_per_family * len(FAMILIES), config.scale) // len(FAMILIES)
    code = list(stdlib.code_documents(modules, WHOLE))
    sources = {
        "code": stdlib.passages(code),
        "long": (passage for passage in stdlib.passages(code, 6_000) if questions_about(passage[0])),
        "docs": stdlib.passages(stdlib.prose_documents(modules, WHOLE)),
        "tasks": ((plain_text(t), split_of(t.canonical, 0.05, config.seed)) for t in tasks_of(FAMILIES, each, config)),
    }
    own = ((text, "") for text in read_texts([str(path) for path in config.sources]))
    return sources | ({"own": own} if config.sources else {})


def tasks_of(families: tuple[str, ...], count: int, config: Config) -> Iterator[Task]:
    """Generated tasks, `count` of each family."""
    for family in families:
        yield from generate_tasks(family, "train", count, config.seed, make_difficulty(family, None))


def curate(source: str, documents: Iterator[tuple[str, str]], config: Config) -> dict[str, list[str]]:
    """Split, take the scale's share in an order that the seed decides, filter, and drop exact duplicates."""
    by_split: dict[str, list[str]] = {"valid": [], "train": []}
    for raw, known in sorted(documents, key=lambda document: stable_hash(str(config.seed), document[0])):
        by_split.get(known or split_of(raw, 0.05, config.seed), []).append(raw)
    if source == "own":  # all of them are read, so what is too many to be held out is trained on
        by_split["train"] += by_split["valid"][config.held_out :]
    if source != "tasks":  # of which only the share was generated
        by_split["train"] = by_split["train"][: apply_scale(len(by_split["train"]), config.scale)]
    by_split["valid"] = by_split["valid"][: config.held_out]
    return filter_and_deduplicate(by_split, FILTERS.get(source, {}))  # held-out text first: it is in no other


if __name__ == "__main__":
    run_step(main, Config)
