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
    python data_curation.py --scale tiny | python training.py | python training_long.py | python evaluation.py
    python evaluation.py < checkpoint.json

Model and data are both reached through the checkpoint. Bits per byte (loss in nats / ln 2 x tokens / bytes) do not
depend on the tokenizer; a model that has learnt more than which three tokens follow each other beats the trigram model.
After the long-context phase it also scores the model before it and after it on long windows: text by its position,
and the answers to questions about held-out documents.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.data_prep.long_documents import ASKED_ABOUT
from nemotron.kit import Checkpoint, Dataset, Results, Scale, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.scale import apply_scale
from nemotron.stack.evaluation.language_model import (
    bits_per_byte_by_position,
    score_answers,
    score_text,
    token_byte_lengths,
)
from nemotron.stack.evaluation.model import load_tokenizer
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import BlendLoader, PackedLoader, held_out_documents

SEQUENCES = ("seed", "seq_length", "batch_size")  # with the number of steps: which tokens were trained on
LONG_DOCUMENTS = 16  # of each source, that are scored as whole windows


@dataclass
class Config:
    """What to evaluate."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale = "full"  # of num_documents
    num_documents: Annotated[int, Field(ge=2)] = 10_000  # held-out documents of each source, at most, at full scale
    batch_size: Annotated[int, Field(ge=1)] = 16  # windows of text at once
    trigram: bool = True  # also count the trigram model
    threads: Annotated[int, Field(ge=1)] = 1  # of the processor
    output_dir: Path | None = None  # also leave results.json there


@step
def main(config: Config) -> Results:
    """Score the held-out text of every source; after the long-context phase long windows as well, before and after."""
    checkpoint = Checkpoint.load(path=config.checkpoint_path, key="model")
    before = Checkpoint.input_of(checkpoint) if Checkpoint.role() in checkpoint.inputs else None
    phases = [phase for phase in (before, checkpoint) if phase is not None]
    if checkpoint.dataset_path is None or any(name not in phase.metrics for phase in phases for name in SEQUENCES):
        raise UserError(f"{checkpoint.ref} does not say what it was trained on", "training.py of this folder makes one")
    dataset = Dataset.load(path=checkpoint.dataset_path)
    torch.set_num_threads(config.threads)
    model = NemotronH.from_pretrained(checkpoint.checkpoint_path or checkpoint.path).eval()
    byte_lengths = token_byte_lengths(load_tokenizer(checkpoint.tokenizer_path or checkpoint.path))

    # --- What is held out, in windows as short as those of the first phase, whatever came after it
    limit = max(2, apply_scale(config.num_documents, config.scale))
    held_out = {source: documents[:limit] for source, documents in held_out_documents(dataset.path).items()}
    text = score_text(
        model,
        held_out,
        np.concatenate([trained_tokens(phase, dataset) for phase in phases]) if config.trigram else None,
        byte_lengths,
        seq_len=int(str(phases[0].metrics["seq_length"])),
        batch_size=config.batch_size,
    )
    metrics: dict[str, Any] = {"text": text, "training_loss": checkpoint.training_loss}
    if before is not None:
        model_before = NemotronH.from_pretrained(before.checkpoint_path or before.path).eval()
        questions = PackedLoader(dataset.path / str(checkpoint.metrics["blend"]) / "valid.parquet", None, seed=0)
        long = ([d for d in group if len(d) > questions.seq_len][:LONG_DOCUMENTS] for group in held_out.values())
        documents = list(chain.from_iterable(long))
        metrics["long"] = {
            name: score_long(scored, name, documents, byte_lengths, questions)
            for name, scored in (("before", model_before), ("after", model))
        }
    with output_folder(config.output_dir) as folder:
        results = Results(path=folder, metrics=metrics)
        return results.save()


def trained_tokens(phase: Checkpoint, dataset: Dataset) -> np.ndarray:
    """Exactly the tokens of a phase, which the trigram model counts: they follow from the seed."""
    seed, seq_length, batch_size = (int(str(phase.metrics[name])) for name in SEQUENCES)
    blend = dataset.path / str(phase.metrics.get("blend", "."))
    loader = BlendLoader(blend, seq_length, phase.num_steps * batch_size, seed)
    for _ in range(phase.num_steps):
        loader.next_batch(batch_size)
    return loader.trained_tokens()


def score_long(
    model: NemotronH, name: str, documents: Sequence[np.ndarray], byte_lengths: np.ndarray, questions: PackedLoader
) -> dict[str, dict[str, float]]:
    """Answers with all of the document and with its end alone; text by its position, and its second half in pieces.

    What a model loses where it sees less is what a long window gives it.
    """
    short, half, length = questions.seq_len // 8, questions.seq_len // 2, questions.seq_len
    scores = {"answers": score_answers(model, questions.all_batches(4))}
    scores["answers_without_document"] = score_answers(model, questions.all_batches(4), length - ASKED_ABOUT)
    if documents:
        windows_NL = np.stack([document[: length + 1] for document in documents])
        pieces_NL = np.concatenate([windows_NL[:, i : i + short + 1] for i in range(half, length, short)])
        scores["text"] = bits_per_byte_by_position(model, windows_NL, byte_lengths, (short, half, length))
        pieces = bits_per_byte_by_position(model, pieces_NL, byte_lengths, (short,), 4 * 8)
        scores["text"][f"{half}-{length} in windows of {short}"] = pieces[f"0-{short}"]
    for kind, values in scores.items():
        print(f"{name}, {kind}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()), file=sys.stderr)
    return scores


if __name__ == "__main__":
    run_step(main, Config)
