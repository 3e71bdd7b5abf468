#!/usr/bin/env python
# /// script
# dependencies = ["nemo-rl"]
#
# [tool.runspec]
# docs = "Direct preference optimisation at the published size, on NeMo-RL 0.7.0."
# name = "nano3/dpo/nemo-rl"
# image = "nvcr.io/nvidia/nemo-rl:v0.7.0"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/dpo"
# format = "omegaconf"
# schema = "nemo_rl_schema.py:DPOConfig"
#
# [tool.runspec.resources]
# nodes = 2
# gpus_per_node = 8
# ///
"""Stage 2 at the published size: the same step as `dpo.py`, done by NeMo-RL on a cluster.

    nemotron nano3 rl dpo --run slurm                   # config/dpo/default.yaml
    nemotron nano3 rl dpo --run slurm --dry-run         # image, layout, every file of the submission

Reads preferences and a Megatron checkpoint, as Megatron-Bridge saves it; publishes the last checkpoint, which is one as
well. This process runs on the first node of a Ray cluster over all of them, and tells its workers what to do.

The image has NeMo-RL 0.7.0. docs/guides/published-size-rl.md says which line of `dpo.py` is which option here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from typing import TYPE_CHECKING

from nemo_rl.algorithms.dpo import MasterConfig, dpo_train, setup
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.utils import setup_preference_data
from nemo_rl.distributed.virtual_cluster import init_ray

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import Preempted, RunFailed, run_main
from nemotron.kit import Preferences, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint
from nemotron.kit.nemo_rl import PAIRS_FILES, last_step, master_values, write_pairs

if TYPE_CHECKING:
    from nemotron.kit.run import Run
    from nemotron.recipes.nano3.stage2_rl.nemo_rl_schema import DPOConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: DPOConfig = load_script_config(__file__, inputs=read_pipe)
    with open_run(cfg, script=__file__) as run:
        preferences = Preferences.load(path=cfg.data.train.data_path)
        with run.phase("train"):
            write_pairs(preferences, run.dir / "pairs")
            steps = train(cfg, run)
        last = last_step(run.dir / "checkpoints")
        if last is None:
            raise RunFailed(f"NeMo-RL left no checkpoint in {run.dir / 'checkpoints'}")
        if last.number < steps:  # `checkpointing.checkpoint_must_save_by` has passed: saved, and left
            raise Preempted(last.weights)
        pairs = steps * cfg.policy.train_global_batch_size
        checkpoint = MegatronCheckpoint(
            path=last.weights, num_steps=steps, dataset_path=preferences.path, metrics={"pairs": pairs}
        ).save(move=True)
        print_complete({"model": checkpoint})


def train(cfg: DPOConfig, run: Run) -> int:
    """Hand the config on, and let the library train. Returns the number of steps that the whole training has."""
    values = master_values(cfg, run.dir)
    for split, name in zip(("train", "validation"), PAIRS_FILES, strict=True):  # as the library reads them
        values["data"][split]["data_path"] = str(run.dir / "pairs" / name)
    master = MasterConfig(**values)
    os.environ.setdefault("NRL_MEGATRON_CHECKPOINT_DIR", str(run.dir / "converted"))  # from Hugging Face, if it is that

    # ---- pairs: prompt, chosen and rejected answer, in the model's chat template
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    train_pairs, valid_pairs = setup_preference_data(tokenizer, master.data)

    # ---- workers on the nodes of the Ray cluster; the weights at the beginning are the reference
    init_ray()
    policy, _, pair_loader, valid_loader, loss_fn, logger, checkpointer, state, master = setup(
        master, tokenizer, train_pairs, valid_pairs
    )

    # ---- the loop: to the last step, or to `checkpoint_must_save_by`
    dpo_train(policy, pair_loader, valid_loader, tokenizer, loss_fn, master, logger, checkpointer, state)
    return min(cfg.dpo.max_num_steps, cfg.dpo.max_num_epochs * len(pair_loader))


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
