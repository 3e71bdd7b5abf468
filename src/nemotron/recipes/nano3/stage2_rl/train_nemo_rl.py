#!/usr/bin/env python
# /// script
# dependencies = ["nemo-rl"]
#
# [tool.runspec]
# docs = "GRPO with NeMo Gym at the published size, on NeMo-RL 0.7.0: RLVR, SWE, RLHF."
# name = "nano3/rl/nemo-rl"
# image = "nvcr.io/nvidia/nemo-rl:v0.7.0"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "nemo_rl_schema.py:RLConfig"
#
# [tool.runspec.resources]
# nodes = 32
# gpus_per_node = 8
# ///
"""Stage 2 at the published size: the same step as `rlvr.py` and `rlhf.py`, done by NeMo-RL on a cluster.

    nemotron nano3 rl rlvr --run slurm                  # the published RLVR, config/default.yaml
    nemotron nano3 rl rlhf --run slurm                  # then RLHF, then `rl rlvr -c final`
    nemotron super3 rl rlvr -c rlvr1 --run slurm        # rlvr1..3, swe1, swe2 of Nemotron 3 Super

Reads records of NeMo Gym (`nemotron nano3 data prep rl -c published`) and a Megatron checkpoint, as Megatron-Bridge
saves it; publishes the last checkpoint, which is one as well. This process runs on the first node of a Ray cluster over
all of them, and tells Ray's workers what to do: Megatron-Core trains, vLLM draws responses, Gym's servers verify them.

The image has NeMo-RL 0.7.0. docs/guides/published-size-rl.md says which line of `rlvr.py` is which option here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from typing import TYPE_CHECKING

from nemo_rl.algorithms.grpo import MasterConfig, async_grpo_train, grpo_train, setup
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.utils import setup_response_data
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
from nemo_rl.models.generation import configure_generation_config

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import Preempted, RunFailed, UserError, run_main
from nemotron.kit import RLPrompts, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint, warn_of_context_parallelism
from nemotron.kit.nemo_rl import check_gym_prompts, last_step, master_values

if TYPE_CHECKING:
    from nemotron.kit.run import Run
    from nemotron.recipes.nano3.stage2_rl.nemo_rl_schema import RLConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: RLConfig = load_script_config(__file__, inputs=read_pipe)
    warn_of_context_parallelism(cfg.policy.megatron_cfg)
    with open_run(cfg, script=__file__) as run:
        prompts = RLPrompts.load(path=cfg.data.train.data_path)
        check_gym_prompts(prompts)
        with run.phase("train"):
            steps = train(cfg, run)
        last = last_step(run.dir / "checkpoints")
        if last is None:
            raise RunFailed(f"NeMo-RL left no checkpoint in {run.dir / 'checkpoints'}")
        if last.number < steps:  # `checkpointing.checkpoint_must_save_by` has passed: saved, and left
            raise Preempted(last.weights)
        rollouts = steps * cfg.policy.train_global_batch_size
        checkpoint = MegatronCheckpoint(
            path=last.weights, num_steps=steps, dataset_path=prompts.path, metrics={"rollouts": rollouts}
        ).save(move=True)
        print_complete({"model": checkpoint})


def train(cfg: RLConfig, run: Run) -> int:
    """Hand the config on, and let the library train. Returns the number of steps that the whole training has."""
    master = MasterConfig(**master_values(cfg, run.dir))
    os.environ.setdefault("NRL_MEGATRON_CHECKPOINT_DIR", str(run.dir / "converted"))  # from Hugging Face, if it is that

    # ---- tokenizer and generation: Gym's agents talk to vLLM over HTTP
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    master.policy["generation"] = configure_generation_config(master.policy["generation"], tokenizer)
    setup_nemo_gym_config(master, tokenizer)

    # ---- prompts: records of Gym, as they are; all of the validation file is one batch. Steps are counted here, since
    # generation ahead would wait for more prompts when they have come to an end.
    train_prompts, valid_prompts = setup_response_data(tokenizer, master.data, env_configs=None)
    master.grpo["max_val_samples"] = master.grpo["val_batch_size"] = len(valid_prompts)
    steps = cfg.grpo.max_num_epochs * (len(train_prompts) // cfg.grpo.num_prompts_per_step)
    if not steps:
        raise UserError(f"{len(train_prompts)} prompts are fewer than grpo.num_prompts_per_step")
    steps = master.grpo["max_num_steps"] = min(steps, cfg.grpo.max_num_steps)

    # ---- workers: trainer, generator and Gym, on the nodes of the Ray cluster
    init_ray()
    (
        policy, generation, gym, _, prompt_loader, valid_loader, loss_fn, logger, checkpointer, state, master, teachers,
        teacher_names,
    ) = setup(master, tokenizer, train_prompts, valid_prompts)  # fmt: skip
    environments = {"nemo_gym": gym}

    # ---- the loop: GRPO steps, to the last one or to `checkpoint_must_save_by`
    if cfg.grpo.async_grpo.enabled:
        async_grpo_train(
            policy=policy, policy_generation=generation, dataloader=prompt_loader, val_dataloader=valid_loader,
            tokenizer=tokenizer, loss_fn=loss_fn, task_to_env=environments, val_task_to_env=environments, logger=logger,
            checkpointer=checkpointer, grpo_save_state=state, master_config=master,
            max_trajectory_age_steps=cfg.grpo.async_grpo.max_trajectory_age_steps, teacher_worker_groups=teachers,
            alias_to_group_alias=teacher_names,
        )  # fmt: skip
    else:
        grpo_train(
            policy, generation, prompt_loader, valid_loader, tokenizer, loss_fn, environments, environments, logger,
            checkpointer, state, master,
        )  # fmt: skip
    return steps


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
