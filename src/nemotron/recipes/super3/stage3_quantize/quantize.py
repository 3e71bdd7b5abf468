#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Quantise a trained model (FP8, NVFP4) by a table of formats, export it for vLLM, and measure what it lost."
# name = "super3/quantize"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config"
# format = "omegaconf"
# schema = "schema.py:QuantizeConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Stage 3: fewer bits for weights, activations, keys and values, and state, without training (PTQ).

    nemotron super3 quantize -c tiny
    nemotron nano3 quantize -c tiny
    python quantize.py --config tiny weight_scales=max precision.lm_head=W4A16_NVFP4

1. Calibrate: the largest value of every activation over samples of SFT.
2. Quantise: codes and scales of the weights of every layer that the table `precision` names.
3. Export in the layout that vLLM, SGLang and TensorRT-LLM read, and publish that.
4. Measure what was published, read back, beside the model in bf16: forward KL and next-token accuracy on held-out rows,
   pass@1 on held-out tasks, pair by pair; and the bytes of both.

Shapes: B packed rows, L tokens a row.

Simplified against the papers (Nano 3, arXiv 2512.20848, section 4; Super 3, arXiv 2604.12374): rounding is emulated,
and products of rounded values are summed up in fp32; the query is not rounded to FP8 before it meets the FP8 keys.
Calibration rows are hundreds of tokens long, not tens of thousands.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.kit import Checkpoint, QuantizedModel, Results, SFTPack, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import StopFlag
from nemotron.recipes.super3.stage3_quantize.measure import ROWS, HeldOut, measure, open_held_out
from nemotron.stack.environments import verifiable_families
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import kept_values
from nemotron.stack.quantization.autoquantize import candidates, fisher_scores, group_matrices, search
from nemotron.stack.quantization.calibration import calibrate
from nemotron.stack.quantization.export import load_model, quant_config, save_quantized, stored_bytes
from nemotron.stack.quantization.layers import Amax, layer_kinds, plan_layers, quantize
from nemotron.stack.training.loaders import Batch, PackedLoader
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.publish import publish_written

if TYPE_CHECKING:
    from nemotron.kit.schemas.quantization import QuantAlgo
    from nemotron.recipes.super3.stage3_quantize.schema import QuantizeConfig


def main() -> None:
    """Config, then calibrate, quantise, publish, measure."""
    cfg: QuantizeConfig = load_script_config(__file__, inputs=read_pipe)
    with open_run(cfg, script=__file__) as run, StopFlag() as stop:
        full_artifact = Checkpoint.load(path=cfg.checkpoint.pretrained_checkpoint)
        pack = SFTPack.load(path=cfg.dataset.path)
        if pack.train_path is None:
            raise UserError(f"{pack.ref} has no training rows")
        valid = open_held_out(pack, cfg.dataset.eval_rows, seed=0)
        cfg.evaluation.families = verifiable_families(cfg.evaluation.families, cfg.evaluation.sandbox)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        full = NemotronH.from_pretrained(full_artifact.path, torch.bfloat16).float().to(device)

        # ---- calibrate: the static scale of an activation is its largest value over the samples
        with run.phase("calibrate"):
            loader = PackedLoader(pack.train_path, pack.seq_len, seed=0)
            rows = loader.next_batch(cfg.dataset.calib_size)
            batches = (batch.to(torch.device(device)) for batch in rows.micro_batches(ROWS))
            amax = calibrate(full, batches, cfg.precision.kv_cache == "FP8", stop.poll)

        # ---- quantise: the table's rows become formats of layers, each layer's weight codes and scales
        with run.phase("quantize"):
            plan = plan_layers(full.config, cfg.precision)
            try:
                if cfg.auto_quantize is not None:  # of some kinds of layers the search says which format
                    plan = search_plan(cfg, full, amax, loader, stop)
                quantization = quantize(full, plan, amax, cfg.weight_scales, cfg.precision.ssm_state)
            except ValueError as error:  # a matrix that its format's blocks do not divide
                raise UserError(f"precision: {error}", "BF16 leaves such layers as they are") from error
            save_quantized(run.output_dir, full, quantization, kept_values(full_artifact.path))
            algorithm = quant_config(full, plan, bool(quantization.kv_scales))["quantization"]["quant_algo"]
            sizes_of_both = stored_bytes(full, plan)
            published = publish_written(
                run, full, full_artifact.tokenizer_path or full_artifact.path, QuantizedModel, {"bytes": sizes_of_both},
                num_steps=full_artifact.num_steps, tokens=full_artifact.tokens, dataset_path=pack.path,
                chat_template=full_artifact.chat_template, reasoning=full_artifact.reasoning,
                quant_algo=str(algorithm or "BF16"), full_path=full_artifact.path,
            )  # fmt: skip

        # ---- measure: what is scored is what was published, read back, with its activations rounded
        with run.phase("evaluate"):
            quantized = load_model(published.path, device=device)
            held_out = HeldOut(valid, cfg.dataset.eval_rows, cfg.evaluation)
            metrics = measure(full, quantized, published, held_out, stop.poll)
            results = Results(metrics={"bytes": sizes_of_both, **metrics}).save()
    print_complete({"model": published, "results": results})


def search_plan(
    cfg: QuantizeConfig, full: NemotronH, amax: Amax, loader: PackedLoader, stop: StopFlag
) -> dict[str, QuantAlgo]:
    """AutoQuantize: the table, with those formats of the searched layers that move the loss least within the budget.

    Loss: next-token cross entropy, mean over the trained tokens of a forward pass.
    """
    settings = cfg.auto_quantize
    assert settings is not None
    kinds = layer_kinds(full.config)
    searched = [name for name, kind in kinds.items() if kind in settings.layers]
    if not searched:
        raise UserError(
            f"auto_quantize.layers = {settings.layers}: the model has no such layer",
            f"of these it has some: {', '.join(dict.fromkeys(kinds.values()))}",
        )
    groups = group_matrices(searched)

    def loss(rows: Batch) -> Tensor:
        stop.poll()
        trained_BL = rows.loss_mask_BL.bool()
        logits_TV = full(rows.input_ids_BL, rows.seq_idx_BL, trained_BL).logits
        return selected_loss_sum(logits_TV, rows.labels_BL[trained_BL]) / max(1, rows.num_trained)

    of_groups = candidates(full, groups, settings.quant_algos, amax, cfg.weight_scales)
    rows = loader.next_batch(settings.score_size).to(full.lm_head.weight.device)
    scores = fisher_scores(full, groups, of_groups, rows.micro_batches(ROWS), loss)
    try:
        found = search(full, groups, scores, settings.effective_bits)
    except ValueError as error:
        raise UserError(f"auto_quantize: {error}") from error
    for group in groups:
        listed = ", ".join(f"{each} {score:.3g}" for each, score in scores[group.name].items())
        print(f"{group.name}: {found.get(group.matrices[0], 'BF16')}  (scores: {listed})", file=sys.stderr)
    table = plan_layers(full.config, cfg.precision)
    chosen = {name: each for name, each in table.items() if name not in searched} | found
    return {name: chosen[name] for name in kinds if name in chosen}  # in the order of the model


if __name__ == "__main__":
    sys.exit(run_main(main, command_hint))
