"""Seconds that a training takes: what a GPU could do at its best, times coefficients fitted to published rows.

The time of one token on one GPU is a sum of parts, each counted at the data sheet's rate and multiplied by what
coefficients.yaml has for it (`benchmarks/plan_fit.py` fits it). Parts are per token and GPU: t GPUs that share a
replica work t times as long on its tokens as the arithmetic of one token takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import yaml

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.planning.layout import ONE_GPU, Layout, of_teacher
from nemotron.stack.planning.memory import BF16, block_bytes, stage_parameters
from nemotron.stack.training.flops import training_flops_per_token

HERE = Path(__file__).parent
Matchers = tuple[tuple[str, str], ...]
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


@cache
def gpus() -> dict[str, Gpu]:
    """Name -> GPU."""
    return {name: Gpu(**line) for name, line in yaml.safe_load((HERE / "gpus.yaml").read_text()).items()}


@cache
def coefficients(of: str) -> dict[str, float]:
    """Part -> its coefficient. of: "training" or "rl"."""
    values: dict[str, float] = yaml.safe_load((HERE / "coefficients.yaml").read_text())[of]
    return values


def find_gpu(name: str, *precisions: str) -> Gpu:
    """The GPU called so. Raises UserError: unknown; it has no matrix products in one of these precisions."""
    if name not in gpus():
        raise UserError(f"no GPU {name!r}", did_you_mean(name, [*gpus(), "cpu"], "GPUs"))
    gpu = gpus()[name]
    if missing := [precision for precision in precisions if precision not in gpu.tflops]:
        keys = "mixed_precision=bf16_mixed" + " model.quant_recipe=null" * (len(precisions) > 1)
        raise UserError(f"{name} has no {missing[0]}", f"it has {', '.join(gpu.tflops)}: {keys}")
    return gpu


def applied_pattern(model: NemotronHConfig) -> str:
    """Symbols of all blocks that a token passes in training, those of every MTP application included."""
    return model.hybrid_override_pattern + mtp_applications(model) * model.mtp_hybrid_override_pattern


def mtp_applications(model: NemotronHConfig) -> int:
    """How often training applies the MTP block, with its projection and the output head, to a token."""
    return model.mtp_num_layers if model.num_nextn_predict_layers else 0


def token_parts(layout: Layout, gpu: Gpu) -> dict[str, float]:
    """Seconds a token and GPU at the data sheet's rate, by part; `host` and `launch` count blocks instead."""
    model, pattern = layout.model, applied_pattern(layout.model)
    again = recomputation(layout.recompute)
    # ---- matrix products: 6 FLOPs a parameter and token, 2 of them in the forward pass
    flops = block_flops(model, layout.precision, layout.matchers, layout.bf16_ends, layout.recompute)
    head = 6.0 * count_parameters(model).head
    bf16 = (1 + mtp_applications(model)) * head + again["*"] * attention_scores(model, pattern, layout.seq_len)
    matmuls = dict.fromkeys(MATMULS.values(), 0.0)
    for precision, number in (*flops, ("bf16", bf16)):
        matmuls[MATMULS[precision]] += number / (1e12 * gpu.tflops[precision] * gpu.sustained)
    # ---- what the blocks read and write beside that, in units of what they keep for the backward pass
    whole = replace(layout, parallel=ONE_GPU, recompute=())
    kept = {symbol: pattern.count(symbol) * again[symbol] * block_bytes(whole, symbol) for symbol in "M*E-"}
    memory = 1e12 * gpu.hbm_tb_s
    # ---- a micro-batch costs a fixed time a block, however few its tokens
    share = layout.tensor * layout.context / (layout.micro_batch * layout.seq_len)
    return matmuls | {
        "mamba": kept["M"] / memory,
        "blocks": (kept["*"] + kept["E"] + kept["-"]) / memory,
        "network": tensor_seconds(layout, gpu) + context_seconds(layout, gpu) + expert_seconds(layout, gpu),
        "launch": len(pattern) * share,
        "host": 0.0 if layout.whole_graph else pattern.count("E") * share,
    }


def recomputation(modules: tuple[str, ...]) -> dict[str, float]:
    """Symbol of a block -> how often its work is done: a third more where its forward pass is repeated."""
    return {s: 4 / 3 if any(s in RECOMPUTED.get(name, "") for name in modules) else 1.0 for s in "M*E-"}


@cache
def block_flops(
    model: NemotronHConfig, precision: str, matchers: Matchers, bf16_ends: tuple[int, int], recompute: tuple[str, ...]
) -> list[tuple[str, float]]:
    """FLOPs of a token in the matrices of all blocks, forward and backward, by their precision; MTP's are BF16."""
    again, last = recomputation(recompute), len(model.hybrid_override_pattern) - bf16_ends[1]
    found = []
    for index, symbol in enumerate(model.hybrid_override_pattern):
        for name, number in matrices(model, symbol).items():
            named = (chosen for glob, chosen in matchers if fnmatch(f"decoder.layers.{index}.{name}", glob))
            chosen = next(named, precision) if bf16_ends[0] <= index < last else "bf16"
            found.append((chosen, 6.0 * again[symbol] * number))
    depths, mtp = mtp_applications(model), count_mtp_parameters(model)
    blocks = sum(again[symbol] * sum(matrices(model, symbol).values()) for symbol in model.mtp_hybrid_override_pattern)
    return [*found, ("bf16", depths * 6.0 * (blocks + mtp.mtp_projection))]


@cache
def matrices(model: NemotronHConfig, symbol: str) -> dict[str, int]:
    """Parameters of a block that a token is multiplied with, by Megatron's name of the module."""
    count = count_parameters(replace(model, hybrid_override_pattern=symbol))
    out_proj = model.mamba_inner_size * model.hidden_size
    return {
        "M": {"mixer.in_proj": count.mamba - out_proj, "mixer.out_proj": out_proj},
        "*": {"self_attention.linear_qkv": count.attention},  # linear_proj included
        "-": {"mlp.linear_fc1": count.mlp},  # linear_fc2 included
        "E": {
            "mlp.router": count.router, "mlp.experts.linear_fc1": count.visited_experts,
            "mlp.shared_experts.linear_fc1": count.shared_experts, "mlp.fc1_latent_proj": count.latent_projections,
        },
    }[symbol]  # fmt: skip


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


def fitted_parts(layout: Layout, gpu: Gpu) -> dict[str, float]:
    """Seconds a token and GPU, by part; `teacher`: the forward pass of distillation's teacher, where there is one.

    That is a third of each part of a training (2 of 6 FLOPs a parameter), and half of what TP and EP send.
    """
    fitted = coefficients("training")
    parts = {part: fitted[part] * seconds for part, seconds in token_parts(layout, gpu).items()}
    if layout.teacher:
        training = fitted_parts(of_teacher(layout, layout.teacher), gpu)
        parts["teacher"] = sum(seconds / (2 if part == "network" else 3) for part, seconds in training.items())
    return parts


def token_seconds(layout: Layout, gpu: Gpu) -> float:
    """Seconds a token and GPU: the sum of its parts."""
    return sum(fitted_parts(layout, gpu).values())


def iteration_seconds(layout: Layout, gpu: Gpu) -> float:
    """Seconds of an iteration: work and the pipeline's bubble, or the sum of gradients where that takes longer."""
    work = token_seconds(layout, gpu) * layout.tokens / layout.gpus * (1 + layout.bubble)
    return max(work, gradient_seconds(layout, gpu))
