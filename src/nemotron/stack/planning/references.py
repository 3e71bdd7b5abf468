"""The models of the published throughput tables, as this package counts them: what the speed of a plan is fitted on.

A block of a transformer is `*` and `-` or `E` here. A gated MLP of width f has three matrices where the squared ReLU
has two: its width is written as 1.5 f, which gives its parameters and FLOPs. A shared expert of width 1 is none.
"""

from __future__ import annotations

from dataclasses import replace

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.presets import PRESETS


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
