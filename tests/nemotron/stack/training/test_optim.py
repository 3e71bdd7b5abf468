"""Parameter groups on the real model, the update rule against its formula, learning rates against values by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nemotron.kit.schemas.optimizer import AdamWConfig, OptimizerConfig, SchedulerConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr


def test_every_parameter_of_the_hybrid_model_is_in_the_right_group(small_model: Callable[..., NemotronH]) -> None:
    model = small_model("ME*-")
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))
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
    optimizer = build_optimizer(model, AdamWConfig(lr=123.0, adam_beta2=0.95, weight_decay=0.5))
    set_lr(optimizer, 0.1)
    model.weight.grad, model.bias.grad = torch.tensor([[1e-3, -50.0]]), torch.tensor([7.0])
    optimizer.step()
    assert model.weight.tolist()[0] == pytest.approx([2.0 * 0.95 - 0.1, -0.95 + 0.1], abs=1e-5)
    assert model.bias.item() == pytest.approx(3.9)  # no decay


def test_frozen_parameters_stay_out_and_none_is_an_error() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    adam = AdamWConfig(lr=1.0, adam_beta2=0.95, weight_decay=0.1)
    assert [len(group["params"]) for group in build_optimizer(model, adam).param_groups] == [1]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable"):
        build_optimizer(model, adam)


def settings(
    lr: float, min_lr: float, train_iters: int, **scheduler: object
) -> tuple[int, OptimizerConfig, SchedulerConfig]:
    """What `lr_at` takes after the step."""
    optimizer = OptimizerConfig(lr=lr, min_lr=min_lr, adam_beta2=0.95, weight_decay=0.1)
    return train_iters, optimizer, SchedulerConfig.model_validate(scheduler)


def test_wsd_linear_has_the_published_shape() -> None:
    # Nano 3: warm-up, constant for 80 %, linear decay over the last 20 % to 1e-5 of a peak of 1e-3.
    schedule = settings(1e-3, 1e-5, 1000, lr_warmup_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=200)
    rates = [lr_at(step, *schedule) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[4] == pytest.approx(5e-4)
    assert rates[9:800] == [1e-3] * 791
    assert rates[899] == pytest.approx((1e-3 + 1e-5) / 2)  # half of the decay
    assert rates[999] == pytest.approx(1e-5, rel=1e-12)
    steps_down = [a - b for a, b in itertools.pairwise(rates[800:])]
    assert steps_down == pytest.approx([(1e-3 - 1e-5) / 200] * 199)


def test_minus_sqrt_falls_by_half_in_the_first_quarter() -> None:
    schedule = settings(1.0, 0.0, 500, lr_wsd_decay_iters=400, lr_wsd_decay_style="minus_sqrt")
    assert lr_at(99, *schedule) == 1.0
    assert lr_at(199, *schedule) == pytest.approx(0.5)  # sqrt(1/4)
    assert lr_at(499, *schedule) == pytest.approx(0.0, abs=1e-12)


def test_cosine_is_symmetric_about_its_middle() -> None:
    schedule = settings(3.0, 1.0, 110, lr_warmup_iters=10, lr_decay_style="cosine")
    assert lr_at(59, *schedule) == pytest.approx(2.0)
    assert lr_at(34, *schedule) - 2.0 == pytest.approx(math.cos(math.pi / 4))
    assert lr_at(34, *schedule) - 2.0 == pytest.approx(2.0 - lr_at(84, *schedule))
    assert lr_at(109, *schedule) == pytest.approx(1.0)


def test_constant_after_warm_up_and_beyond_the_end() -> None:
    schedule = settings(2e-5, 0.0, 20, lr_warmup_iters=4, lr_decay_style="constant")
    assert [lr_at(step, *schedule) for step in (0, 3, 4, 19, 500)] == pytest.approx([5e-6, 2e-5, 2e-5, 2e-5, 2e-5])
