"""The estimate of a training run's memory: against what autograd really keeps, and the refusal at its limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.training import TrainedModelConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.training import memory
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.memory import activation_bytes_per_token, check_memory


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
@pytest.mark.parametrize("pattern", ["MEM*EME", "MMM", "M-M-*"])
def test_the_estimate_is_close_to_what_autograd_keeps(small_model: Any, pattern: str, bf16: bool) -> None:
    sizes = {"hidden_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 32, "chunk_size": 64, "vocab_size": 1024}
    model = small_model(pattern, **sizes, moe_intermediate_size=128, intermediate_size=512)
    estimate = activation_bytes_per_token(model.config, None, bf16)
    assert 0.6 < estimate / kept_bytes_per_token(model, 256, bf16) < 1.1


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


def test_a_run_that_does_not_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = PRESETS["nano3-30b"], 4096
    session: Any = SimpleNamespace(ranks=SimpleNamespace(device=torch.device("cpu"), world_size=2), bf16=True)
    # 18 bytes a parameter: fp32 weight, gradient and both moments of Adam, bf16 weight; in each of two processes.
    state = 18 * count_parameters(config).total
    logits_gradient = 4 * config.vocab_size
    needed = 2 * (state + tokens * (activation_bytes_per_token(config, None, bf16=True) + logits_gradient))
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    check_memory(session, config, tokens, None, "train.micro_batch_size")
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match=r"training needs about 1.22 TB of memory \(568 GB of weights") as refused:
        check_memory(session, config, tokens, None, "train.micro_batch_size")
    assert "a smaller train.micro_batch_size needs less" in str(refused.value.hint)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * state - 1)
    with pytest.raises(UserError) as refused:
        check_memory(session, config, tokens, None, "train.micro_batch_size")
    assert "train.micro_batch_size" not in str(refused.value.hint)
    session.ranks.device = torch.device("cuda")  # which refuses by itself
    check_memory(session, config, tokens, None, "train.micro_batch_size")


def test_what_is_available_is_no_more_than_the_machine_has() -> None:
    available = memory.available_bytes()
    assert available is not None and 2**20 < available < 2**50
