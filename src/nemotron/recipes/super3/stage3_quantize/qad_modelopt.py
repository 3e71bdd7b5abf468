#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge", "nvidia-modelopt"]
#
# [tool.runspec]
# docs = "Distil a model into itself quantised at the published size (QAD), on Megatron-Bridge and ModelOpt."
# name = "super3/qad/modelopt"
# image = "nvcr.io/nvidia/nemo:26.08"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/qad"
# format = "omegaconf"
# schema = "qad_modelopt_schema.py:QADConfig"
#
# [tool.runspec.resources]
# nodes = 16
# gpus_per_node = 8
# ///
"""Stage 3, second step, at the published size: the same as `qad.py`, done by Megatron-Bridge and ModelOpt.

    nemotron super3 qad --run slurm                     # 5 B tokens on the released table, config/qad/default.yaml
    nemotron super3 qad --run slurm --dry-run

Data, batches, schedule and checkpoints are those of the fine-tuning, `build` of train_megatron.py; the model is another
one. The student loads the full model, ModelOpt puts quantizers into it and calibrates them on the first rows, and the
library wraps it with the full model as its teacher. Loss: forward KL of the student's logits to the teacher's, mean
over trained tokens, and nothing else. A run that goes on calibrates again, and then loads what its checkpoint has.

Publishes the last checkpoint in Megatron's layout, quantizers included. Writing it in the layout of engines is
`export_mcore_gpt_to_hf` of modelopt.torch.export, which this project does not call yet.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.distillation_provider import DistillationProvider, convert_to_distillation_provider
from megatron.bridge.training.distill import distill
from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from modelopt.torch.utils.plugins.mbridge import set_moe_expert_layout
from modelopt.torch.utils.plugins.megatron_generate import cp_split_sequence, megatron_prefill

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.kit import Checkpoint, SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint, check_world_size, hand_on, last_iteration, preemptible
from nemotron.kit.modelopt import MEGATRON_MODULES, algorithm, quant_cfg
from nemotron.recipes.nano3.stage1_sft.train_megatron import build
from nemotron.stack.training.loaders import PackedLoader

if TYPE_CHECKING:
    from nemotron.recipes.super3.stage3_quantize.qad_modelopt_schema import QADConfig


def main() -> None:
    """Config, then the library's loop, then publish."""
    cfg: QADConfig = load_script_config(__file__, inputs=read_pipe)
    check_world_size(cfg.model, cfg.train, int(os.environ.get("WORLD_SIZE", "1")))
    with open_run(cfg, script=__file__) as run:
        saves, pack = run.dir / "checkpoints", SFTPack.load(path=cfg.dataset.path)
        full = Checkpoint.load(path=Path(cfg.checkpoint.pretrained_checkpoint))
        if pack.train_path is None:
            raise UserError(f"{pack.ref} has no training rows")
        rows = PackedLoader(pack.train_path, pack.seq_len, seed=0).next_batch(cfg.calibration.calib_size)
        recipe = build(cfg, pack, saves)
        recipe.model = distilled(cfg, full.path, rows.input_ids_BL[:, : cfg.calibration.seq_length])
        recipe.checkpoint.pretrained_checkpoint = None  # student and teacher load it themselves
        with run.phase("train"), preemptible(saves):
            distill(recipe)
        if run.rank == 0:  # one process publishes
            iteration = last_iteration(saves)
            checkpoint = MegatronCheckpoint(
                path=saves / f"iter_{iteration:07d}", num_steps=iteration, dataset_path=pack.path,
                tokens=iteration * cfg.train.global_batch_size * cfg.model.seq_length,
                tokenizer_path=pack.tokenizer_path, chat_template=pack.chat_template, reasoning=pack.reasoning,
            ).save(move=True)  # fmt: skip
            print_complete({"model": checkpoint})


def distilled(cfg: QADConfig, full: Path, rows_BL: torch.Tensor) -> DistillationProvider:
    """The student, quantised once it has its weights, and the teacher: one model, under the same layout."""
    bridge = AutoBridge.from_hf_pretrained(str(full))
    student, teacher = bridge.to_megatron_provider(), bridge.to_megatron_provider()
    for provider in (student, teacher):
        hand_on(cfg.model.fields(), provider, "model")
        provider.pipeline_dtype = torch.bfloat16
        set_moe_expert_layout(provider, moe_grouped_gemm=False)  # an expert's matrices have quantizers of their own
    student.gradient_accumulation_fusion = False  # ModelOpt's quantised layers do without
    rules = quant_cfg(cfg.precision, "", cfg.algorithm.method, MEGATRON_MODULES)
    config = {"quant_cfg": rules, "algorithm": algorithm(cfg.algorithm)}

    def quantise(chunks: list[Any]) -> list[Any]:
        mtq.quantize(unwrap_model(chunks[0]), config, lambda model: calibrate(model, rows_BL))
        return chunks

    student.register_pre_wrap_hook(quantise)  # after the one that loads weights, before the one that adds the teacher
    return convert_to_distillation_provider(
        student, teacher, ModelOptDistillConfig(skip_lm_loss=True, logit_kl_temperature=1.0)
    )


def calibrate(model: torch.nn.Module, rows_BL: torch.Tensor) -> None:
    """One forward pass a row, each replica with its own rows, as many as any other; maxima are agreed on at the end."""
    replicas, context = parallel_state.get_data_parallel_world_size(), parallel_state.get_context_parallel_group()
    if (whole := len(rows_BL) // replicas * replicas) == 0:
        raise UserError(f"calibration.calib_size {len(rows_BL)} is below the number of replicas, {replicas}")
    for row_L in rows_BL[:whole][parallel_state.get_data_parallel_rank() :: replicas]:
        ids_BL, positions_BL = row_L[None].cuda(), None
        if parallel_state.get_context_parallel_world_size() > 1:
            ids_BL, positions_BL = cp_split_sequence(ids_BL, context)
        megatron_prefill(model, ids_BL, position_ids=positions_BL, skip_return_logits=True)


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
