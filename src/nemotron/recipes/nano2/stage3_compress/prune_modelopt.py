#!/usr/bin/env python
# /// script
# dependencies = ["megatron-bridge", "nvidia-modelopt"]
#
# [tool.runspec]
# docs = "Prune Nemotron Nano 12B v2 to the published shape of 9B with ModelOpt's Minitron, on Megatron-Bridge."
# name = "nano2/pruned/modelopt"
# image = "nvcr.io/nvidia/nemo:26.08"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "torchrun"
#
# [tool.runspec.config]
# dir = "./config/training_prune"
# default = "9b"
# format = "omegaconf"
# schema = "prune_modelopt_schema.py:PruneConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 3, step 2 of 3, first half, at the published size: the same as `training_prune.py`, done by ModelOpt.

    nemotron nano2 compress prune -c 9b --run slurm
    nemotron nano2 compress prune -c 9b --run slurm run.model=hf://nvidia/NVIDIA-Nemotron-Nano-12B-v2

Units are scored by their activations on rows of the pack; then the model is cut to the shape that the config states,
the paper's second candidate. One GPU holds the 12.3 B parameters in bf16; ModelOpt's pruning knows PP and no other
layout. Publishes a Megatron checkpoint, without optimiser.

Simplified against the paper (arXiv 2508.14444, section on compression): the shape is stated, not searched for, and the
blocks that go are those that ModelOpt scores lowest, by the cosine of input and output; the paper goes by what the
logits lose. ModelOpt 0.47.0 searches by a bound of parameters or bytes as well (`params`, `memory_mb`), by a score of
yours.
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from typing import TYPE_CHECKING

import modelopt.torch.opt as mto
import modelopt.torch.prune as mtp
import modelopt.torch.utils.distributed as dist
import torch
from modelopt.torch.prune.plugins.mcore_minitron import get_mcore_minitron_config
from modelopt.torch.utils.plugins.mbridge import load_mbridge_model_from_hf
from modelopt.torch.utils.plugins.megatron_generate import megatron_prefill

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.kit import Checkpoint, SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.megatron import MegatronCheckpoint, last_checkpoint
from nemotron.stack.training.loaders import PackedLoader

if TYPE_CHECKING:
    from nemotron.recipes.nano2.stage3_compress.prune_modelopt_schema import PruneConfig


def main() -> None:
    """Config, then score and cut, then publish."""
    cfg: PruneConfig = load_script_config(__file__, inputs=read_pipe)
    with open_run(cfg, script=__file__) as run:
        large, pack = Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint), SFTPack.load(path=cfg.dataset.path)
        if pack.train_path is None:
            raise UserError(f"{pack.ref} has no training rows")
        rows_BL = PackedLoader(pack.train_path, pack.seq_len, seed=0).next_batch(cfg.dataset.calib_size).input_ids_BL
        rows_BL = rows_BL[:, : cfg.dataset.seq_length]

        # ---- the library's model, with the weights of the large one
        dist.setup()
        overrides = {"pipeline_dtype": torch.bfloat16, "seq_length": cfg.dataset.seq_length}
        bridge, provider, model, unwrapped, _ = load_mbridge_model_from_hf(
            hf_model_name_or_path=str(large.path), provider_overrides=overrides
        )

        # ---- score all units and blocks on the rows, and keep the best of each: in place
        def forward_loop(model: torch.nn.Module) -> None:
            for row_L in rows_BL:
                megatron_prefill(model, row_L[None].cuda(), skip_return_logits=True)

        with run.phase("prune"):
            mtp.prune(
                unwrapped,
                mode=[("mcore_minitron", get_mcore_minitron_config(**cfg.divisors.model_dump()))],
                constraints={"export_config": cfg.export_config.model_dump()},
                dummy_input=None,
                config={"forward_loop": forward_loop, "checkpoint": str(run.dir / "scores")},
            )
            mto.ModeloptStateManager.remove_state(unwrapped)  # the checkpoint is one of any model of this shape
            provider.hybrid_layer_pattern = unwrapped.hybrid_layer_pattern
            print(f"blocks that stay: {unwrapped.hybrid_layer_pattern}", file=sys.stderr)

        # ---- publish
        saves = run.dir / "checkpoints"
        bridge.save_megatron_model(model, saves, hf_tokenizer_path=large.tokenizer_path or large.path)
        dist.cleanup()
        saved = last_checkpoint(saves) or saves / "iter_0000000"
        pruned = MegatronCheckpoint(
            path=saved, num_steps=large.num_steps, dataset_path=pack.path, tokenizer_path=large.tokenizer_path,
            chat_template=large.chat_template, reasoning=large.reasoning,
        ).save(move=True)  # fmt: skip
        print_complete({"model": pruned})


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
