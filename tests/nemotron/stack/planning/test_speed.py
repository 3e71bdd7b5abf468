"""Parts of the time against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import Layout, with_parallel
from nemotron.stack.planning.rl_step import RlStep, decoding_memory_seconds, rl_parts, rl_seconds
from nemotron.stack.planning.speed import (
    attention_scores,
    coefficients,
    expert_seconds,
    fitted_parts,
    gpus,
    iteration_seconds,
    tensor_seconds,
    token_parts,
)

LLAMA_8B = NemotronHConfig(  # a gated MLP of 14,336 has the matrices of one of 21,504 without a gate
    hybrid_override_pattern="*-" * 32, hidden_size=4096, vocab_size=128_256, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, intermediate_size=21_504,
)  # fmt: skip
NANO = Layout(PRESETS["nano3-30b"], 16, 8192, 64)
H100 = gpus()["h100"]


def test_attention_of_a_causal_sequence() -> None:
    """q.k and p.v over (L + 1) / 2 keys, 2 FLOPs each, three times for the backward pass, in six blocks of 32 x 128."""
    pattern = PRESETS["nano3-30b"].hybrid_override_pattern
    expected = 6 * 3 * 2 * 2 * (32 * 128) * (8192 + 1) / 2
    assert attention_scores(PRESETS["nano3-30b"], pattern, 8192) == pytest.approx(expected, rel=1e-9)


def test_bytes_of_tensor_parallelism() -> None:
    """Two GPUs: a gather and a scatter of 2 x 2,688 bytes a block in both directions, of which each sends half; of two
    tokens, since both work on them."""
    layout = with_parallel(NANO, tensor_model_parallel_size=2, sequence_parallel=True)
    assert tensor_seconds(layout, H100) == pytest.approx(52 * 2 * 2 * (2 * 2688 / 2) * 2 / 450e9)
    assert tensor_seconds(NANO, H100) == 0


def test_bytes_of_expert_parallelism() -> None:
    assert expert_seconds(NANO, H100) == 0
    one_expert = replace(NANO.model, num_experts_per_tok=1)
    two = with_parallel(replace(NANO, model=one_expert), expert_model_parallel_size=2)
    # one expert a token, on the other GPU half of the time: to it and back, forward and backward
    assert expert_seconds(two, H100) == pytest.approx(23 * 4 * 2 * 2688 / 2 / 450e9)
    sixteen = with_parallel(replace(NANO, model=one_expert), expert_model_parallel_size=16)
    near, far = 7 / 16 / 450e9, 1 / 2 / 50e9  # of 16 GPUs, 7 others in the node; half of the tokens leave it
    assert expert_seconds(sixteen, H100) == pytest.approx(23 * 4 * 2 * 2688 * (near + far))


def test_recomputing_experts_costs_a_third_of_them() -> None:
    plain, again = (token_parts(replace(NANO, recompute=modules), H100) for modules in ((), ("moe",)))
    model = NANO.model
    visited = 6 * 2 * 2688 * 1856 + 2 * 2688 * 3712 + 2688 * 128
    assert again["matmul"] - plain["matmul"] == pytest.approx(23 * 2 * visited / 989e12)
    assert again["mamba"] == plain["mamba"] and again["blocks"] > plain["blocks"]
    assert model.num_experts_per_tok == 6


def test_an_iteration_is_never_shorter_than_the_sum_of_gradients() -> None:
    tiny_batch = Layout(PRESETS["nano2-12b"], 64, 128, 64)
    floor = 12.31e9 * 4 / 50e9  # bf16 gradients and weights over the network
    assert iteration_seconds(tiny_batch, H100) == pytest.approx(floor, rel=1e-3)


def test_weights_and_cache_of_decoding() -> None:
    """Llama 3.1 8B, one GPU, 64 sequences: its weights in 4,096 steps; for a token half of its sequence's cache."""
    step = RlStep(Layout(LLAMA_8B, 8, 4096, 512), 512, 1000.0, 0, 8, 1)
    read = 2 * (8.03e9 - 128256 * 4096)  # no row of the embedding but the token's
    cache = 64 * 1000 * 500 * (32 * 2 * 8 * 128 * 2)
    assert decoding_memory_seconds(step, H100) == pytest.approx((4096 * read + cache) / 3.35e12, rel=1e-3)


def test_decoding_reads_and_writes_the_states_of_mamba() -> None:
    """A model of one M block and a tiny vocabulary: 10 sequences of 100 tokens, on one GPU."""
    model = replace(PRESETS["nano3-30b"], hybrid_override_pattern="M", vocab_size=1)
    step = RlStep(Layout(model, 1, 200, 10), 10, 100.0, 0, 1, 1)
    longer = replace(step, sequences=20)
    state = 64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2
    more = decoding_memory_seconds(longer, H100) - decoding_memory_seconds(step, H100)
    assert more == pytest.approx(10 * 100 * 2 * state / 3.35e12)


