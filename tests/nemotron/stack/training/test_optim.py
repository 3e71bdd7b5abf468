"""Parameter groups on the real model, and the update rule against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.optim import build_optimizer, set_lr

TINY = NemotronHConfig(
    hybrid_override_pattern="ME*-", vocab_size=32, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=4, n_routed_experts=4,
    moe_intermediate_size=8, moe_shared_expert_intermediate_size=8, intermediate_size=16,
)  # fmt: skip


def test_every_parameter_of_the_hybrid_model_is_in_the_right_group() -> None:
    model = NemotronH(TINY)
    optimizer = build_optimizer(model, 1e-3)
    decay = {id(p) for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    plain = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    names = {name: id(p) for name, p in model.named_parameters()}
    assert decay | plain == set(names.values()) and not decay & plain
    undecayed = {name for name, key in names.items() if key in plain}
    mamba = "backbone.layers.0.mixer."
    assert undecayed == {
        *(f"backbone.layers.{i}.norm.weight" for i in range(4)),
        "backbone.norm_f.weight",
        *(mamba + leaf for leaf in ("A_log", "D", "dt_bias", "norm.weight", "conv1d.bias")),
    }
    assert mamba + "conv1d.weight" in names and mamba + "in_proj.weight" in names


def test_first_step_is_decay_then_sign_of_the_gradient() -> None:
    # Adam's first step is lr * g / (|g| + eps) whatever the size of g; decoupled decay multiplies by 1 - lr * wd.
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.bias.fill_(4.0)
    optimizer = build_optimizer(model, lr=123.0, weight_decay=0.5)
    set_lr(optimizer, 0.1)
    model.weight.grad, model.bias.grad = torch.tensor([[1e-3, -50.0]]), torch.tensor([7.0])
    optimizer.step()
    assert model.weight.tolist()[0] == pytest.approx([2.0 * 0.95 - 0.1, -0.95 + 0.1], abs=1e-5)
    assert model.bias.item() == pytest.approx(3.9)  # no decay


def test_frozen_parameters_stay_out_and_none_is_an_error() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in build_optimizer(model, 1.0).param_groups] == [1]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable"):
        build_optimizer(model, 1.0)
