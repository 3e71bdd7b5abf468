"""Seconds that a training takes: what a GPU could do at its best, times coefficients fitted to published rows.

The time of one token on one GPU is a sum of parts, each counted at the data sheet's rate and multiplied by what
coefficients.yaml has for it (`benchmarks/plan_fit.py` fits it). Parts are per token and GPU: t GPUs that share a
replica work t times as long on its tokens as the arithmetic of one token takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.planning.layout import ONE_GPU, Layout
from nemotron.stack.planning.memory import BF16, block_bytes, stage_parameters
from nemotron.stack.training.flops import training_flops_per_token

HERE = Path(__file__).parent
MATMULS = {"bf16": "matmul", "fp8": "matmul", "mxfp8": "matmul", "nvfp4": "matmul_4bit"}
# recompute_modules -> the blocks that it computes again whole; the other modules are small
RECOMPUTED = {"moe": "E", "mlp": "-", "full": "M*E-"}


@dataclass(frozen=True)
class Gpu:
    """A line of gpus.yaml, which says what the fields are."""

    memory_gb: float
    hbm_tb_s: float
    sustained: float
    nvlink_gb_s: float
    network_gb_s: float
    domain: int
    node: int
    tflops: dict[str, float]

    @property
    def is_hopper(self) -> bool:
        """Whether it has no FP4."""
        return "nvfp4" not in self.tflops


@cache
def gpus() -> dict[str, Gpu]:
    """Name -> GPU."""
    return {name: Gpu(**line) for name, line in yaml.safe_load((HERE / "gpus.yaml").read_text()).items()}


@cache
def coefficients(of: str) -> dict[str, float]:
    """Part -> its coefficient. of: "training" or "rl"."""
    values: dict[str, float] = yaml.safe_load((HERE / "coefficients.yaml").read_text())[of]
    return values


def find_gpu(name: str, precision: str) -> Gpu:
    """The GPU called so. Raises UserError: unknown; it has no matrix products in that precision."""
    if name not in gpus():
        raise UserError(f"no GPU {name!r}", did_you_mean(name, [*gpus(), "cpu"], "GPUs"))
    gpu = gpus()[name]
    if precision not in gpu.tflops:
        raise UserError(f"{name} has no {precision}", f"it has {', '.join(gpu.tflops)}: mixed_precision=bf16_mixed")
    return gpu


def applied_pattern(model: NemotronHConfig) -> str:
    """Symbols of all blocks that a token passes in training, those of every MTP application included."""
    return model.hybrid_override_pattern + mtp_applications(model) * model.mtp_hybrid_override_pattern


def mtp_applications(model: NemotronHConfig) -> int:
    """How often training applies the MTP block, with its projection and the output head, to a token."""
    return model.mtp_num_layers if model.num_nextn_predict_layers else 0


def token_parts(layout: Layout, gpu: Gpu, host_bound: bool | None = None) -> dict[str, float]:
    """Seconds a token and GPU at the data sheet's rate, by part; `host` and `launch` count blocks instead.

    Args:
        host_bound: the CPU has to start every kernel of an `E` block, as before the containers of 2026-06, on Hopper
            and in NeMo-RL; None: as the GPU of today.
    """
    model, pattern = layout.model, applied_pattern(layout.model)
    again = {
        symbol: 4 / 3 if any(symbol in RECOMPUTED.get(name, "") for name in layout.recompute) else 1
        for symbol in "M*E-"
    }
    # ---- matrix products: 6 FLOPs a parameter and token, 2 of them in the forward pass
    count = count_parameters(replace(model, hybrid_override_pattern=pattern))
    moe = count.router + count.visited_experts + count.latent_projections + count.shared_experts
    linear = 6.0 * sum(
        again[symbol] * number
        for symbol, number in (("M", count.mamba), ("*", count.attention), ("-", count.mlp), ("E", moe))
    )
    linear += 6.0 * mtp_applications(model) * count_mtp_parameters(model).mtp_projection
    heads = 6.0 * (1 + mtp_applications(model)) * count.head
    rate = {precision: 1e12 * flops * gpu.sustained for precision, flops in gpu.tflops.items()}
    matmuls = dict.fromkeys(MATMULS.values(), 0.0)
    matmuls[MATMULS[layout.precision]] = linear / rate[layout.precision]
    matmuls["matmul"] += (heads + again["*"] * attention_scores(model, pattern, layout.seq_len)) / rate["bf16"]
    # ---- what the blocks read and write beside that, in units of what they keep for the backward pass
    whole = replace(layout, parallel=ONE_GPU, recompute=())
    kept = {symbol: pattern.count(symbol) * again[symbol] * block_bytes(whole, symbol) for symbol in "M*E-"}
    memory = 1e12 * gpu.hbm_tb_s
    # ---- a micro-batch costs a fixed time a block, however few its tokens
    share = layout.tensor * layout.context / (layout.micro_batch * layout.seq_len)
    slow = gpu.is_hopper if host_bound is None else host_bound
    return matmuls | {
        "mamba": kept["M"] / memory,
        "blocks": (kept["*"] + kept["E"] + kept["-"]) / memory,
        "network": tensor_seconds(layout, gpu) + context_seconds(layout, gpu) + expert_seconds(layout, gpu),
        "launch": len(pattern) * share,
        "host": pattern.count("E") * share if slow else 0.0,
    }


def attention_scores(model: NemotronHConfig, pattern: str, seq_len: int) -> float:
    """FLOPs of scores and weighted values of one token, forward and backward."""
    if "*" not in pattern:
        return 0.0
    alone = replace(model, hybrid_override_pattern="*" * pattern.count("*"), num_nextn_predict_layers=0)
    count = count_parameters(alone)
    return training_flops_per_token(alone, seq_len) - 6.0 * (count.attention + count.head)


def tensor_seconds(layout: Layout, gpu: Gpu) -> float:
    """TP: a gather and a scatter of the hidden state a block and direction (Korthikanti et al. 2022, section 4.2.2)."""
    moved = len(applied_pattern(layout.model)) * 4 * (layout.tensor - 1) * BF16 * layout.model.hidden_size
    return moved / link(gpu, layout.tensor)


def context_seconds(layout: Layout, gpu: Gpu) -> float:
    """CP: keys and values go around in the forward pass, they and their gradients in the backward pass."""
    model = layout.model
    pair = 2 * BF16 * model.num_key_value_heads * model.head_dim
    moved = applied_pattern(model).count("*") * 3 * (layout.context - 1) * pair
    return moved / link(gpu, layout.tensor * layout.context)


def expert_seconds(layout: Layout, gpu: Gpu) -> float:
    """EP: a token goes once to each GPU that has an expert of its choice, and comes back; backward the same.

    Between NVLink domains it travels once to each of them, over the network.
    """
    model, size = layout.model, layout.expert
    each = applied_pattern(model).count("E") * 4 * BF16 * model.routed_size
    near = min(size, gpu.domain)
    domains = size // near
    reached = size * (1 - (1 - 1 / size) ** model.num_experts_per_tok)
    far = domains * (1 - (1 - 1 / domains) ** model.num_experts_per_tok) * (domains - 1) / domains
    return each * (reached * (near - 1) / size / (1e9 * gpu.nvlink_gb_s) + far / (1e9 * gpu.network_gb_s))


def link(gpu: Gpu, size: int) -> float:
    """Bytes a second between that many neighbours."""
    return 1e9 * (gpu.nvlink_gb_s if size <= gpu.domain else gpu.network_gb_s)


def gradient_seconds(layout: Layout, gpu: Gpu) -> float:
    """DP: seconds of an iteration's sum of gradients and gather of weights, which overlap with the work."""
    dense, experts = stage_parameters(layout, 0)
    shares = layout.data * layout.context > 1
    return shares * (dense + experts) * (layout.gradient_bytes + BF16) / link(gpu, layout.gpus)


def iteration_seconds(layout: Layout, gpu: Gpu, host_bound: bool | None = None) -> float:
    """Seconds of an iteration: work and the pipeline's bubble, or the sum of gradients where that takes longer."""
    fitted = coefficients("training")
    token = sum(fitted[part] * seconds for part, seconds in token_parts(layout, gpu, host_bound).items())
    work = token * layout.tokens / layout.gpus * (1 + layout.bubble)
    return max(work, gradient_seconds(layout, gpu))
