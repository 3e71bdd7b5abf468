#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge"]
#
# [tool.runspec]
# docs = "Fine-tune Nemotron 3 Nano at the published size on Megatron-Bridge 0.6.2."
# name = "nano3/sft/megatron"
# image = "nvcr.io/nvidia/nemo:26.08"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "megatron_schema.py:SFTConfig"
#
# [tool.runspec.resources]
# nodes = 32
# gpus_per_node = 8
# ///
"""Stage 1 at the published size: the same step as `train.py`, done by Megatron-Bridge on a cluster.

    nemotron nano3 sft --run slurm                      # the published fine-tuning, config/default.yaml
    nemotron super3 sft --run slurm                     # Super's, by its own config

Reads the packed rows of `nemotron data pack` as they are, and a model: a checkpoint of `nano3 pretrain`, or one in
Hugging Face layout (`run.model=hf://…`). Publishes the last checkpoint.

What the library does not do: it scores no tasks, keeps the last weights instead of the best, and has one loss, the mean
over trained tokens. docs/guides/published-size.md says which line of `train.py` is which option here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.recipes import nemotronh
from megatron.bridge.training.config import (
    ConfigContainer,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.kit import SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import (
    MegatronCheckpoint,
    check_world_size,
    hand_on,
    keep_in_fp32,
    last_iteration,
    megatron_pack,
    preemptible,
    warn_of_context_parallelism,
)
from nemotron.kit.schemas.megatron import packing_multiple

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage1_sft.megatron_schema import SFTConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: SFTConfig = load_script_config(__file__, inputs=read_pipe)
    check_world_size(cfg.model, cfg.train, int(os.environ.get("WORLD_SIZE", "1")))
    with open_run(cfg, script=__file__) as run:
        saves, pack = run.dir / "checkpoints", SFTPack.load(path=cfg.dataset.path)
        if run.rank == 0:
            warn_of_context_parallelism(cfg.model)
        with run.phase("train"), preemptible(saves):
            finetune(build(cfg, pack, saves), forward_step)
        if run.rank == 0:  # one process publishes
            iteration = last_iteration(saves)
            checkpoint = MegatronCheckpoint(
                path=saves / f"iter_{iteration:07d}", num_steps=iteration, dataset_path=pack.path,
                tokens=iteration * cfg.train.global_batch_size * cfg.model.seq_length,
                tokenizer_path=pack.tokenizer_path, chat_template=pack.chat_template, reasoning=pack.reasoning,
            ).save(move=True)  # fmt: skip
            print_complete({"model": checkpoint})


def build(cfg: SFTConfig, pack: SFTPack, saves: Path) -> ConfigContainer:
    """The library's own config: its recipe, under what this config says."""
    recipe: ConfigContainer = getattr(nemotronh, cfg.recipe)()
    # ---- model, batches, optimiser, schedule: each key of ours is a field of the group there
    hand_on(cfg.model.fields(), recipe.model, "model")
    for group in ("train", "validation", "optimizer", "scheduler", "logger"):
        hand_on(getattr(cfg, group).model_dump(exclude={"train_tokens"}), getattr(recipe, group), group)
    recipe.scheduler.start_weight_decay = recipe.scheduler.end_weight_decay = cfg.optimizer.weight_decay  # this counts
    recipe.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)
    recipe.mixed_precision.grad_reduce_in_fp32 = cfg.ddp.grad_reduce_in_fp32  # from where the library copies it to ddp
    keep_in_fp32(recipe.optimizer)
    recipe.ddp.average_in_collective = False  # the loss is divided by all trained tokens, not rank by rank

    # ---- data: rows that are packed already; attention, convolution and state end where a conversation does
    multiple = packing_multiple(cfg.model)
    rows = megatron_pack(pack, cfg.dataset.seq_length, multiple, cfg.train.global_batch_size)
    recipe.dataset = GPTSFTDatasetConfig(
        seq_length=cfg.dataset.seq_length,
        dataset_root=str(saves.parent / "packed"),  # the library makes folders there, even for rows that it is given
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=cfg.dataset.seq_length,
            packed_train_data_path=rows.train,
            packed_val_data_path=rows.valid,
            pad_seq_to_mult=multiple,
        ),
        dataset_kwargs={"pad_to_max_length": True},  # else to 16 tokens, of which CP and SP want more
        do_test=False,
        num_workers=cfg.dataset.num_workers,
    )
    recipe.tokenizer.tokenizer_type, recipe.tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(rows.tokenizer)

    # ---- checkpoints: the run's folder, in which the same command goes on; at first the model that the config names
    hand_on(cfg.checkpoint.model_dump(exclude={"load"}), recipe.checkpoint, "checkpoint")
    recipe.checkpoint.save = recipe.checkpoint.load = str(saves)

    # ---- faults: saved on the scheduler's signal; NVRx where the config asks for it
    recipe.train.exit_signal_handler = True
    if cfg.ft.enable_ft_package:
        recipe.ft = FaultToleranceConfig(**cfg.ft.model_dump())
    if cfg.inprocess_restart.enabled:
        recipe.inprocess_restart = InProcessRestartConfig(**cfg.inprocess_restart.model_dump())
    if cfg.nvrx_straggler.enabled:
        recipe.nvrx_straggler = NVRxStragglerDetectionConfig(**cfg.nvrx_straggler.model_dump())
    return recipe


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