def test_on_policy_alternates_and_off_policy_overlaps() -> None:
    on, off = (RlStep(Layout(LLAMA_8B, 8, 4096, 512), 512, 1000.0, lag, 8, 1) for lag in (0, 1))
    parts = rl_parts(on, H100)
    assert rl_seconds(parts, 0) == pytest.approx(sum(parts.values()))
    parts = rl_parts(off, H100)
    assert rl_seconds(parts, 1) == pytest.approx(max(parts["training"], parts["generation"]) + parts["all else"])


def test_matrices_keep_the_precision_that_the_config_gives_them() -> None:
    """Super 3 in NVFP4 (arXiv 2604.12374, table 3): attention, latent projections, MTP and 14 of 88 blocks in BF16,
    output projections of Mamba in MXFP8."""
    model, b200 = PRESETS["super3-120b"], gpus()["b200"]
    table = (("*.self_attention.*", "bf16"), ("*_latent_proj", "bf16"), ("*.out_proj", "mxfp8"))
    layout = Layout(model, 64, 8192, 512, precision="nvfp4", matchers=table, bf16_ends=(0, 14))
    h, inner = 4096, 128 * 64
    first, last = model.hybrid_override_pattern[:74], model.hybrid_override_pattern[74:]
    in_proj = h * (2 * inner + 2 * 8 * 128 + 128) + 5 * (inner + 2 * 8 * 128) + 3 * 128 + inner
    attention, latent = h * 128 * (2 * 32 + 2 * 2), 2 * h * 1024
    experts, router = 22 * 2 * 1024 * 2688 + 2 * h * 5376, h * 512
    four_bits = first.count("M") * in_proj + first.count("E") * (experts + router)
    eight_bits = first.count("M") * inner * h
    sixteen_bits = first.count("*") * attention + first.count("E") * latent
    sixteen_bits += last.count("M") * (in_proj + inner * h) + last.count("*") * attention
    sixteen_bits += last.count("E") * (experts + router + latent)
    sixteen_bits += 2 * (attention + experts + router + latent + 2 * h * h)  # MTP, twice
    sixteen_bits += 3 * h * 131_072  # the head, once more for each depth of MTP
    scores = attention_scores(model, model.hybrid_override_pattern + 2 * "*E", 8192)
    parts = token_parts(layout, b200)
    power = 1e12 * b200.sustained
    assert parts["matmul_4bit"] == pytest.approx(6 * four_bits / 9000 / power, rel=1e-6)
    assert parts["matmul"] == pytest.approx(
        (6 * eight_bits / 4500 + (6 * sixteen_bits + scores) / 2250) / power, rel=1e-6
    )


def test_a_graph_of_the_whole_iteration_spares_the_cpu_its_work() -> None:
    eager, graphed = (token_parts(replace(NANO, whole_graph=whole), H100) for whole in (False, True))
    assert eager["host"] == pytest.approx(23 / 8192) and graphed["host"] == 0
    assert eager | {"host": 0} == graphed


def test_a_teacher_is_a_forward_pass() -> None:
    """Llama 3.1 8B teaches: 2 FLOPs a parameter and its scores once, a third of what its blocks move and of starting
    their kernels; nothing of it is computed again."""
    student = replace(LLAMA_8B, hybrid_override_pattern="*-" * 8)
    alone = Layout(student, 8, 4096, 512, recompute=("full",))
    taught = fitted_parts(replace(alone, teacher=LLAMA_8B), H100)
    heads, keys, wide = 32 * 128, 2 * 8 * 128, 21_504
    parameters = 32 * (4096 * (2 * heads + keys) + 2 * 4096 * wide) + 4096 * 128_256
    scores = 32 * 2 * 2 * heads * (4096 + 1) / 2
    moved = 32 * (2 * 2 * 4096 + 2 * (2 * heads + keys) + 4 * 32 + 2 * 2 * 4096 + 2 * 2 * wide)
    fitted = coefficients("training")
    expected = fitted["matmul"] * (2 * parameters + scores) / 989e12
    expected += fitted["blocks"] * moved / 3 / 3.35e12 + fitted["launch"] * 64 / 4096 / 3
    assert taught.pop("teacher") == pytest.approx(expected, rel=1e-6)
    assert taught == fitted_parts(alone, H100)


def test_a_teacher_sends_half_of_what_a_training_does() -> None:
    """TP2: a gather and a scatter a block, of which the backward pass has as many; see the bytes above."""
    student = with_parallel(Layout(LLAMA_8B, 8, 4096, 512), tensor_model_parallel_size=2, sequence_parallel=True)
    taught = fitted_parts(replace(student, teacher=LLAMA_8B), H100)
    others = taught["matmul"] + taught["blocks"] + taught["launch"]
    sent = 64 * 2 * (2 * 4096 / 2) * 2 / 450e9
    assert taught["teacher"] - others / 3 == pytest.approx(coefficients("training")["network"] * sent)
