"""The estimate of a training run's memory: against what autograd really keeps, and the refusal at its limit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.training import TrainedModelConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.training import memory
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.memory import Needs, activation_bytes_per_token, check_memory


def kept_bytes_per_token(model: NemotronH, length: int, bf16: bool) -> float:
    """What a forward pass keeps for the backward pass, each storage once, weights and their bf16 copies aside."""
    sizes: dict[int, int] = {}
    storages = []
    weights = {tuple(parameter.shape) for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tuple(tensor.shape) not in weights and tuple(tensor.T.shape if tensor.ndim == 2 else ()) not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            storages.append(storage)  # none is freed, so no address is given twice
        return tensor

    ids = torch.randint(0, model.config.vocab_size, (4, length))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        next_token_loss(model(ids).logits, ids)
    return sum(sizes.values()) / ids.numel()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("pattern", ["MEM*EME", "MMM", "M-M-*", "***", "EEE"])
def test_the_estimate_is_close_to_what_autograd_keeps(small_model: Any, pattern: str, bf16: bool) -> None:
    sizes = {"hidden_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 32, "chunk_size": 64, "vocab_size": 1024}
    model = small_model(pattern, **sizes, moe_intermediate_size=128, intermediate_size=512)
    estimate = activation_bytes_per_token(model.config, None, bf16)
    assert 0.75 < estimate / kept_bytes_per_token(model, 256, bf16) < 1.35


def test_a_recomputed_block_keeps_its_input() -> None:
    config = PRESETS["nano3-30b"]
    whole = activation_bytes_per_token(config, None, bf16=False)
    selective = TrainedModelConfig(moe_aux_loss_coeff=0, recompute_granularity="selective", recompute_modules=["moe"])
    full = TrainedModelConfig(moe_aux_loss_coeff=0, recompute_granularity="full")
    blocks = len(config.hybrid_override_pattern)
    kept = 4 * (config.vocab_size + 2 * config.hidden_size + blocks * config.hidden_size)
    largest = max(memory.block_values(config, symbol) for symbol in "ME*") - config.hidden_size
    assert activation_bytes_per_token(config, full, bf16=False) == kept + 4 * largest
    assert kept < activation_bytes_per_token(config, selective, bf16=False) < whole


def session_of(world_size: int, bf16: bool = False, async_save: bool = False) -> Any:
    return SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cpu"), world_size=world_size),
        bf16=bf16,
        checkpoints=SimpleNamespace(async_save=async_save),
    )


def test_a_run_that_does_not_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = PRESETS["nano3-30b"], 4096
    session, needs = session_of(2, bf16=True), Needs(config, tokens)
    # 18 bytes a parameter: fp32 weight, gradient and both moments of Adam, bf16 weight; in each of two processes.
    state = 18 * count_parameters(config).total
    logits_gradient = 4 * config.vocab_size
    needed = 2 * (state + tokens * (activation_bytes_per_token(config, None, bf16=True) + logits_gradient))
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    check_memory(session, needs, "train.micro_batch_size")
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match=r"training needs about 1.23 TB of memory \(1.14 TB of weights") as refused:
        check_memory(session, needs, "train.micro_batch_size")
    assert "a smaller train.micro_batch_size needs less" in str(refused.value.hint)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * state - 1)
    with pytest.raises(UserError) as refused:
        check_memory(session, needs, "train.micro_batch_size")
    assert "train.micro_batch_size" not in str(refused.value.hint)
    # Two machines with a process each: either needs half of it.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(memory, "available_bytes", lambda: needed // 2)
    check_memory(session, needs, "train.micro_batch_size")
    # Another machine has less: this one refuses, too, and says what the other has.
    monkeypatch.setattr(memory, "least_of_ranks", lambda margin: margin - 2**30)
    with pytest.raises(UserError, match=r"about 614 GB of memory .* 613 GB are available"):
        check_memory(session, needs, "train.micro_batch_size")


def test_a_gpu_that_cannot_hold_the_weights_is_said_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nano 3 with adapters, and whole; activations are not counted, nor weights of which it holds a slice."""
    session, frozen = session_of(1, bf16=True), 63_000_000_000
    session.ranks.device = torch.device("cuda")
    adapters = Needs(PRESETS["nano3-30b"], 10**9, trained=10**7, frozen_bytes=frozen)
    needed = frozen + 16 * 10**7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 2 * needed))
    check_memory(session, adapters, "train.micro_batch_size")
    session.ranks.world_size = 8
    check_memory(session, Needs(PRESETS["nano3-30b"], 1, sharded=True), "train.micro_batch_size")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 10**9, 2 * needed))
    with pytest.raises(UserError, match=r"needs 63.2 GB of a GPU's memory .* alone, and 62.2 GB are free"):
        check_memory(session, adapters, "train.micro_batch_size")
    with pytest.raises(UserError, match="needs 505 GB"):
        check_memory(session, Needs(PRESETS["nano3-30b"], 1), "train.micro_batch_size")


