#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Supervised fine-tuning of the base model in three stages: mixed, tools, truncated."
# name = "nano2/sft"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training", default = "tiny", schema = "training.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 1, step 2 of 3: from the base model to one that answers.

    python data_curation.py --scale tiny | python training.py > checkpoint.json
    python training.py --dataset-path DIR --base-path MODEL --lr 2e-3

Shapes: B rows, L tokens of a row, T trained tokens, V vocabulary. Conversations in a row do not see each other.
Simplified against the paper (arXiv 2508.14444, section 3.1): one process, fp32, one schedule over the three stages.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nemo_runspec.errors import RunFailed, UserError
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.model_folder import copy_tokenizer
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.training.lanes import Lanes
from nemotron.stack.training.loaders import Batch, PackedLoader
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr

STAGES = ("mixed", "tools", "truncated")
Epochs = Annotated[int, Field(ge=0)]


@dataclass
class Config:
    """What to train on, how long and how fast."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    base_path: UserPath | None = None  # default: the model with whose tokenizer the data was made
    scale: Scale | None = None  # one smaller than that of the data takes its share of the rows
    epochs: tuple[Epochs, Epochs, Epochs] = (3, 1, 1)  # of `mixed`, `tools`, `truncated`
    seq_length: Annotated[int, Field(ge=32)] = 384  # tokens of a row, as the data has them
    batch_size: Annotated[int, Field(ge=1)] = 2  # rows
    lr: Annotated[float, Field(gt=0)] = 2.5e-3  # the smaller the model, the larger
    warmup_steps: Annotated[int, Field(ge=0)] = 30  # in which lr rises from 0
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.4  # the last of the steps, in which lr falls to 0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: the halves of a batch one after another, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Train on the three stages one after another, measure the held-out loss, save."""
    dataset = Dataset.load(path=config.dataset_path)
    if (base_path := config.base_path or dataset.tokenizer_path) is None:
        raise UserError(f"{dataset.path} does not say which model it is for", "name it: --base-path")
    base = Checkpoint.load(path=base_path)
    train, valid = (
        {stage: PackedLoader(folder / f"{stage}.parquet", config.seq_length, config.seed) for stage in STAGES}
        for folder in (dataset.path / "train", dataset.path / "valid")
    )
    rows = [config.epochs[i] * dataset.at_scale(train[stage].num_rows, config.scale) for i, stage in enumerate(STAGES)]
    order = [stage for i, stage in enumerate(STAGES) for _ in range(rows[i] // config.batch_size)]
    if len(order) <= config.warmup_steps:
        raise UserError(f"{len(order)} steps, warmup_steps = {config.warmup_steps}", "--warmup-steps takes fewer")

    # --- Model, optimizer, schedule
    model = NemotronH.from_pretrained(base.checkpoint_path or base.path)
    settings = OptimizerConfig(lr=config.lr, min_lr=0.0, adam_beta2=0.95, weight_decay=0.1)
    decay_steps = min(round(len(order) * config.decay_share), len(order) - config.warmup_steps)
    schedule = SchedulerConfig(lr_warmup_iters=config.warmup_steps, lr_wsd_decay_iters=decay_steps)  # linear, both
    optimizer = build_optimizer(model, settings)  # AdamW

    # --- The loop. Loss: cross-entropy, mean over the trained tokens of the batch: what the model itself is to write
    model.train()
    lanes = Lanes(config.threads)
    progress, losses = Progress(len(order), label="sft"), list[float]()
    for i, stage in enumerate(order):
        lr = lr_at(i, len(order), settings, schedule)
        set_lr(optimizer, lr)
        batch = train[stage].next_batch(config.batch_size).trimmed()  # rows of `tools` are not full
        loss = lanes.add_gradients(model, partial(answer_nats, model), batch.halves(), batch.num_trained)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"loss {losses[-1]}, gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        progress.update(i + 1, tokens=batch.input_ids_BL.numel(), loss=losses[-1], lr=lr)
    valid_loss = {stage: validate(model, loader) for stage, loader in valid.items()}
    progress.note("held-out loss: " + ", ".join(f"{stage} {loss:.3f}" for stage, loss in valid_loss.items()))
    progress.close()

    # --- Save: weights, tokenizer and template, with the data and the model that they come from
    with output_folder(config.output_dir) as folder:
        model.save_pretrained(folder)
        copy_tokenizer(base.tokenizer_path or base.path, folder)
        checkpoint = Model(
            path=folder,
            num_steps=len(order),
            training_loss=sum(losses[-100:]) / len(losses[-100:]),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template="nano2",
            reasoning=True,
            tokens=len(order) * config.batch_size * config.seq_length,  # of whole rows, padding included
            num_parameters=model.num_parameters()[0],
            metrics={"valid_loss": valid_loss},
        )
        return checkpoint.save()


def answer_nats(model: NemotronH, rows: Batch) -> Tensor:
    """Cross-entropy of the trained tokens, a sum in nats."""
    answers_BL = rows.loss_mask_BL.bool()  # where the NEXT token, the label, is trained
    logits_TV = model(rows.input_ids_BL, rows.seq_idx_BL, answers_BL).logits
    return selected_loss_sum(logits_TV, rows.labels_BL[answers_BL])


@torch.no_grad()
def validate(model: NemotronH, loader: PackedLoader) -> float:
    """Held-out loss in nats, mean over trained tokens."""
    batches = [*loader.all_batches(8)]
    nats = sum(answer_nats(model.eval(), batch).item() for batch in batches)
    return nats / sum(batch.num_trained for batch in batches)


if __name__ == "__main__":
    run_step(main, Config)
