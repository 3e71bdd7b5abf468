#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Distil the large model into the pruned one: forward KL on the mixture, and the curve of its recovery."
# name = "nano2/compressed"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_distil", default = "tiny", schema = "training_distil.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 3, step 2 of 3, second half: the pruned model learns to predict what the large one predicts.

    python data_curation.py | python training_prune.py | python training_distil.py > checkpoint.json
    python training_distil.py --student-path MODEL --lr 1e-3

The loss is forward KL alone, the mean over the trained tokens: what the model writes in rows of SFT, all of a window of
text. Shapes: B rows, L tokens of a row, T trained tokens, V vocabulary, E hidden size of the teacher.

Simplified against the paper (arXiv 2508.14444, section on compression): one process, fp32, one length of rows, and no
distillation between the cuts of depth and width; DPO, RLHF and merging do not follow.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from nemotron.stack.compression.distillation import forward_kl_sum, measure_recovery
from nemotron.stack.models import NemotronH
from nemotron.stack.training.lanes import Lanes
from nemotron.stack.training.loaders import Batch, PackedLoader
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr

MEASURED = (1 / 8, 1 / 4, 1 / 2, 1)  # shares of the tokens after which the recovery is measured


@dataclass
class Config:
    """What to distil, how long and how fast."""

    student_path: UserPath | None = None  # default: the pruned model of the script before in the pipe
    scale: Scale | None = None  # one smaller than that of the data takes its share of the rows
    epochs: Annotated[int, Field(ge=1)] = 1  # of the mixture
    batch_size: Annotated[int, Field(ge=1)] = 3  # rows; the paper's is 768
    lr: Annotated[float, Field(gt=0)] = 1e-3  # a quarter of that of pretraining: the weights are trained
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.1  # of lr, where the cosine ends
    warmup_steps: Annotated[int, Field(ge=0)] = 10  # in which lr rises from 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of the matrices
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: the halves of a batch one after another, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Distil over the whole mixture, measuring on the way; save."""
    pruned = Checkpoint.load(path=config.student_path, key="model")
    if pruned.dataset_path is None:
        raise UserError(f"{pruned.ref} does not say on what it was pruned", "training_prune.py makes one that does")
    large, dataset = Checkpoint.input_of(pruned), Dataset.load(path=pruned.dataset_path)
    train, valid = (PackedLoader(dataset.path / f"{name}.parquet", None, config.seed) for name in ("train", "valid"))
    rows, tokens = config.epochs * dataset.at_scale(train.num_rows, config.scale), config.batch_size * train.seq_len
    steps = max(1, rows // config.batch_size)

    student, teacher = (NemotronH.from_pretrained(made.checkpoint_path or made.path) for made in (pruned, large))
    torch.set_num_threads(1)  # of an operation, as in the loop
    progress, losses = Progress(steps, label="distil"), list[float]()
    recovery = {0: measure_recovery(student, teacher, valid.all_batches(8))}
    # --- The loop is `distil`; between its steps the recovery is measured on held-out rows
    for i, loss in enumerate(distil(student, teacher, train, config, steps), start=1):
        losses.append(loss)
        progress.update(i, tokens=tokens, loss=loss)
        if i in {max(1, round(share * steps)) for share in MEASURED}:
            recovery[i] = measure_recovery(student, teacher, valid.all_batches(8))
            progress.note(f"held out: {recovery[i].kl:.3f} nats of KL a token")
    progress.close()

    # --- Save: weights, tokenizer and template, with the pruned model that it was, its teacher, and the data
    with output_folder(config.output_dir) as folder:
        student.save_pretrained(folder)
        copy_tokenizer(pruned.tokenizer_path or pruned.path, folder)
        checkpoint = Model(
            path=folder,
            num_steps=steps,
            training_loss=sum(losses[-100:]) / len(losses[-100:]),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=pruned.chat_template,
            reasoning=pruned.reasoning,
            tokens=steps * tokens,  # of whole rows, padding included
            num_parameters=student.num_parameters()[0],
            metrics={"recovery": [{"tokens": i * tokens} | asdict(at) for i, at in recovery.items()]},
        )
        return checkpoint.save()


def distil(
    student: NemotronH, teacher: NemotronH | None, train: PackedLoader, config: Config, steps: int
) -> Iterator[float]:
    """Train for so many steps; yields each loss, in nats a token; without a teacher, the labels' cross entropy."""
    last_lr = config.lr * config.final_lr_share
    settings = OptimizerConfig(lr=config.lr, min_lr=last_lr, adam_beta2=0.95, weight_decay=config.weight_decay)
    schedule = SchedulerConfig(lr_warmup_iters=min(config.warmup_steps, steps // 2), lr_decay_style="cosine")
    optimizer = build_optimizer(student, settings)
    lanes = Lanes(config.threads)

    def loss_sum(rows: Batch) -> Tensor:
        trained_BL = rows.loss_mask_BL.bool()
        logits_TV = student(rows.input_ids_BL, rows.seq_idx_BL, trained_BL).logits
        if teacher is None:
            return selected_loss_sum(logits_TV, rows.labels_BL[trained_BL])
        with torch.no_grad():
            teacher_TE = teacher.hidden_states(rows.input_ids_BL, rows.seq_idx_BL)[0][trained_BL]
        return forward_kl_sum(logits_TV, teacher_TE, teacher.lm_head.weight)

    for i in range(steps):
        set_lr(optimizer, lr_at(i, steps, settings, schedule))
        batch = train.next_batch(config.batch_size)
        loss = lanes.add_gradients(student.train(), loss_sum, batch.halves(), batch.num_trained)
        grad_norm = torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_grad)
        if not math.isfinite(loss.item() + grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"loss {loss.item()}, gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


if __name__ == "__main__":
    run_step(main, Config)