def test_completions_that_are_sampled_beside_training_are_added(
    small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Needs(small_model("MEM*EME").config, 64, completions=8, completion_tokens=32)
    beside = replace(before, decodes_beside=True)
    state, key = memory.state_bytes(before, 1, bf16=False), "policy.train_micro_batch_size"
    parts = memory.activation_bytes(before, bf16=False), memory.decoding_bytes(before, bf16=False)
    for needs, needed in ((before, state + max(parts)), (beside, state + sum(parts))):
        monkeypatch.setattr(memory, "available_bytes", lambda needed=needed: needed)
        check_memory(session_of(1), needs, key)
        monkeypatch.setattr(memory, "available_bytes", lambda needed=needed: needed - 1)
        with pytest.raises(UserError):
            check_memory(session_of(1), needs, key)


def test_sharded_weights_are_counted_once_for_all_processes() -> None:
    config = PRESETS["nano3-30b"]
    whole = memory.state_bytes(Needs(config, 1), 8, bf16=False)
    assert whole == 16 * count_parameters(config).total
    needs = Needs(config, 1, sharded=True)
    assert memory.state_bytes(needs, 1, bf16=False) == whole  # one process has nobody to share with
    # A process begins with all weights in fp32, whatever becomes of them; two processes have half of the rest each.
    assert memory.state_bytes(needs, 64, bf16=False) == whole // 4
    assert whole / 2 < memory.state_bytes(needs, 2, bf16=False) < 0.6 * whole


def test_copies_that_rank_0_keeps_are_counted() -> None:
    config = PRESETS["nano3-30b"]
    weights = 4 * count_parameters(config).total
    for async_save, sharded, best, copies in (
        (False, False, False, 0), (True, False, False, 3), (False, True, True, 4), (False, False, True, 1)
    ):  # fmt: skip
        needs = Needs(config, 1, sharded=sharded, best_weights=best)
        assert memory.rank_0_bytes(needs, 2, async_save) == copies * weights
    assert memory.state_bytes(Needs(config, 1, copies=1), 1, bf16=False) == 5 * weights
    # Frozen: the weights alone, and of the adapters what all weights had before.
    assert memory.state_bytes(Needs(config, 1, trained=100), 1, bf16=True) == weights + 16 * 100
    assert memory.state_bytes(Needs(config, 1, trained=100, frozen_bytes=7), 1, bf16=True) == 7 + 16 * 100
    assert memory.rank_0_bytes(Needs(config, 1, best_weights=True, trained=100), 1, async_save=True) == 16 * 100


def held_bytes(*caches: Cache) -> int:
    layers = [layer for cache in caches for layer in cache.layers]
    tensors = [t for layer in layers if isinstance(layer, AttentionCache) for t in (layer.k, layer.v)]
    tensors += [t for layer in layers if isinstance(layer, MambaCache) for t in (*layer.conv, layer.ssm)]
    return sum(t.nbytes for t in tensors)


def test_the_states_of_sampled_completions_are_what_a_cache_holds(
    small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_model("MEM*EME").config
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        cache = Cache.allocate(config, 6, 40, dtype, torch.device("cpu"))
        needs, logits = Needs(config, 1, completions=6, completion_tokens=40), 6 * 24 * config.vocab_size
        assert memory.decoding_bytes(needs, bf16) - logits == held_bytes(cache)
        # At the end of the first turn its states, and those that it leaves.
        cache.length = 40
        left = [cache.row(row, 0) for row in range(4)]
        assert memory.decoding_bytes(replace(needs, conversations=4), bf16) - logits == held_bytes(cache, *left)
    needs = Needs(config, 1, completions=600, completion_tokens=40)
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.decoding_bytes(needs, False))
    with pytest.raises(UserError, match="for 600 completions that are sampled together") as refused:
        check_memory(session_of(1), needs, "policy.train_micro_batch_size")
    assert "policy.generation.batch_size" in str(refused.value.hint)


def test_a_judge_has_its_weights_and_decodes_in_its_turn(small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("MEM*EME")
    weights, config = sum(4 * parameter.numel() for parameter in model.parameters()), model.config
    policy, judge = Needs(config, 1, completions=6, completion_tokens=40), Needs(config, 0, completions=600)
    both = replace(policy, judge=judge)
    assert memory.state_bytes(both, 1, bf16=False) == memory.state_bytes(policy, 1, bf16=False) + weights
    assert memory.decoding_bytes(both, False) == memory.decoding_bytes(judge, False)
    assert memory.decoding_bytes(replace(policy, judge=replace(judge, completions=1)), False) == memory.decoding_bytes(
        policy, False
    )
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.decoding_bytes(judge, False))
    with pytest.raises(UserError, match="for 600 completions that are sampled together") as refused:
        check_memory(session_of(1), both, "policy.train_micro_batch_size")
    assert "a smaller judge.batch_size needs less" in str(refused.value.hint)


_MEASURE = """
import re, sys, torch
from pathlib import Path
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.training import memory
from nemotron.stack.training.losses import next_token_loss

bf16, samples = sys.argv[1] == "bf16", int(sys.argv[2])
config = NemotronHConfig(
    hybrid_override_pattern="MEM*EME", hidden_size=256, vocab_size=4096, mamba_num_heads=16, mamba_head_dim=32,
    chunk_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=32, moe_intermediate_size=512,
    n_routed_experts=64, moe_shared_expert_intermediate_size=512, intermediate_size=512, num_experts_per_tok=4,
)

def peak():  # not getrusage: its maximum counts what the process was forked from
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def train(model, batch, length):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.randint(0, 4096, (batch, length))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            next_token_loss(model(ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

before = peak()
model = NemotronH(config)
train(model, 4, 512)
if samples:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        generate(model, [[1] * 64] * 32, 64, samples_per_prompt=samples, stop_token_ids=[])
needs = memory.Needs(config, 4 * 512, completions=32 * samples, completion_tokens=128)
working = max(memory.activation_bytes(needs, bf16), memory.decoding_bytes(needs, bf16))
print((memory.state_bytes(needs, 1, bf16) + working) / (peak() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("precision", "samples"), [("fp32", 0), ("bf16", 0), ("fp32", 16)])
def test_the_estimate_is_near_the_peak_of_a_process(precision: str, samples: int) -> None:
    words = [sys.executable, "-c", _MEASURE, precision, str(samples)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < 1.3


def test_what_is_available_is_no_more_than_the_machine_has() -> None:
    available = memory.available_bytes()
    assert available is not None and 2**20 < available < 2**50
