"""Rows of the performance tables of Megatron-Bridge and NeMo-RL: half of them fit `nemotron plan`, half judge it.

plan_throughput.csv: for each task, model, GPU and precision the row of the newest container from 26.04.01 on. `graphs`
(CUDA graphs; none, part: without the experts, whole: one of all) and `recompute` are those of the recipe of that name
in Megatron-Bridge as of the container: v0.4.1 for 26.04.01, v0.5.0 for 26.06, v0.5.1 for 26.06.01, 067f987d for 26.08.
plan_rl_steps.csv: for each model, GPU, precision, lag and number of GPUs the row of the newest version. Other columns
as on the page; `lag`: steps off policy; `generation_gpus`: by the recipe of that name there.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import Layout, with_parallel
from nemotron.stack.planning.rl_step import RlStep

HERE = Path(__file__).parent
Row = dict[str, str]


# ---- models, as this package counts them: a block of a transformer is `*` and `-` or `E` here. A gated MLP of width f
# has three matrices where the squared ReLU has two: its width is written as 1.5 f, which gives its parameters and
# FLOPs. A shared expert of width 1 is none.


def dense(layers: int, hidden: int, heads: int, gated: int, vocabulary: int) -> NemotronHConfig:
    """A Llama or dense Qwen: heads of 128, eight of keys and values."""
    return NemotronHConfig(
        hybrid_override_pattern="*-" * layers, hidden_size=hidden, vocab_size=vocabulary, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=3 * gated // 2,
    )  # fmt: skip


def sparse(
    layers: int, hidden: int, heads: tuple[int, int, int], experts: tuple[int, int, int], vocabulary: int
) -> NemotronHConfig:
    """A mixture of experts. heads: of queries, of keys, their width. experts: how many, chosen, width."""
    return NemotronHConfig(
        hybrid_override_pattern="*E" * layers, hidden_size=hidden, vocab_size=vocabulary, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=heads[2], n_routed_experts=experts[0], num_experts_per_tok=experts[1],
        moe_intermediate_size=3 * experts[2] // 2, moe_shared_expert_intermediate_size=1,
    )  # fmt: skip


REFERENCES = {
    "LLAMA3.1_8B": dense(32, 4096, 32, 14336, 128256),
    "LLAMA3_70B": dense(80, 8192, 64, 28672, 128256),
    "LLAMA3.1_405B": dense(126, 16384, 128, 53248, 128256),
    "Qwen3_32B": dense(64, 5120, 64, 25600, 151936),
    "Qwen3_30B_a3B": sparse(48, 2048, (32, 4, 128), (128, 8, 768), 151936),
    "Qwen3_235B_a22B": sparse(94, 4096, (64, 4, 128), (128, 8, 1536), 151936),
    "GPT OSS 120B": sparse(36, 2880, (64, 8, 64), (128, 4, 2880), 201088),
    "Nemotron_3_Nano": PRESETS["nano3-30b"],
    "Nemotron_3_5_Lightning": replace(PRESETS["nano3-30b"], num_nextn_predict_layers=1, mtp_num_layers=2),
    "Nemotron_3_Super": PRESETS["super3-120b"],
}

# Fitted and shown as the others, but what our blocks do not have is in its own: attention with a window in every other
# block, sinks, biases of all matrices. Our FLOPs of a token are 6 to 27 % more than the page's, whose rows differ too.
NOT_COUNTED = ("GPT OSS 120B",)

# Matrices of Nemotron 3 Super that are not in NVFP4: perf_recipes/nemotronh/te_quant.cfg and num_layers_at_end_in_bf16.
SUPER_NVFP4 = (("*.linear_qkv", "bf16"), ("*mlp.fc[12]_latent_proj", "bf16"), ("*mixer.out_proj", "mxfp8"))
SUPER_BF16_ENDS = (0, 14)


# ---- rows


def rows(file: str) -> list[Row]:
    """All rows of a table."""
    with (HERE / file).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def halves(table: Sequence[Row], key: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Calibration and held-out half: sorted by the SHA-256 of what identifies a row; the first half calibrates."""
    ordered = sorted(table, key=lambda row: hashlib.sha256(" ".join(row[name] for name in key).encode()).hexdigest())
    middle = (len(ordered) + 1) // 2
    return ordered[:middle], ordered[middle:]


def throughput_halves() -> tuple[list[Row], list[Row]]:
    """Of plan_throughput.csv."""
    return halves(rows("plan_throughput.csv"), ("task", "model", "gpu", "precision", "gpus"))


def rl_halves() -> tuple[list[Row], list[Row]]:
    """Of plan_rl_steps.csv."""
    return halves(rows("plan_rl_steps.csv"), ("model", "gpu", "precision", "lag", "gpus"))


def layout_of(row: Row) -> Layout:
    """The layout of a row of plan_throughput.csv."""
    table = (row["model"], row["precision"]) == ("Nemotron_3_Super", "NVFP4")
    layout = Layout(
        REFERENCES[row["model"]], int(row["gpus"]), int(row["seq"]), int(row["gbs"]), int(row["mbs"]),
        row["precision"].lower(), SUPER_NVFP4 if table else (), SUPER_BF16_ENDS if table else (0, 0),
        virtual=int(row["vp"]), recompute=tuple(row["recompute"].split()), whole_graph=row["graphs"] == "whole",
    )  # fmt: skip
    return _parallel(layout, row)


def step_of(row: Row) -> RlStep:
    """The step of a row of plan_rl_steps.csv."""
    gpus, generation, lag = int(row["gpus"]), int(row["generation_gpus"]), int(row["lag"])
    training = gpus if lag == 0 else gpus - generation
    layout = Layout(REFERENCES[row["model"]], training, int(row["seq"]), int(row["batch"]), 1, row["precision"].lower())
    return RlStep(
        _parallel(layout, row), int(row["batch"]), float(row["mean"]), lag, generation, int(row["generation_tp"])
    )


def _parallel(layout: Layout, row: Row) -> Layout:
    return with_parallel(
        layout,
        tensor_model_parallel_size=int(row["tp"]),
        pipeline_model_parallel_size=int(row["pp"]),
        context_parallel_size=int(row["cp"]),
        expert_model_parallel_size=int(row["ep"]),
        sequence_parallel=int(row["tp"]) > 1,
    )
