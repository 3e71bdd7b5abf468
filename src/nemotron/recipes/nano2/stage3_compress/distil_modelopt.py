#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge", "nvidia-modelopt"]
#
# [tool.runspec]
# docs = "Distil the pruned 9B from Nemotron Nano 12B v2 at the published size, on Megatron-Bridge and ModelOpt."
# name = "nano2/compressed/modelopt"
# image = "nvcr.io/nvidia/nemo:26.08"
# setup = "nemotron-cookbook"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/training_distil"
# default = "9b"
# format = "omegaconf"
# schema = "distil_modelopt_schema.py:DistilConfig"
#
# [tool.runspec.resources]
# nodes = 16
# gpus_per_node = 8
# ///
"""Stage 3, step 2 of 3, second half, at the published size: the same as `training_distil.py`, done by ModelOpt.

    nemotron nano2 compress distil -c 9b --run slurm

Data, batches, schedule and checkpoints are those of pretraining, `build` of train_megatron.py; the model is another
one: the pruned checkpoint, whose shape and weights it brings, wrapped with the large model as its teacher. Loss:
forward KL of the logits, mean over tokens, and nothing else. Publishes the last checkpoint in Megatron's layout.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from typing import TYPE_CHECKING, Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.distillation_provider import DistillationProvider, convert_to_distillation_provider
from megatron.bridge.training.distill import distill
from megatron.bridge.training.model_load_save import load_model_config
from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig
from megatron.core.utils import unwrap_model
from modelopt.torch.utils.plugins.mbridge import load_modelopt_megatron_checkpoint

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.kit import Checkpoint, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint, check_world_size, hand_on, last_iteration, preemptible
from nemotron.recipes.nano3.stage0_pretrain.train_megatron import build

if TYPE_CHECKING:
    from nemotron.recipes.nano2.stage3_compress.distil_modelopt_schema import DistilConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: DistilConfig = load_script_config(__file__, inputs=read_pipe)
    check_world_size(cfg.model, cfg.train, int(os.environ.get("WORLD_SIZE", "1")))
    with open_run(cfg, script=__file__) as run:
        saves = run.dir / "checkpoints"
        pruned = Checkpoint.load(path=cfg.distillation.student_path)
        recipe = build(cfg, saves)
        recipe.model = distilled(cfg)
        with run.phase("train"), preemptible(saves):
            distill(recipe)
        if run.rank == 0:  # one process publishes
            iteration = last_iteration(saves)
            checkpoint = MegatronCheckpoint(
                path=saves / f"iter_{iteration:07d}", num_steps=iteration, dataset_path=cfg.dataset.path,
                tokens=iteration * cfg.train.global_batch_size * cfg.model.seq_length,
                tokenizer_path=pruned.tokenizer_path, chat_template=pruned.chat_template, reasoning=pruned.reasoning,
            ).save(move=True)  # fmt: skip
            print_complete({"model": checkpoint})


def distilled(cfg: DistilConfig) -> DistillationProvider:
    """The pruned model as its checkpoint describes it, and the large one as its teacher, under the same layout."""
    folder = str(cfg.distillation.student_path)
    student, _ = load_model_config(folder)
    teacher = AutoBridge.from_hf_pretrained(str(cfg.distillation.teacher_path)).to_megatron_provider()
    for provider in (student, teacher):
        hand_on(cfg.model.fields(), provider, "model")

    def load(chunks: list[Any]) -> list[Any]:
        load_modelopt_megatron_checkpoint([unwrap_model(chunks[0])], folder, restore_modelopt_state=False)
        return chunks

    student.register_pre_wrap_hook(load)  # before the hook that adds the teacher
    kd_config = ModelOptDistillConfig(skip_lm_loss=True, logit_kl_temperature=cfg.distillation.logit_kl_temperature)
    return convert_to_distillation_provider(student, teacher, kd_config)


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
