#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Pretrain a small dense Nemotron-H (Mamba-2, attention, MLP) on the curated streams."
# name = "nano2/pretrain"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training", default = "tiny", schema = "training.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 0, step 2 of 3: from token streams to a base model.

    python data_curation.py --scale tiny | python training.py > checkpoint.json
    python training.py --dataset-path DIR --lr 2e-3

Shapes: B sequences, L = seq_length, V vocabulary.

Simplified against the paper (arXiv 2508.14444, section 2): one process, fp32 instead of FP8, 7 blocks instead of 62;
the pattern of the blocks, squared ReLU, the three data phases and the warm-up, stable, decay schedule are the paper's.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nemo_runspec.errors import RunFailed, UserError
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.training.lanes import Lanes
from nemotron.stack.training.loaders import Batch, BlendLoader
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr


@dataclass
class Config:
    """What to train on, how long and how fast."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale | None = None  # default: that of the data; tiny where it says none
    num_sequences: Annotated[int, Field(ge=1)] = 600_000  # at full scale
    seq_length: Annotated[int, Field(ge=8)] = 128  # tokens
    batch_size: Annotated[int, Field(ge=1)] = 8  # sequences; the paper's is 768 of 8,192 tokens
    lr: Annotated[float, Field(gt=0)] = 4e-3  # the smaller the model, the larger; the paper's is 4.5e-4
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.01  # of lr, at the end (4.5e-6)
    warmup_steps: Annotated[int, Field(ge=0)] = 50  # in which lr rises from 0
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.18  # the last 3.6 T of 20 T tokens
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of the matrices
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: the halves of a batch one after another, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


# Nano 2's kinds of blocks, small: Mamba-2 (M), squared-ReLU MLP (-) and one grouped-query attention (*).
ARCHITECTURE = NemotronHConfig(
    hybrid_override_pattern="M-M*-M-",
    hidden_size=128,
    initializer_range=0.05,  # the narrower, the larger: the 12B, 5,120 wide, begins with 0.02
    intermediate_size=512,  # 4 times the hidden size, as in the 12B
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mamba_num_heads=8,
    mamba_head_dim=32,
    ssm_state_size=32,
    n_groups=2,
    chunk_size=32,
)


@step
def main(config: Config) -> Checkpoint:
    """Build the model, train it, save it in Hugging Face layout."""
    # --- Data: which sequence comes when follows from the seed
    dataset = Dataset.load(path=config.dataset_path)
    scale = config.scale or str(dataset.metrics.get("scale", "tiny"))
    steps = apply_scale(config.num_sequences, scale) // config.batch_size
    if steps <= config.warmup_steps:
        raise UserError(f"{steps} steps, of which warmup_steps = {config.warmup_steps}", "--warmup-steps takes fewer")
    loader = BlendLoader(dataset.path, config.seq_length, steps * config.batch_size, config.seed)

    # --- Model, optimizer, schedule
    torch.manual_seed(config.seed)
    model = NemotronH(replace(ARCHITECTURE, vocab_size=loader.vocab_size))
    settings = OptimizerConfig(
        lr=config.lr, min_lr=config.lr * config.final_lr_share, adam_beta2=0.95, weight_decay=config.weight_decay
    )
    decay_steps = min(round(steps * config.decay_share), steps - config.warmup_steps)
    schedule = SchedulerConfig(lr_warmup_iters=config.warmup_steps, lr_wsd_decay_iters=decay_steps)
    optimizer = build_optimizer(model, settings)

    # --- The loop. Loss: mean over all tokens of the batch, in nats
    model.train()
    lanes = Lanes(config.threads)

    def loss_sum(rows: Batch) -> Tensor:
        return next_token_loss(model(rows.input_ids_BL).logits, rows.labels_BL) * rows.labels_BL.numel()

    progress, losses = Progress(steps, label="pretrain"), list[float]()
    for i in range(steps):
        lr = lr_at(i, steps, settings, schedule)
        set_lr(optimizer, lr)
        batch = loader.next_batch(config.batch_size)
        loss = lanes.add_gradients(model, loss_sum, batch.halves(), batch.labels_BL.numel())
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"loss {losses[-1]}, gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        progress.update(i + 1, tokens=batch.input_ids_BL.numel(), loss=losses[-1], lr=lr)
    progress.close()

    # --- Save: weights and tokenizer, with the data that they come from
    with output_folder(config.output_dir) as folder:
        model.save_pretrained(folder)
        shutil.copytree(dataset.tokenizer_path or dataset.path / "tokenizer", folder, dirs_exist_ok=True)
        checkpoint = Model(
            path=folder,
            num_steps=steps,
            training_loss=sum(losses[-100:]) / len(losses[-100:]),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            tokens=steps * config.batch_size * config.seq_length,
            num_parameters=model.num_parameters()[0],
            metrics={"seed": config.seed, "seq_length": config.seq_length, "batch_size": config.batch_size},
        )
        return checkpoint.save()


if __name__ == "__main__":
    run_step(main, Config)
