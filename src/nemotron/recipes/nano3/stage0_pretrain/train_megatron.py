#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge"]
#
# [tool.runspec]
# docs = "Pretrain Nemotron 3 Nano at the published size on Megatron-Bridge 0.6.2."
# name = "nano3/pretrain/megatron"
# image = "nvcr.io/nvidia/nemo:26.08"
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

The library brings the model, its kernels and the loop; what decides the training is in the config: length, batch,
tokens, schedule, layout. docs/guides/published-size.md says which line of `train.py` is which option here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.recipes import nemotronh
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
from megatron.bridge.training.config import (
    ConfigContainer,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.pretrain import pretrain
from megatron.core.quantization.quant_config import RecipeConfig

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.kit import PretrainBlend, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import (
    MegatronCheckpoint,
    check_world_size,
    first_iteration,
    hand_on,
    keep_in_fp32,
    last_iteration,
    megatron_blend,
    preemptible,
    warn_of_context_parallelism,
)

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage0_pretrain.megatron_schema import PretrainConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: PretrainConfig = load_script_config(__file__, inputs=read_pipe)
    check_world_size(cfg.model, cfg.train, int(os.environ.get("WORLD_SIZE", "1")))
    with open_run(cfg, script=__file__) as run:
        saves = run.dir / "checkpoints"
        if run.rank == 0:
            warn_of_context_parallelism(cfg.model)
        first = first_iteration(cfg.checkpoint.load, cfg.dataset, run.registry)
        callbacks = None if first is None else from_its_beginning(first)
        with run.phase("train"), preemptible(saves):
            pretrain(build(cfg, saves), forward_step, callbacks)
        if run.rank == 0:  # one process publishes
            iteration = last_iteration(saves)
            checkpoint = MegatronCheckpoint(
                path=saves / f"iter_{iteration:07d}", num_steps=iteration, dataset_path=cfg.dataset.path,
                phase=cfg.dataset.phase, tokens=iteration * cfg.train.global_batch_size * cfg.model.seq_length,
                tokenizer_path=PretrainBlend.load(path=cfg.dataset.path).tokenizer_path,
            ).save(move=True)  # fmt: skip
            print_complete({"model": checkpoint})


def build(cfg: PretrainConfig, saves: Path) -> ConfigContainer:
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
    if cfg.model.quant_recipe is not None:
        recipe.model.quant_recipe = RecipeConfig.from_config_dict(cfg.model.quant_recipe.model_dump(exclude_none=True))

    # ---- data: the weights of one phase of the blend; documents of the other splits are what it validates on
    blend = megatron_blend(PretrainBlend.load(path=cfg.dataset.path), cfg.dataset.phase)
    recipe.dataset.blend, recipe.dataset.split = None, None
    recipe.dataset.blend_per_split = [blend.train, blend.valid, None]
    recipe.dataset.seq_length = cfg.dataset.seq_length
    recipe.dataset.path_to_cache = str(saves.with_name("indices"))  # else beside the streams, in the artifact
    recipe.dataset.num_workers = cfg.dataset.num_workers
    recipe.tokenizer.tokenizer_type, recipe.tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(blend.tokenizer)

    # ---- checkpoints: the run's folder, in which the same command goes on; else those that the config names
    hand_on(cfg.checkpoint.model_dump(exclude={"load"}), recipe.checkpoint, "checkpoint")
    recipe.checkpoint.save = str(saves)
    recipe.checkpoint.load = str(saves) if last_iteration(saves) or not cfg.checkpoint.load else cfg.checkpoint.load

    # ---- faults: saved on the scheduler's signal; NVRx where the config asks for it
    recipe.train.exit_signal_handler = True
    if cfg.ft.enable_ft_package:
        recipe.ft = FaultToleranceConfig(**cfg.ft.model_dump())
    if cfg.inprocess_restart.enabled:
        recipe.inprocess_restart = InProcessRestartConfig(**cfg.inprocess_restart.model_dump())
    if cfg.nvrx_straggler.enabled:
        recipe.nvrx_straggler = NVRxStragglerDetectionConfig(**cfg.nvrx_straggler.model_dump())
    return recipe


def from_its_beginning(first: int) -> CallbackManager:
    """Reads the blend of a later phase from its beginning, where the phase begins at the iteration `first`.

    The library counts sequences of the whole schedule: from this blend it would draw those of all phases, shuffle them
    over all epochs that these make, and read the last ones. Of a blend as large as its phase a quarter to a third of
    the documents would never be read, and about as many twice or more.
    """

    def before_data(context: CallbackContext) -> None:
        train, progress = context.state.cfg.train, context.state.train_state
        assert progress.step >= first, f"checkpoint.load has iteration {progress.step}, and its artifact {first} steps"
        context.user_state["consumed"] = progress.consumed_train_samples
        train.train_samples = (train.train_iters - first) * train.global_batch_size
        progress.consumed_train_samples = (progress.step - first) * train.global_batch_size

    def behind_data(context: CallbackContext) -> None:
        context.state.cfg.train.train_samples = None
        context.state.train_state.consumed_train_samples = context.user_state["consumed"]

    callbacks = CallbackManager()
    callbacks.register("on_data_init_start", before_data)
    callbacks.register("on_train_start", behind_data)
    return callbacks


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
