#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge"]
#
# [tool.runspec]
# docs = "Pretrain Nemotron 3 Nano at the published size on Megatron-Bridge 0.6.2."
# name = "nano3/pretrain/megatron"
# image = "nvcr.io/nvidia/nemo:25.11.nemotron_3_nano"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "megatron_schema.py:PretrainConfig"
#
# [tool.runspec.resources]
# nodes = 16
# gpus_per_node = 8
# ///
"""Stage 0 at the published size: the same step as `train.py`, done by Megatron-Bridge on a cluster.

    nemotron nano3 pretrain --run slurm                 # phase 1 of the published pretraining, config/default.yaml
    nemotron nano3 pretrain -c phase2 --run slurm       # goes on from its checkpoints
    nemotron nano3 pretrain --run slurm --dry-run       # image, layout, tokens, every file of the submission

Reads the token streams of `nemotron data tokenize` (docs/guides/published-size.md); publishes the last checkpoint.

The image has Megatron-Bridge 0.6.2; its tag is that of the library's documentation: look up the newest one. The library
brings the model, its kernels and the loop; what decides the training is in the config: length, batch, tokens, schedule,
layout. docs/guides/published-size.md says which line of `train.py` is which option here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.recipes import nemotronh
from megatron.bridge.training.config import ConfigContainer, InProcessRestartConfig, NVRxStragglerDetectionConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.pretrain import pretrain

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import Preempted, UserError, run_main
from nemotron.kit import PretrainBlend, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint, check_world_size, last_iteration, megatron_blend

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.megatron_schema import PretrainConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: PretrainConfig = load_script_config(__file__, inputs=read_pipe)
    check_world_size(cfg.model, cfg.train, int(os.environ.get("WORLD_SIZE", "1")))
    with open_run(cfg, script=__file__) as run:
        saves = run.dir / "checkpoints"
        with run.phase("train"):
            train(build(cfg, saves), saves)
        if run.rank == 0:  # one process publishes
            iteration = last_iteration(saves)
            checkpoint = MegatronCheckpoint(
                path=saves / f"iter_{iteration:07d}", num_steps=iteration, dataset_path=cfg.dataset.path,
                tokens=iteration * cfg.train.global_batch_size * cfg.model.seq_length,
            ).save(move=True)  # fmt: skip
            print_complete({"model": checkpoint})


def build(cfg: PretrainConfig, saves: Path) -> ConfigContainer:
    """The library's own config: its recipe, under what this config says."""
    recipe: ConfigContainer = getattr(nemotronh, cfg.recipe)()
    # ---- model, batches, optimiser, schedule: each key of ours is a field of the group there
    for group in ("model", "train", "validation", "optimizer", "scheduler", "logger"):
        hand_on(getattr(cfg, group).model_dump(exclude={"train_tokens"}), getattr(recipe, group), group)
    recipe.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)

    # ---- data: the weights of one phase of the blend; documents of the other splits are what it validates on
    blend = megatron_blend(PretrainBlend.load(path=cfg.dataset.path), cfg.dataset.phase)
    recipe.dataset.blend, recipe.dataset.split = None, None
    recipe.dataset.blend_per_split = [blend.train, blend.valid, None]
    recipe.dataset.seq_length = cfg.dataset.seq_length
    recipe.dataset.num_workers = cfg.dataset.num_workers
    recipe.tokenizer.tokenizer_model = str(blend.tokenizer)

    # ---- checkpoints: the run's folder, in which the same command goes on; else those that the config names
    hand_on(cfg.checkpoint.model_dump(exclude={"load"}), recipe.checkpoint, "checkpoint")
    recipe.checkpoint.save = str(saves)
    recipe.checkpoint.load = str(saves) if last_iteration(saves) or not cfg.checkpoint.load else cfg.checkpoint.load

    # ---- faults: saved on the scheduler's signal; NVRx where the config asks for it
    recipe.train.exit_signal_handler = True
    if cfg.inprocess_restart.enabled:
        recipe.inprocess_restart = InProcessRestartConfig(**cfg.inprocess_restart.model_dump())
    if cfg.nvrx_straggler.enabled:
        recipe.nvrx_straggler = NVRxStragglerDetectionConfig(**cfg.nvrx_straggler.model_dump())
    return recipe


def hand_on(values: dict[str, Any], target: object, group: str) -> None:
    """Set fields of an object of the library. Raises UserError for one that this version does not have."""
    for key, value in values.items():
        if not hasattr(target, key):
            raise UserError(f"{group}.{key}: {type(target).__name__} of this Megatron-Bridge has no such field")
        setattr(target, key, value)


def train(recipe: ConfigContainer, saves: Path) -> None:
    """The library's loop: to the last iteration, or to a checkpoint on a signal, after which the job is requeued."""
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # the library hears SIGTERM alone
    try:
        pretrain(recipe, forward_step)
    except SystemExit as leave:  # with 0 before the last iteration: a signal came, or time is up
        if leave.code or not (iteration := last_iteration(saves)):
            raise
        raise Preempted(saves / f"iter_{iteration:07d}") from None


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
