#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Go on pretraining at eight times the length: whole documents, and questions about them."
# name = "nano2/long"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_long", default = "tiny", schema = "training_long.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 0, between steps 2 and 3: the base model learns to read far.

    python data_curation.py --scale tiny | python training.py | python training_long.py | python evaluation.py
    python training_long.py --base-path MODEL --lr 1e-3

Shapes: B sequences, L = seq_length, V vocabulary.

A constant learning rate on 80 % of the blend that pretraining ended with and 20 % documents with questions about them.
Simplified against the paper (arXiv 2508.14444, section 2): 8 times the length of before instead of 64, and a rule asks
the questions instead of a large model. Neither kind of block knows positions, so nothing in the model changes.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.long_documents import LONG
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.model_folder import copy_tokenizer
from nemotron.kit.schemas.optimizer import OptimizerConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import BlendLoader
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer, set_lr
from nemotron.stack.training.threads import choose_threads


@dataclass
class Config:
    """What to go on from, how long and how fast."""

    base_path: UserPath | None = None  # default: the model of the script before in the pipe
    scale: Scale | None = None  # default: that of the data; tiny where it says none
    num_sequences: Annotated[int, Field(ge=1)] = 16_000  # at full scale
    seq_length: Annotated[int, Field(ge=8)] = 1024  # tokens: that of a document with its questions
    batch_size: Annotated[int, Field(ge=1)] = 1  # sequences: as many tokens as before, in the paper, too
    lr: Annotated[float, Field(gt=0)] = 2e-4  # constant; the paper keeps the last one, here 4e-5: too few steps for it
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of the matrices
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1)] = 2  # of the processor, at most; measured as it trains: as many as are faster
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Load the base model, train it on long windows, save it."""
    # --- Data: that of the base model, in another mixture
    base = Checkpoint.load(path=config.base_path, key="model")
    if base.dataset_path is None or base.template is not None or base.metrics.get("blend", ".") != ".":
        raise UserError(f"{base.ref} is no model that training.py of this folder made", "--base-path names one")
    dataset = Dataset.load(path=base.dataset_path)
    if not (dataset.path / LONG).is_dir():
        raise UserError(
            f"{dataset.path} has no long documents", "data_curation.py makes some: --scale small makes more"
        )
    steps = apply_scale(config.num_sequences, config.scale or str(dataset.metrics.get("scale", "tiny")))
    steps = max(1, steps // config.batch_size)
    loader = BlendLoader(dataset.path / LONG, config.seq_length, steps * config.batch_size, config.seed)

    # --- Model and optimizer: the weights go on, the moments begin anew
    torch.manual_seed(config.seed)
    model = NemotronH.from_pretrained(base.checkpoint_path or base.path).train()
    settings = OptimizerConfig(lr=config.lr, min_lr=config.lr, adam_beta2=0.95, weight_decay=config.weight_decay)
    optimizer = build_optimizer(model, settings)
    set_lr(optimizer, config.lr)

    # --- The loop. Loss: mean over all tokens of the batch, in nats
    threads = choose_threads(model, (config.batch_size, config.seq_length), config.threads)
    progress, losses = Progress(steps, label="long"), list[float]()
    for i in range(steps):
        batch = loader.next_batch(config.batch_size)
        threads.begin()
        logits_BLV = model(batch.input_ids_BL).logits
        loss = next_token_loss(logits_BLV, batch.labels_BL)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"loss {losses[-1]}, gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        threads.end()
        progress.update(i + 1, tokens=batch.input_ids_BL.numel(), loss=losses[-1], lr=config.lr)
    progress.close()

    # --- Save: weights and tokenizer, with the data that they come from
    with output_folder(config.output_dir) as folder:
        model.save_pretrained(folder)
        copy_tokenizer(base.tokenizer_path or base.path, folder)
        sizes = {"seed": config.seed, "seq_length": config.seq_length, "batch_size": config.batch_size}
        checkpoint = Model(
            path=folder,
            num_steps=steps,
            training_loss=sum(losses[-100:]) / len(losses[-100:]),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            tokens=steps * config.batch_size * config.seq_length,
            num_parameters=model.num_parameters()[0],
            metrics={**sizes, "blend": LONG},
        )
        return checkpoint.save()


if __name__ == "__main__":
    run_step(main, Config)
