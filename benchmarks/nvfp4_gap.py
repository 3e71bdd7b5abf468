#!/usr/bin/env python
"""What NVFP4 training costs in loss: the small Super 3 trained in fp32, bf16 and emulated NVFP4, side by side.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 python benchmarks/nvfp4_gap.py

It needs the data and the base model of `nemotron nano3 pipe -c tiny` in output/artifacts (`--artifacts`). The model is
the trunk of the small Super 3; multi-token prediction, which trains in bf16 anyway, is left out. A seed gives all
precisions the same initial weights and batches, so their losses differ by rounding alone; how far fp32 is from bf16
says how much of the rest is chance. Held-out loss is measured in the precision that was trained in, mean over sources.

Before that: how many values of each kind of layer NVFP4 and MXFP8 round to zero in the base model of nano3. After it:
how far the gradient of one batch is from that in fp32, at the weights that bf16 reached last, which no chance of
training blurs. The settings of malloc are the launcher's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import machine
from torch import Tensor, nn

from nemo_runspec.artifacts import Registry
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig
from nemotron.kit.schemas.training import QuantRecipe
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.quantization.nvfp4_training import (
    Nvfp4Run,
    round_mxfp8,
    round_squares,
    round_vectors,
    train_in_nvfp4,
)
from nemotron.stack.training.loaders import Batch, BlendLoader, validation_batches
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr

CONFIG = NemotronHConfig(
    "MEM*EME", vocab_size=2048, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=32, n_groups=1, chunk_size=32, moe_latent_size=64,
    n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=128, moe_shared_expert_intermediate_size=128,
    routed_scaling_factor=2.5,
)  # fmt: skip
ALL_NVFP4 = QuantRecipe(**dict.fromkeys(QuantRecipe.model_fields, "nvfp4"))
# None: no NVFP4. Else the recipe, how many last blocks stay in bf16 (None: 15 %), and what is disabled.
PRECISIONS: dict[str, tuple[QuantRecipe, int | None, dict[str, bool]] | None] = {
    "fp32": None,
    "bf16": None,
    "nvfp4": (QuantRecipe(), None, {}),
    "nvfp4, no Hadamard": (QuantRecipe(), None, {"disable_rht": True}),
    "nvfp4, to nearest": (QuantRecipe(), None, {"disable_stochastic_rounding": True}),
    "nvfp4, all layers": (ALL_NVFP4, 0, {}),
}
BATCH, LENGTH, HELD_OUT_BATCHES = 4, 128, 8
OPTIMIZER = OptimizerConfig(lr=4e-3, min_lr=4e-5, adam_beta2=0.95, weight_decay=0.1)


def build(precision: str, seed: int) -> tuple[NemotronH, Nvfp4Run]:
    """The model as `precision` trains it, and where its random numbers come from."""
    settings = PRECISIONS[precision]
    model, run = NemotronH(CONFIG), Nvfp4Run(seed)
    if settings is not None:
        recipe, end, disabled = settings
        run = Nvfp4Run(seed, **disabled)
        train_in_nvfp4(model, run, recipe, num_layers_at_end_in_bf16=end)
    return model, run


def loss_of(model: NemotronH, precision: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """Nats a token, mean over all of them, and the load-balancing loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        out = model(batch.input_ids_BL)
    return next_token_loss(out.logits, batch.labels_BL), out.load_balancing_loss


