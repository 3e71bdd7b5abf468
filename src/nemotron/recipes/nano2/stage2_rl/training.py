#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "All of RL: instructions, tools, a reward model, RLHF; the last two policies merged."
# name = "nano2/rl"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training", default = "tiny", schema = "training.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, step 2 of 3: the four trainings in their order, and the merge of the last two policies.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python training.py --dataset-path DIR --ifeval.lr 2e-4 --merge-share 0.7

    IFEval-RL -> DPO -> a reward model -> RLHF -> merge

The merged model has the weights (1 - a) w1 + a w2: w1 of the policy after DPO, w2 of that after RLHF, a = 0.5 (arXiv
2508.14444, which tried 0.1 to 0.9): it is to keep what either is better at.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from nemotron.kit import Checkpoint, Dataset, Model, Scale, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step, step_config
from nemotron.recipes.nano2.stage2_rl import training_dpo, training_ifeval, training_reward, training_rlhf
from nemotron.recipes.nano2.stage2_rl.judging import RewardModel
from nemotron.recipes.nano2.stage2_rl.sampling import load_policy, save_policy


@dataclass
class Config:
    """The configs of the four trainings."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale | None = None  # of the four: one smaller than that of the data takes its share of the prompts
    ifeval: training_ifeval.Config = step_config(training_ifeval.Config, "dataset_path")  # of training_ifeval.py
    dpo: training_dpo.Config = step_config(training_dpo.Config, "checkpoint_path")  # of training_dpo.py
    reward: training_reward.Config = step_config(training_reward.Config, "checkpoint_path")  # of training_reward.py
    rlhf: training_rlhf.Config = step_config(training_rlhf.Config, "reward_path")  # of training_rlhf.py
    merge_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # a: 0 is the policy after DPO, 1 that after RLHF
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Train four times, merge, save."""
    dataset = Dataset.load(path=config.dataset_path)
    after_ifeval = training_ifeval.main(
        replace(config.ifeval, scale=config.ifeval.scale or config.scale, dataset_path=dataset.path)
    )
    after_dpo = training_dpo.main(
        replace(config.dpo, scale=config.dpo.scale or config.scale, checkpoint_path=after_ifeval.path)
    )
    judge = training_reward.main(
        replace(config.reward, scale=config.reward.scale or config.scale, checkpoint_path=after_dpo.path)
    )
    after_rlhf = training_rlhf.main(
        replace(config.rlhf, scale=config.rlhf.scale or config.scale, reward_path=judge.path)
    )

    # --- Load what the merged model is made from: its record names what is loaded; evaluation finds the judge there
    RewardModel.load(path=judge.path)
    first, second = (Checkpoint.load(path=checkpoint.path) for checkpoint in (after_dpo, after_rlhf))
    model = load_policy(first).model
    with torch.no_grad():
        for weight, other in zip(model.parameters(), load_policy(second).model.parameters(), strict=True):
            weight.lerp_(other, config.merge_share)  # (1 - a) weight + a other
    with output_folder(config.output_dir) as folder:
        save_policy(model, second, folder)
        checkpoint = Model(
            path=folder,
            num_steps=after_ifeval.num_steps + after_dpo.num_steps + after_rlhf.num_steps,
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=second.chat_template,
            reasoning=True,
            num_parameters=model.num_parameters()[0],
            metrics={"merge_share": config.merge_share},
        )
        return checkpoint.save()


if __name__ == "__main__":
    run_step(main, Config)
