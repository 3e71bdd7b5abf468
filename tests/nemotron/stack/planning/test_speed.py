"""Parts of the time against closed forms; the fit against the published rows, half of which it has not seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.layout import Layout, with_parallel
from nemotron.stack.planning.published import Row, is_host_bound, layout_of, rl_halves, rows, throughput_halves
from nemotron.stack.planning.references import REFERENCES
from nemotron.stack.planning.rl_step import RlStep, decoding_memory_seconds, rl_parts, rl_seconds
from nemotron.stack.planning.speed import (
    attention_scores,
    coefficients,
    expert_seconds,
    gpus,
    iteration_seconds,
    tensor_seconds,
    token_parts,
)
from nemotron.stack.training.flops import training_flops_per_token

NANO = Layout(PRESETS["nano3-30b"], 16, 8192, 64)
H100 = gpus()["h100"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """benchmarks/plan_fit.py."""
    pytest.importorskip("scipy")
    path = Path(__file__).resolve().parents[4] / "benchmarks/plan_fit.py"
    spec = importlib.util.spec_from_file_location("plan_fit", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- closed forms


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
    model = REFERENCES["LLAMA3.1_8B"]
    step = RlStep(Layout(model, 8, 4096, 512), 512, 1000.0, 0, 8, 1)
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
    model = REFERENCES["LLAMA3.1_8B"]
    on, off = (RlStep(Layout(model, 8, 4096, 512), 512, 1000.0, lag, 8, 1) for lag in (0, 1))
    parts = rl_parts(on, H100)
    assert rl_seconds(parts, 0) == pytest.approx(sum(parts.values()))
    parts = rl_parts(off, H100)
    assert rl_seconds(parts, 1) == pytest.approx(max(parts["training"], parts["generation"]) + parts["all else"])


# ---- published rows


def test_our_flops_a_token_are_those_of_the_page() -> None:
    """Its TFLOP/s by its tokens/s. GPT OSS is left out: half of its attention has a window, and the page counts it in
    two ways."""
    for row in rows("throughput.csv"):
        if row["model"] != "GPT OSS 120B":
            page = float(row["tflops"]) * 1e12 / float(row["tokens_s_gpu"])
            ours = training_flops_per_token(REFERENCES[row["model"]], int(row["seq"]))
            assert ours == pytest.approx(page, rel=0.09), row


@pytest.mark.parametrize(("halves", "least"), [(throughput_halves, 50), (rl_halves, 20)])
def test_the_halves_share_no_row(halves: Callable[[], tuple[list[Row], list[Row]]], least: int) -> None:
    fitted, held_out = halves()
    assert len(fitted) + len(held_out) >= least and 0 <= len(fitted) - len(held_out) <= 1
    assert not [row for row in fitted if row in held_out]
    assert all(row["commit"] and row["page"].endswith(".md") for row in (*fitted, *held_out))


def test_the_recorded_coefficients_are_the_fit(benchmark: ModuleType) -> None:
    """To three digits, so that nobody turns them by hand."""
    fit = benchmark.fit_throughput(throughput_halves()[0])
    assert fit == pytest.approx(coefficients("training"), rel=5e-3)
    assert benchmark.fit_rl(rl_halves()[0]) == pytest.approx(coefficients("rl"), rel=2e-2)


def test_errors_of_the_rows_that_were_held_out(benchmark: ModuleType) -> None:
    """As docs/guides/plan.md states them. A better fit may lower the bounds."""
    off = sorted(
        abs(predicted / float(row["tokens_s_gpu"]) - 1)
        for row, predicted in benchmark.throughput_errors(throughput_halves()[1])
    )
    assert sum(off) / len(off) < 0.15 and off[len(off) // 2] < 0.09 and sum(error <= 0.15 for error in off) >= 17
    off = sorted(abs(predicted / float(row["step_s"]) - 1) for row, predicted in benchmark.rl_errors(rl_halves()[1]))
    assert sum(off) / len(off) < 0.21 and sum(error <= 0.15 for error in off) >= 5


def test_the_guide_shows_every_row(benchmark: ModuleType) -> None:
    guide = (Path(__file__).resolve().parents[4] / "docs/guides/plan.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in (*benchmark.throughput_table(), *benchmark.rl_table()) if line not in guide] == []


def test_every_published_row_can_be_planned() -> None:
    for row in rows("throughput.csv"):
        layout = layout_of(row)
        assert layout.data >= 1 and layout.micro_batches >= 1
        assert iteration_seconds(layout, gpus()[row["gpu"].lower()], is_host_bound(row)) > 0