def train(precision: str, steps: int, seed: int, data: Path) -> NemotronH:
    """As stage 0 trains, in `steps` of BATCH x LENGTH tokens: warm-up, peak, decay over the last fifth."""
    torch.manual_seed(seed)
    model, run = build(precision, seed)
    model.train()
    optimizer, loader = build_optimizer(model, OPTIMIZER), BlendLoader(data, LENGTH, steps * BATCH, seed)
    schedule = SchedulerConfig(lr_warmup_iters=steps // 20, lr_wsd_decay_iters=steps // 5)
    for step in range(steps):
        set_lr(optimizer, lr_at(step, steps, OPTIMIZER, schedule))
        run.begin(step, 1)
        loss, balance = loss_of(model, precision, loader.next_batch(BATCH))
        (loss + 1e-4 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(1e-3)
    return model.eval()


@torch.no_grad()
def held_out_loss(model: NemotronH, precision: str, data: Path) -> float:
    """Nats a token: mean over the tokens of a source, then over the sources."""
    losses: dict[str, list[float]] = defaultdict(list)
    for source, batch in validation_batches(data, LENGTH, BATCH, HELD_OUT_BATCHES):
        losses[source].append(loss_of(model, precision, batch)[0].item())
    return statistics.mean(statistics.mean(each) for each in losses.values())


def gradient(precision: str, weights: dict[str, Tensor], batch: Batch) -> Tensor:
    """Of the loss, all parameters in one vector."""
    model, _ = build(precision, seed=0)
    model.load_state_dict(weights)
    loss, _ = loss_of(model.train(), precision, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([each.flatten() for each in gradients])


def flushed_to_zero(model: NemotronH, batch: Batch) -> dict[str, dict[str, list[float]]]:
    """By kind of linear layer and tensor: the percentage of values other than 0 that NVFP4 and MXFP8 make 0.

    Means over the layers. dy is rounded to nearest, as it would be without stochastic rounding.
    """
    seen: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def note(kind: str, tensor: str, values: Tensor) -> None:
        values_MK = values.detach().reshape(-1, values.shape[-1]).float()
        nvfp4 = round_squares(values_MK) if tensor == "W" else round_vectors(values_MK)
        shares = []
        for rounded in (nvfp4, round_mxfp8(values_MK)):
            rounded_MK = rounded[: len(values_MK), : values_MK.shape[1]]
            shares.append(100 * ((rounded_MK == 0) & (values_MK != 0)).sum().item() / values_MK.count_nonzero().item())
        seen[kind, tensor].append((shares[0], shares[1]))

    def watch(kind: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
            assert isinstance(module, Linear)
            note(kind, "W", module.weight)
            note(kind, "x", inputs[0])
            out.register_hook(lambda dy: note(kind, "dy", dy))

        return look

    for block in model.blocks():
        for name, part in block.mixer.named_modules():
            if isinstance(part, Linear):
                part.register_forward_hook(watch(name))
    loss_of(model.train(), "bf16", batch)[0].backward()
    table: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (kind, tensor), shares in seen.items():
        table[kind][tensor] = [statistics.mean(each) for each in zip(*shares, strict=True)]
    return table


def main() -> None:
    """Print what becomes zero, the losses of every seed, the mean gaps to bf16, and errors of a gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=Path, default=Path("output/artifacts"), help="of `nano3 pipe -c tiny`")
    parser.add_argument("--steps", type=int, default=200, help=f"updates of {BATCH} x {LENGTH} tokens a run")
    parser.add_argument("--seeds", type=int, default=5, help="2 or more")
    args = parser.parse_args()
    registry = Registry(args.artifacts)
    data = registry.resolve("nano3-pretrain-data-tiny").path
    print(machine())
    (_, batch), *_ = validation_batches(data, LENGTH, BATCH, 1)
    base = NemotronH.from_pretrained(registry.resolve("nano3-pretrain-model-tiny").path)
    for kind, tensors in flushed_to_zero(base, batch).items():
        parts = [f"{tensor} {nvfp4:.1f} {mxfp8:.2f}" for tensor, (nvfp4, mxfp8) in tensors.items()]
        print(f"{kind:26s} % of values that become 0 in NVFP4 and MXFP8: {'   '.join(parts)}")
    millions = NemotronH(CONFIG).num_parameters()[0] / 1e6
    print(f"{millions:.2f} M parameters, {args.steps} steps of {BATCH} x {LENGTH} tokens")
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for seed in range(args.seeds):
        for name in PRECISIONS:
            start = time.process_time()
            model = train(name, args.steps, seed, data)
            losses[name].append(held_out_loss(model, name, data))
            if name == "bf16":
                weights = model.state_dict()
            seconds = time.process_time() - start
            print(
                f"seed {seed}  {name:20s} {losses[name][-1]:.4f} nats a token  {seconds:5.1f} s of processor time",
                flush=True,
            )
    for name in PRECISIONS:
        gaps = [100 * (loss / other - 1) for loss, other in zip(losses[name], losses["bf16"], strict=True)]
        mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
        loss = statistics.mean(losses[name])
        print(f"{name:20s} {loss:.4f}, {mean:+.2f} % beside bf16 (standard deviation {deviation:.2f})")
    exact = gradient("fp32", weights, batch)
    for name in list(PRECISIONS)[1:]:
        found = gradient(name, weights, batch)
        print(f"{name:20s} gradient off by {100 * ((found - exact).norm() / exact.norm()).item():.1f} %")


if __name__ == "__main__":
    main()
