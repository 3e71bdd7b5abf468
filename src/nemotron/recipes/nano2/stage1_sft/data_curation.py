#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Conversations for the three stages of SFT, tokenised with the base model's tokenizer."
# name = "nano2/sft"
# setup = "nemotron-cookbook"
# run.launch = "direct"
# config = {dir = "./config/data_curation", default = "tiny", schema = "data_curation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 1, step 1 of 3: from tasks to masked rows of tokens.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python data_curation.py --base-path MODEL > dataset.json

Three stages, as published (arXiv 2508.14444, section 3.1): `mixed`, all families with the reasoning stripped from a
tenth, sequences concatenated into rows; `tools`, calls of tools, one sequence a row, since concatenation had hurt
them; `truncated`, all families again, the reasoning of a share cut off and the answer kept, so that a budget can be
obeyed (`evaluation.py` sets none).

A sequence is a turn of the assistant behind all that came before it, where the template shows earlier turns without
their reasoning. Trained is that turn alone, from behind `<think>` (`<think></think>` without reasoning) to its end.

Simplified against the paper: generated tasks in place of 80 B tokens, and no long context.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.conversations import Conversation, control_reasoning, training_spans
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.sources.documents import split_of, stable_hash
from nemotron.data_prep.tokens.tokenizer import find_tokenizer, tokenizer_from
from nemotron.kit import Checkpoint, Dataset, Scale, Seed, SFTPack, Source, UserPath, apply_scale
from nemotron.kit.dataclass_script import first_published, output_folder, run_step, step
from nemotron.stack.environments import generate_tasks, prompt_tools, to_messages

# Family -> its share of the conversations of `mixed` and `truncated`: fewer of what is learned soon or is long.
SHARES = {
    "math": 0.285,
    "multiple_choice": 0.285,
    "instruction_following": 0.285,
    "structured_output": 0.125,
    "workplace_assistant": 0.02,
}


@dataclass
class Config:
    """Which conversations, and how many."""

    base_path: UserPath | None = None  # default: nano2-long-model, or nano2-pretrain-model where there is none
    scale: Scale = "tiny"  # 1, 10, 30 or 100 % of the conversations, tiny at most 10,000 of a family
    num_conversations: Annotated[int, Field(ge=1000)] = 1_000_000  # of all stages, at full scale
    stripped_share: Annotated[float, Field(ge=0, le=1)] = 0.1  # of `mixed`, without its reasoning: reasoning off
    truncated_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of `truncated`, that is 5 % of all
    seq_length: Annotated[int, Field(ge=32)] = 384  # tokens of a row: the longest conversation with tools has some 320
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the files there


@step
def main(config: Config) -> Dataset:
    """Generate, control the reasoning, render, tokenise, pack."""
    base = Checkpoint.load(config.base_path or first_published("nano2-long-model", "nano2-pretrain-model"))
    tokenizer = tokenizer_from(find_tokenizer(str(base.tokenizer_path or base.path)).json_text())
    stages = {
        "mixed": control(mixed(config, 0.88, "mixed"), config, off_share=config.stripped_share),
        "tools": conversations("workplace_assistant", 0.02, config, "tools"),
        "truncated": control(mixed(config, 0.1, "cut"), config, cut_share=config.truncated_share),
    }
    with output_folder(config.output_dir) as folder:
        counts = dict.fromkeys(("sequences", "tokens", "trained_tokens"), 0)
        for stage, stream in stages.items():
            by_split: dict[str, list[Conversation]] = {"train": [], "valid": []}
            for conversation in stream:  # each one sequence, or, with tools, one a turn of the assistant
                by_split[conversation.split] += training_spans(conversation, "nano2")
            for split, sequences in by_split.items():
                sequences.sort(key=lambda sequence: stable_hash(str(config.seed), sequence.key("nano2")))
                encoded = encode_conversations(sequences, tokenizer, "nano2")  # mask: 1 where the NEXT token is trained
                fitting = [(ids, mask) for ids, mask in encoded if len(ids) <= config.seq_length and mask.any()]
                if not fitting:
                    raise UserError(
                        f"{stage}: none of {len(encoded)} {split} sequences fits", "larger: --scale, --seq-length"
                    )
                file = folder / split / f"{stage}.parquet"
                written = write_rows(file, fitting, config.seq_length, concatenate=stage != "tools")
                line = f"{stage:9} {split:5} {written['sequences']:6,} sequences {written['rows']:6,} rows"
                print(f"{line}, {len(encoded) - len(fitting)} too long", file=sys.stderr)
                if split == "train":
                    counts = {name: count + written[name] for name, count in counts.items()}
        dataset = SFTPack(
            path=folder,
            num_examples=counts["sequences"],
            num_tokens=counts["tokens"],
            num_loss_tokens=counts["trained_tokens"],
            train_path=folder / "train",
            valid_path=folder / "valid",
            tokenizer_path=base.path,
            seq_len=config.seq_length,
            chat_template="nano2",
            reasoning=True,
            metrics={"scale": config.scale},
            sources=[Source(name="task-generators", detail=f"{', '.join(SHARES)}; seed {config.seed}")],
        )
        return dataset.save()


def mixed(config: Config, share: float, name: str) -> Iterator[Conversation]:
    """A share of all conversations, of every family its own share of them."""
    for family, of_family in SHARES.items():
        yield from conversations(family, share * of_family, config, name)


def conversations(family: str, share: float, config: Config, name: str) -> Iterator[Conversation]:
    """Tasks with their reasoning and answer, a share of all conversations; another `name` draws others.

    All are of the generators' split `train`, with repetitions: RL has `valid`, evaluation has `eval`.
    """
    count = apply_scale(round(share * config.num_conversations), config.scale)
    seed = stable_hash(name, str(config.seed)) % 2**31
    for task in generate_tasks(family, "train", count, seed):
        messages, tools = to_messages(task), prompt_tools(task)
        split = split_of(task.canonical, 0.03, config.seed)  # 3 % of the tasks are for the held-out loss
        yield Conversation(family, messages, split, tools=tools or None)


def control(
    stream: Iterator[Conversation], config: Config, off_share: float = 0.0, cut_share: float = 0.0
) -> Iterator[Conversation]:
    """Strip the reasoning of a share of the conversations, cut that of another at a random word; answers stay."""
    return control_reasoning(stream, off_share=off_share, truncated_share=cut_share, seed=config.seed)


if __name__ == "__main__":
    run_step(main, Config)
