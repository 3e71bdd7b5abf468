"""Memory of a GPU against closed forms, published sizes, and what Megatron-Bridge's developers measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import Layout, with_parallel
from nemotron.stack.planning.memory import sequence_bytes, stage_memory, stage_parameters, training_memory

H, FF, V, BLOCKS, SEQ = 1024, 4096, 32_000, 8, 512
DENSE = NemotronHConfig(
    hybrid_override_pattern="*-" * (BLOCKS // 2), hidden_size=H, vocab_size=V, num_attention_heads=8,
    num_key_value_heads=8, head_dim=128, intermediate_size=FF,
)  # fmt: skip
NANO = with_parallel(Layout(PRESETS["nano3-30b"], 16, 8192, 16), expert_model_parallel_size=8)


def test_a_dense_model_on_one_gpu_and_on_four_replicas() -> None:
    layers = BLOCKS // 2
    parameters = layers * (4 * H * H + 2 * H * FF) + BLOCKS * H + H + 2 * V * H
    one = training_memory(Layout(DENSE, 1, SEQ, 4))
    assert (one.weights, one.gradients, one.optimizer) == (2 * parameters, 2 * parameters, 12 * parameters)
    four = training_memory(Layout(DENSE, 4, SEQ, 4, gradient_bytes=4))
    assert (four.weights, four.gradients, four.optimizer) == (2 * parameters, 4 * parameters, 3 * parameters)
    # a block's input and normalised input; q, k, v, output and the sums of 8 heads; both sides of the squared ReLU
    attention = 2 * 2 * H + 2 * 4 * H + 4 * 8
    mlp = 2 * 2 * H + 2 * 2 * FF
    assert one.activations == SEQ * layers * (attention + mlp)
    assert one.logits == SEQ * V * 6
    assert one.mtp == 0


@pytest.mark.parametrize(
    ("name", "total"), [("nano3-30b", 31.578e9), ("super3-120b", 120.669e9), ("nano2-12b", 12.310e9)]
)
@pytest.mark.parametrize(("pipeline", "expert"), [(1, 1), (2, 8), (4, 4)])
def test_the_parts_of_all_gpus_are_the_published_model(name: str, total: float, pipeline: int, expert: int) -> None:
    layout = with_parallel(
        Layout(PRESETS[name], pipeline * expert, 8192, 8),
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
    )
    parts = [stage_parameters(layout, stage) for stage in range(pipeline)]
    assert sum(dense + expert * experts for dense, experts in parts) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("modules", "measured"),
    [(("moe",), 64.653), (("moe", "layernorm"), 63.639)],
)
def test_what_was_measured_of_nano_on_16_h100(modules: tuple[str, ...], measured: float) -> None:
    """Peak of allocated memory in BF16, Megatron-Bridge 067f987d, skills/nemo-mbridge-perf-activation-recompute."""
    assert training_memory(replace(NANO, recompute=modules)).total / 1e9 == pytest.approx(measured, rel=0.04)


def test_what_recomputing_the_squared_relu_was_measured_to_save() -> None:
    """4.194 GB, from the same table."""
    saved = training_memory(NANO).total - training_memory(replace(NANO, recompute=("moe_act",))).total
    assert saved / 1e9 == pytest.approx(4.194, rel=0.05)


def test_more_of_each_parallelism_needs_less_memory() -> None:
    def total(gpus: int, **sizes: int | bool) -> int:
        layout = with_parallel(replace(NANO, gpus=gpus, global_batch=64), **sizes)
        return training_memory(layout).total

    tensor = [total(16, tensor_model_parallel_size=size, sequence_parallel=size > 1) for size in (1, 2, 4, 8)]
    assert tensor == sorted(tensor, reverse=True) and len(set(tensor)) == 4
    expert = [total(16, expert_model_parallel_size=size) for size in (1, 2, 4, 8, 16)]
    assert expert == sorted(expert, reverse=True) and len(set(expert)) == 5
    context = [total(16, context_parallel_size=size) for size in (1, 2, 4)]
    assert context == sorted(context, reverse=True) and len(set(context)) == 3
    assert total(32) < total(16)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    layout = with_parallel(Layout(DENSE, 4, SEQ, 16), pipeline_model_parallel_size=4)
    held = [stage_memory(layout, stage).activations for stage in range(4)]
    assert held == [4 * held[3], 3 * held[3], 2 * held[3], held[3]]
    few = replace(layout, global_batch=2)
    assert stage_memory(few, 0).activations == 2 * held[3]


def test_all_blocks_recomputed_leave_their_inputs_and_one_block() -> None:
    whole = training_memory(Layout(DENSE, 1, SEQ, 4, recompute=("full",))).activations
    largest = 2 * H + 2 * 2 * FF  # of an MLP, its input aside
    assert whole == SEQ * (BLOCKS * 2 * H + largest)


def test_multi_token_prediction_is_on_the_last_stage() -> None:
    layout = with_parallel(
        Layout(PRESETS["super3-120b"], 64, 8192, 512), pipeline_model_parallel_size=4, expert_model_parallel_size=16
    )
    held = [stage_memory(layout, stage).mtp for stage in range(4)]
    assert held[:3] == [0, 0, 0] and held[3] > 0


def test_a_sequence_in_generation() -> None:
    """6 attention blocks of 2 KV heads, 23 Mamba blocks of 64 x 64 x 128 states in fp32 (table 1 of the report)."""
    cache, states = sequence_bytes(PRESETS["nano3-30b"], 1000)
    assert cache == 1000 * 6 * 2 * 2 * 128 * 2
    assert states == 23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2)


def test_a_teacher_is_weights_and_logits() -> None:
    """Its weights in bf16 and no state of them; 2 + 2 bytes of both models' logits and 8 x 4 in the loss."""
    larger = replace(DENSE, hybrid_override_pattern="*-" * BLOCKS)
    parameters = BLOCKS * (4 * H * H + 2 * H * FF) + 2 * BLOCKS * H + H + 2 * V * H
    plain = Layout(DENSE, 1, SEQ, 4)
    alone, taught = training_memory(plain), training_memory(replace(plain, teacher=larger))
    assert (alone.teacher, taught.teacher) == (0, 2 * parameters)
    assert taught.logits == SEQ * V * 36
    assert taught.total - alone.total == 2 * parameters + SEQ * V * (36 - 6)


def test_a_teacher_is_laid_out_as_its_student() -> None:
    taught = replace(NANO, teacher=NANO.model, recompute=("full",))
    assert training_memory(taught).teacher == training_memory(NANO).weights
    stages = with_parallel(Layout(DENSE, 4, SEQ, 16, teacher=DENSE), pipeline_model_parallel_size=4)
    for stage in range(4):
        memory = stage_memory(stages, stage)
        assert memory.teacher == memory.weights and memory.logits == (SEQ * V * 36 if stage == 3 else 0)
