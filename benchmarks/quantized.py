#!/usr/bin/env python
"""Every table of formats and every rule for NVFP4's scales on one trained model: what each loses, and its bytes.

    python benchmarks/quantized.py nano3-final-model-tiny nano3-sft-data-tiny
    python benchmarks/quantized.py --qad super3-quantize-model-tiny super3-qad-model-tiny super3-sft-data-tiny

KL to the model in bf16, nats a token, over all held-out rows, with the standard error of its mean: a few tokens make
most of it. `trimmed` is the mean without the worst hundredth. With --qad: published quantised models of one full model,
before and after distillation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nemotron.recipes.super3 as recipe
from nemo_runspec.config.loader import load_config
from nemotron.kit import Checkpoint, QuantizedModel, SFTPack
from nemotron.kit.schemas.quantization import PrecisionConfig, QuantAlgo, WeightScales
from nemotron.stack.models import NemotronH
from nemotron.stack.quantization.autoquantize import candidates, fisher_scores, group_matrices, search
from nemotron.stack.quantization.calibration import calibrate
from nemotron.stack.quantization.export import load_model, stored_bytes
from nemotron.stack.quantization.layers import layer_kinds, plan_layers, quantize, quantized_weights, round_activations
from nemotron.stack.training.loaders import Batch, PackedLoader
from nemotron.stack.training.losses import selected_loss_sum

CONFIGS = Path(recipe.__file__).parent / "stage3_quantize" / "config"
ROWS, CALIBRATION, SCORED = 8, 256, 64


def read_full(path: Path) -> NemotronH:
    """The model with the weights that bf16 leaves."""
    return NemotronH.from_pretrained(path, torch.bfloat16).float().eval()


@torch.no_grad()
def kl_of(model: NemotronH, full: NemotronH, batches: Iterable[Batch]) -> Tensor:
    """Forward KL of every trained token, nats."""
    parts = []
    for batch in batches:
        trained_BL = batch.loss_mask_BL.bool()
        log_p, log_q = (
            each.eval()(batch.input_ids_BL, batch.seq_idx_BL, trained_BL).logits.log_softmax(-1)
            for each in (full, model)
        )
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts)


def line(what: str, size: str, kl_T: Tensor) -> str:
    """A row of the table."""
    ordered = kl_T.sort().values
    error, trimmed = kl_T.std() / len(kl_T) ** 0.5, ordered[: len(ordered) * 99 // 100].mean()
    return f"{what:44} {size:>10} {kl_T.mean():9.5f} ± {error:.5f} {trimmed:9.5f}"


def tables(full: NemotronH, pack: SFTPack) -> None:
    """PTQ by every config of super3, and by every rule for scales where NVFP4 is in it."""
    assert pack.train_path is not None and pack.valid_path is not None
    loader = PackedLoader(pack.train_path, pack.seq_len, seed=0)
    amax = calibrate(full, loader.next_batch(CALIBRATION).micro_batches(ROWS), kv_cache=True)
    scored = loader.next_batch(SCORED)
    valid = [*PackedLoader(pack.valid_path, pack.seq_len, seed=0).all_batches(ROWS)]

    def loss(rows: Batch) -> Tensor:
        trained_BL = rows.loss_mask_BL.bool()
        logits_TV = full(rows.input_ids_BL, rows.seq_idx_BL, trained_BL).logits
        return selected_loss_sum(logits_TV, rows.labels_BL[trained_BL]) / max(1, rows.num_trained)

    for name in ("tiny-fp8", "tiny", "tiny-document", "tiny-autoquantize"):
        data: dict[str, Any] = load_config(CONFIGS, name, ()).data
        precision = PrecisionConfig.model_validate(data["precision"])
        rules: tuple[WeightScales, ...] = ("max", "mse", "four_over_six")
        for scales in rules[:1] if name == "tiny-fp8" else rules:
            plan: dict[str, QuantAlgo] = plan_layers(full.config, precision)
            if settings := data.get("auto_quantize"):
                groups = group_matrices(n for n, kind in layer_kinds(full.config).items() if kind in settings["layers"])
                of_groups = candidates(full, groups, settings["quant_algos"], amax, scales)
                scores = fisher_scores(full, groups, of_groups, scored.micro_batches(ROWS), loss)
                plan = search(full, groups, scores, settings["effective_bits"])
            quantization = quantize(full, plan, amax, scales, precision.ssm_state)
            student = NemotronH(full.config)
            student.load_state_dict(full.state_dict())
            round_activations(student, quantization)
            with quantized_weights(student, quantization):
                kl_T = kl_of(student, full, valid)
            sizes = stored_bytes(full, plan)
            print(line(f"{name}, scales by {scales}", f"{sizes['quantized'] / sizes['full']:.1%}", kl_T), flush=True)


def main() -> None:
    """Print a table."""
    words = sys.argv[1:]
    torch.set_num_threads(1)
    print(f"{'':44} {'bytes':>10} {'KL':>9}   {'':7} {'trimmed':>9}")
    if words[0] == "--qad":
        *names, data = words[1:]
        pack = SFTPack.load(data)
        assert pack.valid_path is not None
        valid = [*PackedLoader(pack.valid_path, pack.seq_len, seed=0).all_batches(ROWS)]
        for name in names:
            artifact = QuantizedModel.load(name)
            kl_T = kl_of(load_model(artifact.path), read_full(artifact.full_path), valid)
            print(line(artifact.ref, "", kl_T), flush=True)
    else:
        tables(read_full(Checkpoint.load(words[0]).path), SFTPack.load(words[1]))


if __name__ == "__main__":
    main()
