#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Bits per byte of the base model on held-out text, beside a trigram model of the same training tokens."
# name = "nano2/pretrain"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/evaluation", default = "tiny", schema = "evaluation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 0, step 3 of 3: what the base model has learnt.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python evaluation.py < checkpoint.json

Model and data are both reached through the checkpoint. Bits per byte (loss in nats / ln 2 x tokens / bytes) do not
depend on the tokenizer; a model that has learnt more than which three tokens follow each other beats the trigram model.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset, Results, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.scale import apply_scale
from nemotron.kit.schemas.group import Scale
from nemotron.stack.evaluation.language_model import score_text, token_byte_lengths
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import BlendLoader, held_out_documents


@dataclass
class Config:
    """What to evaluate."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale | None = None  # of num_documents; default: all that are held out
    num_documents: Annotated[int, Field(ge=2)] = 10_000  # held-out documents of each source, at full scale
    batch_size: Annotated[int, Field(ge=1)] = 16  # windows of text at once
    trigram: bool = True  # also count the trigram model
    threads: Annotated[int, Field(ge=1)] = 1  # of the processor
    output_dir: Path | None = None  # also leave results.json there


@step
def main(config: Config) -> Results:
    """Score the held-out text of every source."""
    checkpoint = Checkpoint.load(path=config.checkpoint_path)
    batches = [checkpoint.metrics.get(name) for name in ("seed", "seq_length", "batch_size")]
    if checkpoint.dataset_path is None or None in batches:
        raise UserError(f"{checkpoint.ref} does not say what it was trained on", "training.py of this folder makes one")
    dataset = Dataset.load(path=checkpoint.dataset_path)
    torch.set_num_threads(config.threads)
    model = NemotronH.from_pretrained(checkpoint.checkpoint_path or checkpoint.path).eval()

    # --- What is held out, and what the model has seen: the trigram model counts exactly those tokens
    held_out = held_out_documents(dataset.path)
    if config.scale is not None:
        limit = max(2, apply_scale(config.num_documents, config.scale))
        held_out = {source: documents[:limit] for source, documents in held_out.items()}
    seed, seq_length, batch_size = (int(str(value)) for value in batches)
    loader = BlendLoader(dataset.path, seq_length, checkpoint.num_steps * batch_size, seed)
    for _ in range(checkpoint.num_steps):
        loader.next_batch(batch_size)

    text = score_text(
        model,
        held_out,
        loader.trained_tokens() if config.trigram else None,
        token_byte_lengths(load_tokenizer(checkpoint.tokenizer_path or checkpoint.path)),
        seq_len=seq_length,
        batch_size=config.batch_size,
    )
    with output_folder(config.output_dir) as folder:
        results = Results(path=folder, metrics={"text": text, "training_loss": checkpoint.training_loss})
        return results.save()


if __name__ == "__main__":
    run_step(main, Config)
